"""Donated memory: no result shows another's, and nothing is read after it was written over. On real buffers, mesh of
size 1."""

import pytest
import torch

import fsharding as fs
from fsharding import P

MESH = {"d": 1}


def leaf(start=0.0, shape=(4, 4)):
    mesh = fs.make_mesh(MESH, device="cpu")
    return fs.device_put(torch.arange(16.0).reshape(shape) + start, mesh, P("d"))


A = torch.arange(16.0).reshape(4, 4)
B = A + 100
CASES = {
    "also returned": (lambda a, b: (a * 2, a), lambda a, b: (a * 2, a)),
    "returned as a clone": (lambda a, b: (a * 2, a.clone()), None),
    "returned as a view": (lambda a, b: (a * 2, a.T), None),
    "a view of a view": (lambda a, b: (a * 2, a.T[0]), None),
    "diagonal": (lambda a, b: (a * 2, a.diagonal() + 1), None),
    "old and new": (lambda a, b: {"old": b, "new": a + b}, None),
    "swapped": (lambda a, b: (b, a), None),
    "swapped and changed": (lambda a, b: (b + 1, a * 2), None),
    "a view into the other": (lambda a, b: (b.T, a + 1), None),
    "a sum and a view": (lambda a, b: (a + b, b.T), None),
    "one value twice": (lambda a, b: (a + 1, a + 1, (c := a * b), c), None),
    "unchanged": (lambda a, b: (a, b), None),
    "late reader": (lambda a, b: (a + 1, (a @ b).sin() + a), None),
    "chain": (lambda a, b: ((c := a + 1), (d := b + c), c * d), None),
    "dtype view": (lambda a, b: (a * 2, a.view(torch.int32) + 0), None),
}


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("donated", [(0,), (1,), (0, 1)], ids=str)
def test_values_survive_donation(name, donated):
    f, _ = CASES[name]
    a, b = leaf(), leaf(100.0)
    mesh = fs.make_mesh(MESH, device="cpu")
    got = fs.shard(f, mesh, stored_argnums=(0, 1), donate_argnums=donated)(a, b)
    want = f(A.clone(), B.clone())
    want = want.values() if isinstance(want, dict) else want
    got = list(got.values() if isinstance(got, dict) else got)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(fs.device_get(x), y)
    # Results share memory neither with each other nor with what the caller keeps.
    kept = [x for i, x in enumerate((a, b)) if i not in donated]
    locals_ = [x.to_local() if hasattr(x, "to_local") else x for x in got + kept]
    pointers = [x.untyped_storage().data_ptr() for x in locals_]
    assert len(set(pointers)) == len(pointers)


def test_a_donated_leaf_is_gone():
    mesh = fs.make_mesh(MESH, device="cpu")
    a = leaf()
    fs.shard(lambda a: a * 2, mesh, donate_argnums=0)(a)
    for use in (fs.device_get, lambda x: fs.reshard(x, mesh, P()), lambda x: fs.device_put(x, mesh, P("d"))):
        with pytest.raises(fs.ShardingError, match="was donated"):
            use(a)


def test_plain_tensors_are_left_alone():
    mesh = fs.make_mesh(MESH, device="cpu")
    a = A.clone()
    got = fs.shard(lambda a: a * 2, mesh, donate_argnums=0)(a)
    assert torch.equal(a, A) and torch.equal(fs.device_get(got), A * 2)


def test_shared_memory_is_refused():
    mesh = fs.make_mesh(MESH, device="cpu")
    a = leaf()
    f = fs.shard(lambda a, x: (a + 1, x * 2), mesh, donate_argnums=0)
    with pytest.raises(fs.ShardingError, match="a and x share memory"):
        f(a, a)
    with pytest.raises(fs.ShardingError, match="a and x share memory"):
        f(a, a.to_local()[1:])
    inside = leaf().to_local()
    g = fs.shard(lambda a: a + inside, mesh, donate_argnums=0)
    with pytest.raises(fs.ShardingError, match="closes over"):
        g(fs.from_local(inside, mesh, P("d")))
