"""P, its normal form, slices and DTensor placements, against a slice calculator written another way."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from fsharding import _compat
from fsharding.annotate.spec import (
    P,
    axes_of,
    check_sizes,
    from_placements,
    local_slices,
    normalize,
    padded_shape,
    shard_sizes,
    to_placements,
)
from fsharding.errors import ShardingError

MESH = {"a": 4, "b": 3, "c": 2}


def all_specs(ndim, axes=tuple(MESH)):
    """Every way to give ordered tuples of some of the axes to the dims."""
    out = []
    for count in range(len(axes) + 1):
        for order in itertools.permutations(axes, count):
            for dims in itertools.product(range(ndim), repeat=count):
                if list(dims) == sorted(dims):
                    out.append(P(*(tuple(x for x, d in zip(order, dims, strict=True) if d == dim)
                                   for dim in range(ndim))))
    return out


def blocks(array, spec, mesh):
    """rank -> block, by cutting the array step by step; shares nothing with the code under test."""
    names, out = list(mesh), {}
    for rank, place in enumerate(itertools.product(*(range(n) for n in mesh.values()))):
        block = array
        for dim, entry in enumerate(spec):
            for axis in (entry,) if isinstance(entry, str) else entry or ():
                width = math.ceil(block.shape[dim] / mesh[axis])
                pieces = [np.take(block, range(i * width, min((i + 1) * width, block.shape[dim])), axis=dim)
                          for i in range(mesh[axis])]
                block = pieces[place[names.index(axis)]]
        out[rank] = block
    return out


def coordinates(mesh):
    return [dict(zip(mesh, place, strict=True)) for place in itertools.product(*(range(n) for n in mesh.values()))]


def in_mesh_order(spec, mesh):
    order = list(mesh)
    return all([order.index(a) for a in entry] == sorted(order.index(a) for a in entry)
               for entry in spec if isinstance(entry, tuple))


# ---- P -------------------------------------------------------------------------------------------------------------
def test_equality_is_that_of_jax():
    assert P(("a",)) == P("a")
    assert P(()) == P(None)
    assert P("a") != P("a", None)
    assert P(("a", "b")) != P(("b", "a"))
    assert P("a") != ("a",)
    assert len({P("a"), P(("a",)), P("a", None)}) == 2


def test_p_reads_as_typed_and_is_a_sequence():
    spec = P("a", ("b", "c"), None)
    assert repr(spec) == 'P("a", ("b", "c"), None)'
    assert eval(repr(spec)) == spec
    assert repr(P()) == "P()"
    assert list(spec) == ["a", ("b", "c"), None]
    assert (len(spec), spec[1], spec[-1], spec[:2]) == (3, ("b", "c"), None, ("a", ("b", "c")))
    assert axes_of(spec) == ("a", "b", "c")
    assert axes_of(None) == ()


def test_p_is_frozen_and_copies():
    spec = P("a", ("b", "c"))
    with pytest.raises(AttributeError):
        spec.entries = ()
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert copy.deepcopy(spec) == spec


@pytest.mark.parametrize(("make", "words"), [
    (lambda: P("a", "a"), ['"a" twice', 'P("a", "a")']), (lambda: P(("a", "b"), "b"), ['"b" twice']),
    (lambda: P(("a", "a")), ['"a" twice']), (lambda: P(["a"]), ["['a']", "as a tuple"]), (lambda: P(0), ["entry 0"]),
    (lambda: P(("a", None)), ["not None"]), (lambda: P(P("a")), ["an entry is None, an axis name"])])
def test_p_refuses(make, words):
    with pytest.raises(ShardingError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


# ---- normalize -----------------------------------------------------------------------------------------------------
def test_normalize():
    assert normalize(P("a", None, ("b", "c")), 4, MESH) == (("a",), (), ("b", "c"), ())
    assert normalize(None, 2, MESH) == ((), ())
    assert normalize(P(), 0, MESH) == ()


@pytest.mark.parametrize(("spec", "ndim", "words"), [
    (P("efsd"), 1, ["layers.w", 'P("efsd")', "efsdp, ep", 'mean "efsdp"?']), (P("xyz"), 1, ["use one of these"]),
    (P("ep", None), 1, ["layers.w", "2 entries", "1 dims", "surplus"]), (P("ep"), 0, ["0 dims", "P()"]),
    ("ep", 1, ['Write P("ep")']), (("ep", None), 1, ["not a P"])])
def test_normalize_refuses(spec, ndim, words):
    with pytest.raises(ShardingError) as error:
        normalize(spec, ndim, ("efsdp", "ep"), "layers.w")
    assert all(word in str(error.value) for word in words), str(error.value)


# ---- sizes and slices ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 6, 7, 9, 24, 25, 48])
@pytest.mark.parametrize("axes", [(), (4,), (2, 2), (3, 2), (2, 3, 4), (1, 5), (5, 1), (1,)])
def test_shard_sizes_are_nested_chunks(size, axes):
    pieces = [np.arange(size)]
    for parts in axes:
        pieces = [block[i * math.ceil(len(block) / parts):(i + 1) * math.ceil(len(block) / parts)]
                  for block in pieces for i in range(parts)]
    assert shard_sizes(size, axes) == [len(block) for block in pieces]
    assert sum(shard_sizes(size, axes)) == size


@pytest.mark.parametrize("shape", [(24, 48), (7, 5), (1, 30), (0, 3)])
def test_slices_match_the_independent_cut(shape):
    array = np.arange(math.prod(shape)).reshape(shape)
    for spec in all_specs(2):
        dims, want = normalize(spec, 2, MESH), blocks(array, spec, MESH)
        padded = padded_shape(shape, dims, MESH)
        for rank, place in enumerate(coordinates(MESH)):
            got = array[local_slices(shape, dims, MESH, place)]
            assert got.shape == want[rank].shape and (got == want[rank]).all(), (spec, rank)
            assert all(n <= m for n, m in zip(got.shape, padded, strict=True))
        assert padded == want[0].shape


@pytest.mark.parametrize(("shape", "only_in_order"), [((24, 48), False), ((7, 5), True), ((25, 3), True)])
def test_placements_are_what_dtensor_cuts(shape, only_in_order):
    """DTensor, asked for our placements, cuts the same block on each of 24 ranks; and the inverse mapping returns."""
    array = np.arange(math.prod(shape)).reshape(shape)
    names, sizes = tuple(MESH), tuple(MESH.values())
    group = [_compat.phantom_group(f"test-spec/{name}", 0, size) for name, size in MESH.items()]
    meshes = [_compat.build_device_mesh("cpu", sizes, names, group, rank, True) for rank in range(24)]
    specs = [spec for spec in all_specs(2) if in_mesh_order(spec, MESH) or not only_in_order]
    assert len(specs) == (26 if only_in_order else 49) or only_in_order
    for spec in specs:
        placements = to_placements(normalize(spec, 2, names), names, MESH)
        want = blocks(array, spec, MESH)
        for rank, mesh in enumerate(meshes):
            got = distribute_tensor(torch.from_numpy(array), mesh, placements, src_data_rank=None).to_local().numpy()
            assert got.shape == want[rank].shape and (got == want[rank]).all(), (spec, placements, rank)
        back = from_placements(placements, names, MESH, 2)
        assert normalize(back, 2, names) == normalize(spec, 2, names)


@pytest.mark.parametrize("mesh", [{"a": 1, "b": 2, "c": 3}, {"a": 2, "b": 1, "c": 3}, {"a": 2, "b": 3, "c": 1},
                                  {"a": 1, "b": 1, "c": 1}])
def test_size_one_axes_are_plain_shards(mesh):
    """They are kept, read back in mesh order, and describe the same blocks."""
    for spec in all_specs(2):
        placements = to_placements(normalize(spec, 2, mesh), mesh, mesh)
        back = from_placements(placements, mesh, mesh, 2)
        assert sorted(axes_of(back)) == sorted(axes_of(spec))
        array = np.arange(36 * 12).reshape(36, 12)
        one, two = blocks(array, spec, mesh), blocks(array, back, mesh)
        assert all((one[rank] == two[rank]).all() for rank in one)
        for placement, axis in zip(placements, mesh, strict=True):
            assert mesh[axis] > 1 or not isinstance(placement, _compat.StridedShard)


def test_strided_shards_only_where_order_needs_them():
    def kinds(spec):
        return [str(p) for p in to_placements(normalize(spec, 2, MESH), MESH, MESH)]

    assert kinds(P(("a", "b", "c"))) == [str(Shard(0))] * 3
    assert kinds(P(("c", "a"))) == [str(_compat.StridedShard(0, split_factor=2)), str(Replicate()), str(Shard(0))]
    assert kinds(P(("c", "b", "a")))[0] == str(_compat.StridedShard(0, split_factor=6))
    assert kinds(P("a", ("c", "b")))[1] == str(_compat.StridedShard(1, split_factor=2))


@pytest.mark.parametrize(("placements", "words"), [
    ([Partial(), Replicate(), Replicate()], ["pending sum", '"a"']),
    ([_compat.StridedShard(0, split_factor=5), Replicate(), Replicate()], ["view", '"a"']),
    ([Replicate(), Replicate(), _compat.StridedShard(0, split_factor=3)], ["view", '"c"'])])
def test_from_placements_refuses_what_no_p_says(placements, words):
    with pytest.raises(ShardingError) as error:
        from_placements(placements, tuple(MESH), MESH, 2)
    assert all(word in str(error.value) for word in words), str(error.value)


# ---- legality ------------------------------------------------------------------------------------------------------
def test_uneven_in_mesh_order_is_legal_and_out_of_order_is_not():
    check_sizes((5,), (("a", "b"),), MESH)
    check_sizes((24,), (("b", "a"),), MESH)
    check_sizes((5,), (("b", "a"),), {"a": 2, "b": 1})
    with pytest.raises(ShardingError, match=r'w has size 5.*12 \(b=3 and a=4\).*\("a", "b"\)'):
        check_sizes((5,), (("b", "a"),), MESH, where="w")


def test_model_axes_must_divide():
    check_sizes((8, 5), (("a",), ()), MESH, ("a",))
    with pytest.raises(ShardingError, match=r"Dim 1 of w has size 5.*a=4.*model axis.*4 or 8"):
        check_sizes((8, 5), ((), ("a",)), MESH, ("a",), "w")
    with pytest.raises(ShardingError, match="sizes that work are 4"):
        check_sizes((3,), (("a",),), MESH, where="w", even=True)
