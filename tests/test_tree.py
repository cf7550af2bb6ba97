"""Key paths, prefix trees, and errors that say where."""

import collections

import optree
import pytest
import torch

from fsharding import tree
from fsharding.annotate.spec import P
from fsharding.errors import ShardingError

Pair = collections.namedtuple("Pair", "left right")


def sample():
    return {"layers": [{"w_in": 1, "bias": None}, {"w_in": 2, "bias": 3}], "embed": 4, "pair": Pair(5, (6,)), "a b": 7}


def test_paths_read_as_typed_and_keys_are_sorted():
    paths, leaves, _ = tree.flatten_with_paths(sample())
    assert dict(zip(paths, leaves, strict=True)) == {
        "['a b']": 7, "embed": 4, "layers[0].w_in": 1, "layers[1].bias": 3, "layers[1].w_in": 2, "pair.left": 5,
        "pair.right[0]": 6}
    assert paths == sorted(paths)
    assert tree.flatten_with_paths(9)[:2] == ([""], [9])
    assert tree.flatten_with_paths(None)[:2] == ([], [])


def test_unflatten_is_the_inverse():
    _, leaves, treedef = tree.flatten_with_paths(sample())
    assert tree.unflatten(treedef, leaves) == sample()


def test_insertion_order_does_not_matter():
    one, two = {"b": 1, "a": 2}, {"a": 2, "b": 1}
    assert tree.flatten_with_paths(one)[:2] == tree.flatten_with_paths(two)[:2]


def test_specs_and_unregistered_objects_are_leaves():
    class Thing:
        pass

    thing = Thing()
    assert tree.flatten_with_paths([P("a", None), thing])[1] == [P("a", None), thing]


def test_registered_classes_are_nodes():
    class Box:
        def __init__(self, w):
            self.w = w

    optree.register_pytree_node(Box, lambda box: ([box.w], None, ["w"]), lambda _, children: Box(*children),
                                path_entry_type=optree.GetAttrEntry, namespace="test-tree")
    assert tree.flatten_with_paths(Box(3))[0] == [""]  # only in the namespace that it was registered in
    optree.register_pytree_node(Box, lambda box: ([box.w], None, ["w"]), lambda _, children: Box(*children),
                                path_entry_type=optree.GetAttrEntry, namespace=optree.registry.__GLOBAL_NAMESPACE)
    assert tree.flatten_with_paths([Box(3)])[:2] == (["[0].w"], [3])
    assert tree.broadcast_prefix([Box("x")], [Box({"a": 1, "b": 2})], "specs") == ["x", "x"]


def test_map_with_path():
    got = tree.map_with_path(lambda path, a, b: f"{path}:{a + b}", sample(), sample())
    assert got["layers"] == [{"w_in": "layers[0].w_in:2", "bias": None},
                             {"w_in": "layers[1].w_in:4", "bias": "layers[1].bias:6"}]
    assert isinstance(got["pair"], Pair)


def test_map_accepts_other_containers_of_the_same_paths():
    ordered = collections.OrderedDict([("b", [1, 2]), ("a", 3)])
    assert tree.map_with_path(lambda _, a, b: a + b, {"a": 1, "b": (1, 1)}, ordered) == {"a": 4, "b": (2, 3)}


@pytest.mark.parametrize(("other", "words"), [
    ({"a": 1}, ["it lacks b"]), ({"a": 1, "b": 2, "c": 3}, ["c besides"]), ({"a": 1, "b": None}, ["it lacks b"]),
    ({"a": 1, "b": [2]}, ["it lacks b", "b[0] besides"])])
def test_map_names_the_path_of_a_mismatch(other, words):
    with pytest.raises(ShardingError) as error:
        tree.map_with_path(lambda *_: None, {"a": 1, "b": 2}, other)
    assert all(word in str(error.value) for word in ["tree 2", *words])


def test_prefix_leaves_and_none_stand_for_subtrees():
    prefix = {"layers": P("x"), "embed": None, "pair": Pair(P("y"), None), "a b": P()}
    assert tree.broadcast_prefix(prefix, sample(), "specs") == [P(), None, P("x"), P("x"), P("x"), P("y"), None]
    assert tree.broadcast_prefix(P("x"), [1, None, 2], "specs") == [P("x")] * 2
    assert tree.broadcast_prefix(None, [1, None, 2], "specs") == [None] * 2
    assert tree.broadcast_prefix(P(), torch.ones(2), "specs") == [P()]


@pytest.mark.parametrize(("prefix", "words"), [
    ({"layers": [P(), P()], "embd": P(), "pair": P(), "a b": P()}, ["no entry for embed", "no embd", "mean embed?"]),
    ({"layers": [P()], "embed": P(), "pair": P(), "a b": P()}, ["at layers:", "no entry for layers[1]"]),
    ({"layers": P(), "embed": ("x", None), "pair": P(), "a b": P()}, ["at embed", "tuple", 'P("a", None)']),
    ({"layers": P(), "embed": P(), "pair": {"left": P()}, "a b": P()}, ["at pair"])])
def test_prefix_errors_name_the_path(prefix, words):
    with pytest.raises(ShardingError) as error:
        tree.broadcast_prefix(prefix, sample(), "specs")
    assert all(word in str(error.value) for word in ["specs", *words]), str(error.value)


def test_prefix_deeper_than_an_empty_node():
    with pytest.raises(ShardingError, match="at b: .* empty node"):
        tree.broadcast_prefix({"a": P(), "b": {"c": P()}}, {"a": 1, "b": None}, "specs")
