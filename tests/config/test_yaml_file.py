"""YAML files: what is refused, and the line of each value."""

from __future__ import annotations

import pytest

from hyper_parallel.config import yaml_file
from hyper_parallel.config.errors import ConfigError, Fault


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_and_read(text: str) -> yaml_file.YamlFile:
        (tmp_path / "run.yaml").write_text(text)
        return yaml_file.read("run.yaml")

    return write_and_read


def test_lines_of_values_in_groups_lists_and_merged_groups(read):
    file = read("# comment\na: 1\nb:\n  c: {d: 2}\n  e:\n  - f: 3\n  - g\nh: &h\n  i: 4\nj:\n  k: 5\n  <<: *h\n")
    assert file.content == {"a": 1, "b": {"c": {"d": 2}, "e": [{"f": 3}, "g"]}, "h": {"i": 4}, "j": {"i": 4, "k": 5}}
    assert file.lines == {
        "a": 2, "b": 3, "b.c": 4, "b.c.d": 4, "b.e": 5, "b.e.0": 6, "b.e.0.f": 6, "b.e.1": 7,
        "h": 8, "h.i": 9, "j": 10, "j.k": 11, "j.i": 9,
    }  # fmt: skip


def test_a_merged_name_gives_way_to_an_own_one(read):
    file = read("h: &h\n  i: 4\nj:\n  i: 5\n  <<: *h\n")
    assert (file.content["j"], file.lines["j.i"]) == ({"i": 5}, 4)


def test_faults_get_the_line_of_the_nearest_group_that_the_file_names(read):
    file = read("a:\n  b: 1\n")
    placed = file.placed([Fault(p, "f", "r") for p in ("a.b", "a.b.c", "a.x", "z")] + [Fault("a", "f", "r", "o:7")])
    assert [str(fault) for fault in placed] == [
        "a.b: f (run.yaml:2); r",
        "a.b.c: f (run.yaml:2); r",
        "a.x: f (run.yaml:1); r",
        "z: f (run.yaml); r",
        "a: f (o:7); r",
    ]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ["run.yaml: the file is empty; say what to train, as `model:` with a `_target_`"]),
        ("# nothing\n", ["run.yaml: the file is empty; say what to train, as `model:` with a `_target_`"]),
        ("- a\n", ["run.yaml: the file holds a list; write groups, as in `model:` and `training:`"]),
        ("7\n", ["run.yaml: the file holds a single value; write groups, as in `model:` and `training:`"]),
        (
            "a:\n  b: 1\n  b: 2\nc: 3\na: 4\n",
            [
                "a.b: is given twice, on lines 2 and 3 (run.yaml:3); keep one of them",
                "a: is given twice, on lines 1 and 5 (run.yaml:5); keep one of them",
            ],
        ),
        ("a:\n- {b: 1, b: 2}\n", ["a.0.b: is given twice, on lines 2 and 2 (run.yaml:2); keep one of them"]),
        ("a: &a [*a]\n", ["a.0: an alias stands inside its own anchor (run.yaml:1); write the value out"]),
        (
            "a: [1\nb: 2\n",
            [
                "run.yaml: is no YAML: while parsing a flow sequence expected ',' or ']', but got ':' (run.yaml:2); "
                "mend the line"
            ],
        ),
        (
            "a: !!python/object:os.system x\n",
            [
                "run.yaml: is no YAML: could not determine a constructor for the tag "
                "'tag:yaml.org,2002:python/object:os.system' (run.yaml:1); mend the line"
            ],
        ),
    ],
)
def test_files_that_hold_no_groups(text, faults, read):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert [str(fault) for fault in caught.value.faults] == faults


def test_files_that_cannot_be_read(tmp_path, read):
    with pytest.raises(ConfigError, match=r"^none\.yaml: there is no such file; give a YAML file$"):
        yaml_file.read("none.yaml")
    with pytest.raises(ConfigError, match=r"^\.: cannot be read \(.*Is a directory.*\); give a readable file of UTF-8"):
        yaml_file.read(".")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match=r"^latin\.yaml: cannot be read \('utf-8' codec can't decode"):
        yaml_file.read("latin.yaml")
    with pytest.raises(ConfigError, match=r"^run\.yaml: is no YAML: unacceptable character #x0001"):
        read("a: \x01\n")
    with pytest.raises(ConfigError, match=r"^run\.yaml: is no YAML: month must be in 1\.\.12; mend it$"):
        read("a: 2024-13-01\n")
    with pytest.raises(ConfigError, match=r"^run\.yaml: is no YAML: Exceeds the limit"):
        read(f"a: {'9' * 5000}\n")
    with pytest.raises(ConfigError, match=r"^run\.yaml: its lists and mappings are nested too deep; write it flatter$"):
        read(f"a: {'[' * 2000}{']' * 2000}\n")


def test_names_are_words_as_they_are_written(read):
    file = read("on: 1\nyes: 2\n3: 4\n")
    assert (file.content, file.lines) == ({"on": 1, "yes": 2, 3: 4}, {"on": 1, "yes": 2, "3": 3})
