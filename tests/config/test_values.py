"""Values by annotation: what is taken, what becomes of it, and the exact fault of what is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Protocol

import pytest
import yaml

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.values import Word, coerce, describe, is_writable, takes_bool, takes_many
from tests.config.targets import Half


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Inner:
    count: int
    name: str = "n"


@dataclass
class Outer:
    inner: Inner
    ratio: float = 0.5
    many: tuple[Inner, ...] = field(default_factory=tuple)


class Makes(Protocol):
    def build(self) -> int: ...


Switch = Literal["on", "off"]
Count = NewType("Count", int)


def same(value: Any, expected: Any) -> bool:
    return type(value) is type(expected) and value == expected


@pytest.mark.parametrize(
    ("text", "annotation", "expected"),
    [
        ("1e-4", float, 1e-4),
        ("1.0e9", float, 1e9),
        ("3", float, 3.0),
        ("'1e-4'", float, 1e-4),
        (".inf", float, float("inf")),
        ("7", int, 7),
        ("true", bool, True),
        ("off", bool, False),
        ("off", Switch, "off"),
        ("on", Switch, "on"),
        ("no", Literal["no", "maybe"], "no"),
        ("'off'", Switch, "off"),
        ("off", Literal["off"] | bool, "off"),
        ("full", Literal["none", "full"], "full"),
        ("2", Literal[1, 2], 2),
        ("null", int | None, None),
        ("None", int | None, None),
        ("3", int | None, 3),
        ("3", float | None, 3.0),
        ("3", float | int, 3),
        ("3.5", int | float, 3.5),
        ("x", int | str, "x"),
        ("3", int | str, 3),
        ("[1, 2]", list[float], [1.0, 2.0]),
        ("[1, 2]", tuple[float, ...], (1.0, 2.0)),
        ("[1, a]", tuple[int, str], (1, "a")),
        ("[1, 2]", Sequence[int], [1, 2]),
        ("[]", tuple[int, ...], ()),
        ("[1, a]", list, [1, "a"]),
        ("{a: 1}", dict[str, float], {"a": 1.0}),
        ("{a: 1}", Mapping[str, int], {"a": 1}),
        ("red", Color, Color.RED),
        ("a/b", Path, Path("a/b")),
        ("5", Annotated[int, "doc"], 5),
        ("5", Count, 5),
        ("5", Any, 5),
        ("{inner: {count: 2}, ratio: 1, many: [{count: 3, name: m}]}", Outer, Outer(Inner(2), 1.0, (Inner(3, "m"),))),
    ],
)
def test_yaml_values(text, annotation, expected):
    assert same(coerce(yaml.safe_load(text), annotation, "p"), expected)


@pytest.mark.parametrize(
    ("word", "annotation", "expected"),
    [
        ("007", str, "007"),
        ("true", str, "true"),
        ("1e-4", str, "1e-4"),
        ("None", str | None, None),
        ("null", str | None, None),
        ("", str | None, ""),
        ("007", str | None, "007"),
        ("1e-4", float, 1e-4),
        ("-1", int, -1),
        ("off", Switch, "off"),
        ("off", bool, False),
        ("True", bool, True),
        ("none", Literal["none", "full"] | None, "none"),
        ("2", Literal[1, 2], 2),
        ("[007, 8]", list[str], ["007", "8"]),
        ("[1, 2.5]", tuple[float, float], (1.0, 2.5)),
        ("{a: 007}", dict[str, str], {"a": "007"}),
        ("{count: 2, name: 007}", Inner, Inner(2, "007")),
        ("blue", Color, Color.BLUE),
        ("[1, 2]", Any, [1, 2]),
        ("a: b: c", Any, "a: b: c"),
        ("7", int | str, 7),
        ("x", int | str, "x"),
        ("true", str | bool, True),
        ("007x", str | bool, "007x"),
    ],
)
def test_command_line_words(word, annotation, expected):
    assert same(coerce(Word(word), annotation, "p"), expected)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        ("10x", int, "p: expected int, got text '10x'; give a whole number"),
        ("10", int, "p: expected int, got text '10'; give a whole number, without quotes"),
        (True, int, "p: expected int, got bool true; give a whole number"),
        (True, float, "p: expected float, got bool true; give a number"),
        (3.0, int, "p: expected int, got float 3.0; give a whole number"),
        (None, int, "p: expected int, got nothing; give a whole number"),
        (1, bool, "p: expected bool, got int 1; give true or false"),
        ("fast", float, "p: expected float, got text 'fast'; give a number"),
        (7, str, "p: expected str, got int 7; put it in quotes"),
        ([1], str, "p: expected str, got a list of 1; give text"),
        ("10x", int | None, "p: expected int or None, got text '10x'; give a whole number"),
        ("x", int | bool, "p: expected int or bool, got text 'x'; give a value of type int or bool"),
        ("ful", Literal["none", "full"], "p: expected one of none, full, got text 'ful'; did you mean 'full'?"),
        (False, Literal["on", "full"], "p: expected one of on, full, got bool false; choose one of full, on"),
        (True, Literal[1, 2], "p: expected one of 1, 2, got bool true; choose one of 1, 2"),
        (3, list[int], "p: expected list of int, got int 3; give a list such as [a, b]"),
        ("ab", list[str], "p: expected list of str, got text 'ab'; give a list such as [a, b]"),
        ([1], tuple[float, float], "p: expected 2 values (float, float), got 1; give exactly that many"),
        ([1, "x"], tuple[int, int], "p.1: expected int, got text 'x'; give a whole number"),
        ({"a": "x"}, dict[str, int], "p.a: expected int, got text 'x'; give a whole number"),
        (
            [1],
            dict[str, int],
            "p: expected mapping of str to int, got a list of 1; give a mapping such as {name: value}",
        ),
        ("rad", Color, "p: expected one of red, blue, got text 'rad'; did you mean 'red'?"),
        (3, Path, "p: expected Path, got int 3; give a value of type Path, which only Python can"),
        (
            3,
            Callable[..., Any],
            "p: expected Callable, got int 3; give a value of type Callable, which only Python can",
        ),
        (3, Inner, "p: expected Inner, got int 3; give a mapping of its fields"),
        (Word("10x"), int, "p: expected int, got text '10x'; give a whole number"),
        (Word("1"), bool, "p: expected bool, got int 1; give true or false"),
        (Word("maybe"), bool, "p: expected bool, got text 'maybe'; give true or false"),
    ],
)
def test_what_does_not_fit_is_named_with_its_remedy(value, annotation, message):
    with pytest.raises(ConfigError) as caught:
        coerce(value, annotation, "p")
    assert str(caught.value) == message


def test_every_fault_inside_is_reported():
    with pytest.raises(ConfigError) as caught:
        coerce({"inner": {"nam": 1}, "ratio": "x", "many": [{"count": "a"}, {"count": True}]}, Outer, "o")
    assert sorted(map(str, caught.value.faults)) == [
        "o.inner.count: is missing; give a value of type int",
        "o.inner.nam: Inner has no such field; did you mean 'name'?",
        "o.many.0.count: expected int, got text 'a'; give a whole number",
        "o.many.1.count: expected int, got bool true; give a whole number",
        "o.ratio: expected float, got text 'x'; give a number",
    ]


def test_a_fault_inside_an_optional_list_keeps_its_own_path():
    with pytest.raises(ConfigError) as caught:
        coerce([1, "x"], list[int] | None, "p")
    assert str(caught.value) == "p.1: expected int, got text 'x'; give a whole number"


def test_a_boolean_that_two_words_of_a_literal_could_have_been_is_not_guessed():
    with pytest.raises(ConfigError, match="expected one of off, no, got bool false"):
        coerce(False, Literal["off", "no"], "p")


def test_objects_of_a_program_pass_where_they_are_declared():
    inner, function = Inner(1), len
    assert coerce(inner, Inner, "p") is inner
    assert coerce(function, Callable[..., int], "p") is function
    assert coerce(inner, Makes, "p") is inner  # a Protocol promises methods, which no instance check sees


def test_facts_about_annotations():
    assert describe(float | None) == "float or None"
    assert describe(tuple[float, ...]) == "list of float"
    assert describe(dict[str, int]) == "mapping of str to int"
    assert takes_many(tuple[int, ...] | None) and not takes_many(str)
    assert takes_bool(bool | None) and not takes_bool(int)
    assert is_writable(dict[str, list[int]] | None) and is_writable(Inner) and is_writable(Any)
    assert not is_writable(Callable[..., Any] | None) and not is_writable(type[Inner]) and not is_writable(Makes)


def test_what_a_dataclass_refuses_by_itself_is_told():
    with pytest.raises(
        ConfigError, match=r"^p\.half: Half raised ValueError: 2\.0 is more than all; give values that it"
    ):
        coerce({"half": {"part": 2}}, dict[str, Half | None], "p")


@pytest.mark.parametrize("text", ["2024-13-01", "!!int a", "9" * 5000, "[" * 3000])
def test_a_word_that_yaml_cannot_read_is_text(text):
    assert coerce(Word(text), str | None, "p") == text
    with pytest.raises(ConfigError, match=r"^p: expected int"):
        coerce(Word(text), int, "p")
