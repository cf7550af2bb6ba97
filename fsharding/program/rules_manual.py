"""The local view in the partition: blocks in, collectives between, blocks out.

Inside a region a value is placed without its manual axes: its shape is that of a block, and what ``dims`` still names
are the axes that the body does not see. So every other rule serves it as it is.
"""

from __future__ import annotations

import torch

from fsharding.comm import groups, manual, storage
from fsharding.comm.shards import decode_dims
from fsharding.program.partition import Partition
from fsharding.program.values import Const, Lazy, Placed, Stored, is_routed

A = torch.ops.aten
C = torch.ops._c10d_functional


def _same_mesh(p: Partition, group: str) -> tuple[str, ...]:
    sizes, axes = groups.parse(group)
    if group.partition("/")[0] != p.mesh.alias(()).partition("/")[0]:
        p.fail(f"a `shard_map` over a mesh of {sizes} in a program on {p.mesh!r}: give both the same mesh")
    return axes


def to_local(p: Partition, node, args, kwargs):
    """Lay the value out as the spec says and forget the manual axes."""
    x, text, group = args
    axes, spec = _same_mesh(p, group), decode_dims(text)
    shape = tuple(node.meta["val"].shape)
    if isinstance(x, Const):
        return Const(x.value, shape, x.dtype)
    y = _laid_out(p, x, spec, axes)
    return Placed(y.node, shape, tuple(tuple(a for a in d if a not in axes) for d in y.dims))


def _laid_out(p: Partition, x, spec, axes) -> Placed:
    if isinstance(x, Lazy):
        return p.relayout(x, spec)
    if isinstance(x, Stored):
        x = p.gathered(x, _kept(p, x.dims, spec))
    x = p.total(x)
    if any(map(is_routed, x.dims)):
        p.fail("routed rows enter a `shard_map`: their number differs between ranks. Pass what `combine` gives")
    want = []
    for size, have, now in zip(x.shape, x.dims, spec, strict=True):
        rest = tuple(a for a in have if a not in axes)  # rows that the body does not see stay split where they can
        want.append((*now, *rest) if size % p.mesh.axes_size((*now, *rest)) == 0 else now)
    extra = tuple(real[len(_common(real, p._real(w))) :] for real, w in zip(map(p._real, x.dims), want, strict=True))
    return p.relayout(p.unshard(x, extra), tuple(want))


def _kept(p: Partition, have, spec) -> tuple[str, ...]:
    """The axes of a stored value that the spec wants just as they are: these are not gathered."""
    return tuple(a for h, s in zip(have, spec, strict=True) for a in _common(p._real(h), p._real(s)))


def _common(a, b) -> tuple[str, ...]:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return tuple(a[:n])


def to_global(p: Partition, node, args, kwargs):
    """The block with its manual axes again."""
    y, text, group = args
    _same_mesh(p, group)
    spec, shape = decode_dims(text), tuple(node.meta["val"].shape)
    if isinstance(y, Const):
        return Const(y.value, shape, y.dtype, spec)
    y = p.total(y)
    if any(map(is_routed, y.dims)):
        p.fail("routed rows leave a `shard_map`: their number differs between ranks. Return what `combine` gives")
    return Placed(y.node, shape, tuple((*s, *d) for s, d in zip(spec, y.dims, strict=True)))


def identity(p, node, args, kwargs):
    """Nothing moves: the types of values change, not their blocks."""
    return args[0]


# ---- collectives -----------------------------------------------------------------------------------------------------
def reduce(p: Partition, node, args, kwargs):
    """One all-reduce over the axes."""
    x, op, group = args
    axes = storage.real_axes(p.mesh, _same_mesh(p, group))
    if isinstance(x, Const):
        return Const(x.value * p.mesh.axes_size(axes) if op == "sum" else x.value, x.shape, x.dtype)
    x = p.total(x)
    return Placed(p.emit.all_reduce(x.node, axes, op), x.shape, x.dims) if axes else x


def gather(p: Partition, node, args, kwargs):
    """One all-gather, stacked in front."""
    x, group = args
    axes, shape = storage.real_axes(p.mesh, _same_mesh(p, group)), tuple(node.meta["val"].shape)
    if isinstance(x, Const):
        return Const(x.value, shape, x.dtype)
    x = p.total(x)
    y = p.emit.reshape(x.node, [1, *x.node.meta["val"].shape])
    return Placed(p.emit.all_gather(y, axes) if axes else y, shape, ((), *x.dims))


def scatter(p: Partition, node, args, kwargs):
    """One reduce-scatter of the first dim."""
    x, group = args
    axes, shape = storage.real_axes(p.mesh, _same_mesh(p, group)), tuple(node.meta["val"].shape)
    if isinstance(x, Const):
        return Const(x.value * p.mesh.axes_size(axes), shape, x.dtype)
    x = _front(p, x)
    y = p.emit.reduce_scatter(x.node, axes) if axes else x.node
    return Placed(p.emit.reshape(y, y.meta["val"].shape[1:]), shape, x.dims[1:])


def exchange(p: Partition, node, args, kwargs):
    """One all-to-all of the first dim."""
    x, group = args
    axes = storage.real_axes(p.mesh, _same_mesh(p, group))
    if isinstance(x, Const) or not axes:
        return x
    x, even = _front(p, x), [1] * x.shape[0]
    y = p.emit.collective("all_to_all", axes, C.all_to_all_single.default, x.node, even, even)
    return Placed(y, x.shape, x.dims)


def permute(p: Partition, node, args, kwargs):
    """One exchange between pairs of ranks."""
    x, targets, group = args
    axes = storage.real_axes(p.mesh, _same_mesh(p, group))
    if not axes:
        return x if list(targets) == [0] else Const(0, tuple(node.meta["val"].shape), node.meta["val"].dtype)
    x = p.total(x)
    with p.emit.noted(collective="ppermute", axes=p.mesh.sort_axes(axes)):
        y = p.emit.call(manual.send, p.emit.contiguous(x.node), list(targets), p.mesh.alias(axes))
    return Placed(y, x.shape, x.dims)


def _front(p: Partition, x) -> Placed:
    """Dim 0, whose entries are the ranks', whole."""
    x = p.total(x)
    return p.unshard(x, (x.dims[0], *((),) * (x.ndim - 1)))


RULES = {
    manual.to_local_raw: to_local,
    manual.to_global_raw: to_global,
    manual.vary_raw: identity,
    manual.promise_raw: identity,
    manual.reduce_raw: reduce,
    manual.gather_raw: gather,
    manual.scatter_raw: scatter,
    manual.exchange_raw: exchange,
    manual.permute_raw: permute,
}
