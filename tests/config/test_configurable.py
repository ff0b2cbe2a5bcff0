"""Config trees: build, traversal, replacement, derivation, seal, plain data."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.config.configurable import ConfigNode, Configurable, parts, plain, setting, slot, target_path


@dataclass(kw_only=True, slots=True)
class Leaf(ConfigNode):
    value: int = 1


class Component(Configurable):
    """Does something."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        size: int = 3
        leaf: Leaf = field(default_factory=Leaf)

    def __init__(self, config: Config, *, extra: str = "") -> None:
        self.config = config
        self.extra = extra


class Child(Component):
    pass


@dataclass
class Plain:
    node: Leaf
    name: str = "plain"


Pair = namedtuple("Pair", ["left", "right"])


@dataclass(kw_only=True, slots=True)
class Tree(ConfigNode):
    first: Any = slot(Component.Config, runtime="extra other")
    items: Any = field(default_factory=lambda: (Leaf(value=2), Leaf(value=3)))
    table: dict[str, Leaf] = field(default_factory=lambda: {"a": Leaf(value=4)})
    plain: Any = field(default_factory=lambda: Plain(Leaf(value=5)))
    folder: str = setting("out", aliases=("dir",))


def test_build_makes_the_owner_of_each_config_class():
    built = Component.Config(size=4).build(extra="x")
    assert (type(built), built.config.size, built.extra) == (Component, 4, "x")
    assert type(Child.Config().build()) is Child
    assert type(Component.Config().build()) is Component
    assert Child.Config().size == 3


def test_a_runtime_argument_named_as_a_field_is_refused():
    with pytest.raises(TypeError, match=r"Component\.Config\.build: size given both in the config and at run time"):
        Component.Config().build(size=4)


def test_a_nested_config_must_be_a_keyword_only_slotted_dataclass():
    with pytest.raises(TypeError, match="decorate it with @dataclass"):

        class Bad(Configurable):
            class Config(Configurable.Config):
                pass


def test_unknown_fields_cannot_be_set():
    with pytest.raises(AttributeError):
        Leaf().valu = 3


def test_traverse_finds_nodes_in_containers_and_plain_dataclasses_parents_first():
    found = {path: getattr(node, "value", None) for path, node in Tree().traverse()}
    assert found == {
        "": None, "first": None, "first.leaf": 1, "items.0": 2, "items.1": 3, "table.a": 4, "plain.node": 5
    }  # fmt: skip
    assert next(iter(dict(Tree().traverse("root")))) == "root"


def test_replace_all_replaces_everywhere_children_first():
    tree = Tree(items=[Leaf(value=2), Pair(Leaf(value=6), 7)])
    kept = tree.first

    def double(leaf: Leaf) -> Leaf:
        return Leaf(value=leaf.value * 10)

    assert tree.replace_all(Leaf, double) == 5
    assert [node.value for _, node in tree.traverse() if isinstance(node, Leaf)] == [10, 20, 60, 40, 50]
    assert tree.first is kept and type(tree.plain) is Plain and tree.plain.name == "plain"
    assert type(tree.items) is list and type(tree.items[1]) is Pair and tree.items[1].right == 7
    seen = []
    assert tree.replace_all(Component.Config, lambda node: seen.append(node.leaf.value) or Leaf(value=0)) == 1
    assert seen == [10] and tree.first == Leaf(value=0)


def test_replace_all_leaves_the_node_that_it_is_called_on():
    leaf = Leaf()
    assert leaf.replace_all(Leaf, lambda _: Leaf(value=9)) == 0 and leaf.value == 1


def test_derive_is_an_independent_open_copy():
    tree = Tree()
    tree.seal()
    other = tree.derive(folder="b")
    other.first.leaf.value = 9
    assert (other.folder, tree.folder, tree.first.leaf.value) == ("b", "out", 1)
    with pytest.raises(TypeError, match="Tree has no field 'foldr'; it has first, folder, items, plain, table"):
        tree.derive(foldr="b")


def test_seal_freezes_every_node_and_says_what_to_do():
    tree = Tree()
    tree.seal()
    for change in (
        lambda: setattr(tree, "folder", "x"),
        lambda: setattr(tree.first.leaf, "value", 2),
        lambda: setattr(tree.items[1], "value", 2),
        lambda: setattr(tree.table["a"], "value", 2),
        lambda: setattr(tree.plain.node, "value", 2),
    ):
        with pytest.raises(AttributeError, match=r"this config is sealed, .* use derive\(\)"):
            change()


def test_copies_and_pickles_are_equal_and_open():
    tree = Tree()
    tree.seal()
    for other in (copy.deepcopy(tree), copy.copy(tree), pickle.loads(pickle.dumps(tree))):
        assert other == tree
        other.folder = "changed"
        assert other != tree


def test_to_dict_is_plain_data_and_names_the_classes_to_build():
    assert Tree().to_dict() == {
        "first": {"_target_": target_path(Component.Config), "size": 3, "leaf": {"value": 1}},
        "items": [{"value": 2}, {"value": 3}],
        "table": {"a": {"value": 4}},
        "plain": {"node": {"value": 5}, "name": "plain"},
        "folder": "out",
    }
    assert target_path(Child.Config).endswith("test_configurable.Child.Config")


def test_plain_turns_enums_paths_and_functions_into_text():
    class Color(Enum):
        RED = "red"

    assert plain([Color.RED, Path("a/b"), (1, 2.5), {3: None}]) == ["red", "a/b", [1, 2.5], {3: None}]
    assert plain(target_path) == "hyper_parallel.config.configurable.target_path"
    assert plain(Leaf) == target_path(Leaf)


def test_parts_are_segments_of_a_path():
    assert list(parts([5, 6])) == [("0", 5), ("1", 6)]
    assert list(parts({"k": 1})) == [("k", 1)]
    assert list(parts(Leaf(value=2))) == [("value", 2)]
    assert list(parts("text")) == []
