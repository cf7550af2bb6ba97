"""Indexing by tensors, and its transpose."""

from __future__ import annotations

import torch

from fsharding.program.partition import Partition
from fsharding.program.rules_reduce import need_whole, shape_of
from fsharding.program.values import Const, Placed

A = torch.ops.aten


def index(p: Partition, node, args, kwargs):
    """``x[ids]``, also ``x[:, ids]``: the indexed dims must be whole, the ids may be rows. ``x[arange(n), ids]`` picks
    in each row: a cut of the rows cuts the ``arange``."""
    x, ids = p.total(args[0]), list(args[1])
    own = _own_row(node, x.shape, ids)
    need_whole(p, x, [d for d, i in enumerate(ids) if i is not None and d != own], "an index")
    at, names, labels = _index_labels(ids, own)
    indexed = [d for d in at if d != own]
    at_x = [None if d in indexed else names[0] if d == own else ("x", d) for d in range(x.ndim)]
    placed, found = p.align([(x, at_x), *labels])
    local = _local_ids(p, ids, own, placed[0], placed[1:])
    out = p.emit.call(A.index.Tensor, placed[0].node, local)
    return Placed(out, p.shape_of_meta(), _indexed_dims(x.ndim, ids, at, names, found))


def _own_row(node, shape, ids) -> int | None:
    """The dim that an ``arange`` over all of it indexes, beside 1-d ids: each row looks into itself."""
    at = [d for d, i in enumerate(ids) if i is not None]
    if len(at) < 2 or any(len(shape_of(ids[d])) != 1 for d in at):
        return None
    for d in at:
        source = node.args[1][d]
        name = str(source.target)
        start, stop, step = (
            {"aten.arange.default": (0, *source.args[:1], 1)}.get(name, (*source.args, 1)[:3])
            if name.startswith("aten.arange")
            else (None,) * 3
        )
        if (start, stop, step) == (0, shape[d], 1):
            return d
    return None


def _local_ids(p, ids, own, x, placed):
    """The ids' nodes; that of the dim which indexes itself counts the rows of the block."""
    rest, local = iter(placed), list(ids)
    for d, i in enumerate(ids):
        if d == own:
            local[d] = p.emit.call(A.arange.start_step, 0, p.local_size(x.shape[d], x.dims[d]), 1)
        elif i is not None:
            local[d] = next(rest).node
    return local


def _index_labels(ids, own=None):
    at = [d for d, i in enumerate(ids) if i is not None]
    ndim = max(len(shape_of(ids[d])) for d in at)
    names = [("i", d) for d in range(ndim)]
    shape = torch.broadcast_shapes(*(shape_of(ids[d]) for d in at))
    labels = []
    for d in at:
        have = shape_of(ids[d])
        offset = ndim - len(have)
        if d != own:
            labels.append((ids[d], [names[offset + k] if n == shape[offset + k] else None for k, n in enumerate(have)]))
    return at, names, labels


def _index_order(ndim, at, names):
    """The labels of what an index gives: the indexed dims at the first of them, or in front if they are apart."""
    rest = [("x", d) for d in range(ndim) if d not in at]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    return rest[:first] + names + rest[first:]


def _indexed_dims(ndim, ids, at, names, found):
    return tuple(found.get(n, ()) for n in _index_order(ndim, at, names))


def index_put(p: Partition, node, args, kwargs):
    """The transpose of :func:`index`: rows added into zeros are a pending sum. What is written elsewhere must be
    whole along the indexed dims."""
    x, ids, values = args[0], list(args[1]), args[2]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    own = _own_row(node, shape_of(x), ids)
    at, names, labels = _index_labels(ids, own)
    order = _index_order(len(shape_of(x)), at, names)
    sums = isinstance(x, Const) and x.value == 0 and accumulate and own is None
    if any(_is_mask(node, d) for d in at) or (sums and len(shape_of(values)) != len(order)):
        p.refuse("an indexed assignment by a mask, or an indexed addition of broadcast values")
    if not sums:
        kept = {names[0]} if own is not None else set()
        labels = [(i, [n if n in kept else None for n in of]) for i, of in labels]
        order = [n if n in kept or n not in names else None for n in order]
    at_x = [None if d in at and d != own else names[0] if d == own else ("x", d) for d in range(len(shape_of(x)))]
    operands = [(values, _right_aligned(order, node, values)), *labels]
    placed, found = p.align(operands if sums else [*operands, (x, at_x)])
    dims = tuple(found.get(n, ()) if n is not None else () for n in at_x)
    base = p.relayout(x, dims) if sums else placed[-1]
    local = _local_ids(p, ids, own, base, placed[1 : 1 + len(labels)])
    out = p.emit.call(A.index_put.default, base.node, local, placed[0].node, accumulate)
    partial = {a for n in names for a in p.row_axes(found.get(n, ()))} if sums else set()
    return Placed(out, tuple(shape_of(x)), dims, frozenset(a for a in partial if p._real((a,))))


def _is_mask(node, d) -> bool:
    return node.args[1][d].meta["val"].dtype == torch.bool


def _right_aligned(order, node, values):
    """The labels of values that broadcast to what the index selects."""
    have = shape_of(values)
    selected = torch.ops.aten.index.Tensor(
        torch.empty(node.args[0].meta["val"].shape, device="meta"),
        [
            None if i is None else torch.empty(i.meta["val"].shape, dtype=torch.int64, device="meta")
            for i in node.args[1]
        ],
    ).shape
    offset = len(order) - len(have)
    return [order[offset + k] if n == selected[offset + k] else None for k, n in enumerate(have)]


def index_select(p: Partition, node, args, kwargs):
    """As indexing: the indexed dim must be whole, the ids may be split."""
    x, dim, ids = args
    indices = [None] * (dim % len(shape_of(x))) + [ids]
    return index(p, node, (x, indices), {})
