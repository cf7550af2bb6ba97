"""Embeddings of a large vocabulary: the few rows that a batch reads travel, not the table.

Legend: V rows of the table split over n ranks, D features, t ids of this rank. Every rank looks up all ranks' ids in
its own V/n rows (others give zero) and a reduce-scatter brings each its t rows; backward, the rows' gradients are
gathered and each rank adds up those of its own part, which is then at rest. Per rank about 2·n·t·D elements travel
instead of V·D for the gather and V·D for the reduction, so the rule is used where 2·n·t < V. Exact: one rank adds,
others add zero.
"""

from __future__ import annotations

import math

import torch

from fsharding.comm import groups
from fsharding.oplib import raw_op
from fsharding.program import rules_reduce as red
from fsharding.program.bundle import like_raw
from fsharding.program.partition import Partition
from fsharding.program.values import Const, Placed, Stored, is_routed

A = torch.ops.aten


def _own(ids, block, axes):
    """Ids counted from this rank's first row, and which of them are its own."""
    sizes, names = groups.parse(axes)
    where, rank = groups.coordinates(axes, groups.current_rank()), 0
    for name in names:
        rank = rank * sizes[name] + where[name]
    ids = ids - rank * block
    return ids, (ids >= 0) & (ids < block)


def _lookup(w, ids, axes):
    ids, mine = _own(ids, w.shape[0], axes)
    return w.index_select(0, torch.where(mine, ids, 0)).masked_fill(~mine[:, None], 0)


def _lookup_t(g, ids, block, padding, axes):
    mine = _own(ids, block, axes)
    rows = torch.where(mine[1] & (ids != padding), mine[0], block)  # the others go to a row past the end
    return A.embedding_dense_backward(g, rows, block + 1, block, False)[:block]


lookup = raw_op(
    "lookup(Tensor w, Tensor ids, str axes) -> Tensor",
    _lookup,
    lambda w, ids, axes: w.new_empty(ids.shape[0], w.shape[1]),
)
lookup_t = raw_op(
    "lookup_t(Tensor g, Tensor ids, int block, int padding, str axes) -> Tensor",
    _lookup_t,
    lambda g, ids, block, padding, axes: g.new_empty(block, g.shape[1]),
)


def embedding(p: Partition, node, args, kwargs):
    """Split over the ids' dims; of a split table either the table travels or, where that is less, the rows."""
    weight, ids = args[0], args[1]
    axes = _axes(p, node, weight, ids)
    if axes is None:
        return red.embedding(p, node, args, kwargs)
    ids = p.total(ids)
    with p.emit.noted(param=weight.name, lookup=True):
        flat = p.emit.reshape(ids.node, [math.prod(ids.node.meta["val"].shape)])
        every = p.emit.all_gather(flat, p.mesh.sort_axes(axes))
        rows = p.emit.call(lookup, weight.node, every, _ordered(p, axes))
        own = p.emit.reduce_scatter(rows, p.mesh.sort_axes(axes))
        out = p.emit.reshape(own, [*ids.node.meta["val"].shape, weight.shape[1]])
    p.lookups[node.args[1], weight.shape[0]] = (axes, every, weight.name)
    return Placed(out, p.shape_of_meta(), (*ids.dims, ()))


def embedding_backward(p: Partition, node, args, kwargs):
    """Split over the feature dim; rows that are split leave a pending sum, or are added up where the table rests."""
    grad, ids, rows, padding, scaled = args
    known = p.lookups.get((node.args[1], rows))
    if known is None or scaled or isinstance(grad, Const):
        return red.embedding_backward(p, node, args, kwargs)
    axes, every, name = known
    ids = p.total(ids)
    g = p.relayout(p.total(grad), (*ids.dims, ()))
    features, block = g.shape[-1], rows // p.mesh.axes_size(axes)
    with p.emit.noted(param=name, lookup=True):
        flat = p.emit.reshape(g.node, [math.prod(g.node.meta["val"].shape) // features, features])
        rows_of_all = p.emit.all_gather(flat, p.mesh.sort_axes(axes))
        own = p.emit.call(lookup_t, rows_of_all, every, block, padding, _ordered(p, axes))
    partial = {a for d in ids.dims for a in p._real(d)} - set(axes)
    return Placed(own, (rows, features), (axes, ()), frozenset(partial))


def _ordered(p: Partition, axes) -> str:
    """An alias that names the axes in the order of the table's own tuple."""
    return p.mesh.alias(()) + ",".join(axes)


def _axes(p: Partition, node, weight, ids) -> tuple[str, ...] | None:
    """The axes that split the table, if looking up is less to move and nothing else reads the table whole."""
    if not isinstance(weight, Stored) or not isinstance(ids, Placed) or len(weight.shape) != 2:
        return None
    axes, features = (p._real(a) for a in weight.dims)
    if not axes or features or weight.shape[0] % p.mesh.axes_size(axes):
        return None
    if any(map(is_routed, ids.dims)) or ids.partial:
        return None
    split = {a for d in ids.dims for a in p._real(d)}
    tokens = math.prod(ids.shape) // p.mesh.axes_size(split)
    alone = all(user.target in (A.embedding.default, like_raw) for user in node.args[0].users)
    if not alone or not set(axes) <= split or 2 * p.mesh.axes_size(axes) * tokens >= weight.shape[0]:
        return None
    return axes
