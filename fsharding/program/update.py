"""The optimizer step as few ops over many tensors, and the passes that let them work in place.

``adamw`` (Loshchilov & Hutter, 2019) takes all leaves at once. Two passes over a local program then remove what it
would otherwise read and write twice: ``fuse_updates`` lets it scale the gradients and add to the parameters itself,
``in_place`` lets it write donated memory. On CUDA one Triton kernel a leaf reads p, g, m, v once and writes p, m, v
once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.fx as fx

from fsharding import oplib
from fsharding.moe import fast
from fsharding.oplib import wide_dtype
from fsharding.program.partition import Partition
from fsharding.program.values import Const, Placed, Stored

A = torch.ops.aten
LISTS = "Tensor[] p, Tensor[] g, Tensor[] m, Tensor[] v, Tensor[] scalars, Tensor? scale"
HYPER = "float b1, float b2, float eps, float decay, bool apply"


# ---- kernels ---------------------------------------------------------------------------------------------------------
def _squares(x):
    dtype = wide_dtype(x.dtype)
    if x.is_cuda:  # one pass over memory
        return torch.linalg.vector_norm(x, dtype=dtype).square()
    x = x.to(dtype)
    return (x * x).sum()


squares_raw = oplib.raw_op(
    "squares(Tensor x) -> Tensor", _squares, lambda x: x.new_empty((), dtype=wide_dtype(x.dtype))
)
"""The sum of all squares, 0-d, in float32 (float64 for float64)."""


def adamw_leaf(p, g, m, v, scalars, scale, b1, b2, eps, decay, apply):
    """(update or new p, new m, new v) of one leaf; moments in their own dtype, an update in the wide one."""
    minus_lr, correct1, correct2 = scalars
    dtype = wide_dtype(p.dtype)
    g = g.to(dtype) if scale is None else g.to(dtype) * scale
    m_new = b1 * m.to(dtype) + (1.0 - b1) * g
    v_new = b2 * v.to(dtype) + (1.0 - b2) * (g * g)
    direction = (m_new / correct1) / ((v_new / correct2).sqrt() + eps)
    if decay:
        direction = direction + decay * p.to(dtype)
    update = minus_lr * direction
    return (p + update).to(p.dtype) if apply else update, m_new.to(m.dtype), v_new.to(v.dtype)


def _adamw(p, g, m, v, scalars, scale, b1, b2, eps, decay, apply):
    rows = [
        adamw_leaf(*leaf, scalars, scale, b1, b2, eps, decay, apply) for leaf in zip(p, g, m, v, strict=True)
    ]  # fmt: skip
    return [row[i] for i in range(3) for row in rows]


def _adamw_fake(p, g, m, v, scalars, scale, b1, b2, eps, decay, apply):
    first = [torch.empty_like(x, dtype=None if apply else wide_dtype(x.dtype)) for x in p]
    return first + [torch.empty_like(x) for x in (*m, *v)]


def _one_kernel(leaf) -> bool:
    return fast.present() and fast.kernel("adamw", "serves")(*leaf)


def _adamw_cuda(p, g, m, v, scalars, scale, b1, b2, eps, decay, apply):
    out: list[list[torch.Tensor]] = [[], [], []]
    for leaf in zip(p, g, m, v, strict=True):
        if apply and _one_kernel(leaf):
            new = [x.clone() for x in (leaf[0], leaf[2], leaf[3])]
            fast.kernel("adamw", "adamw_launch")(new[0], leaf[1], new[1], new[2], scalars, scale, b1, b2, eps, decay)
        else:
            new = list(adamw_leaf(*leaf, scalars, scale, b1, b2, eps, decay, apply))
        for column, x in zip(out, new, strict=True):
            column.append(x)
    return out[0] + out[1] + out[2]


def _adamw_in_place(p, g, m, v, scalars, scale, b1, b2, eps, decay):
    for leaf in zip(p, g, m, v, strict=True):
        if leaf[0].is_cuda and _one_kernel(leaf):
            fast.kernel("adamw", "adamw_launch")(*leaf, scalars, scale, b1, b2, eps, decay)
            continue
        new = adamw_leaf(*leaf, scalars, scale, b1, b2, eps, decay, True)
        for old, x in zip((leaf[0], leaf[2], leaf[3]), new, strict=True):
            old.copy_(x)


adamw_raw = oplib.raw_op(f"adamw({LISTS}, {HYPER}) -> Tensor[]", _adamw, _adamw_fake, cuda=_adamw_cuda)
adamw_in_place = oplib.raw_op(
    "adamw_(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(c!)[] v, Tensor[] scalars, Tensor? scale, "
    "float b1, float b2, float eps, float decay) -> ()",
    _adamw_in_place,
    lambda *args: None,
)


# ---- rules -----------------------------------------------------------------------------------------------------------
def squares(p: Partition, node, args, kwargs):
    """Local sums of squares, padding left out; pending over the axes that split the value."""
    from fsharding.program.rules_reduce import _masked

    x = args[0]
    if isinstance(x, Stored):
        axes = frozenset(a for axes in x.dims for a in p._real(axes))
        return Placed(p.emit.call(squares_raw, _masked(p, x, 0)), (), (), axes)
    x = p.total(x)
    axes = frozenset(a for axes in x.dims for a in p._real(p.row_axes(axes)))
    return Placed(p.emit.call(squares_raw, x.node), (), (), axes)


def adamw(p: Partition, node, args, kwargs):
    """Each leaf at rest: parameters, gradients and moments in the parameter's layout."""
    from fsharding.program.rules_pointwise import _at_rest

    columns, (scalars, scale), hyper = args[:4], args[4:6], args[6:]
    local: list[list[fx.Node]] = [[], [], [], []]
    leads = []
    for leaf in zip(*columns, strict=True):
        lead = next((x for x in leaf if isinstance(x, Stored)), None)
        if lead is None:
            leaf = [p.total(x) for x in leaf]
            if any(any(p._real(axes) for axes in x.dims) for x in leaf):
                p.fail("a parameter is made of rows: optimizers update stored values. Put it into `stored_argnums`")
            nodes = [x.node for x in leaf]
        else:
            nodes = [_at_rest(p, x, lead) if not isinstance(x, Const) else _block(p, x, lead) for x in leaf]
        leads.append(lead)
        for column, x in zip(local, nodes, strict=True):
            column.append(x)
    numbers = [_number(p, s) for s in scalars]
    made = p.emit.call(node.target, *local, numbers, None if scale is None else _number(p, scale), *hyper)
    results = []
    for i, value in enumerate(node.meta["val"]):
        lead, shape = leads[i % len(leads)], tuple(value.shape)
        item = p.emit.item(made, i)
        results.append(Stored(item, shape, lead.dims) if lead else Placed(item, shape, ((),) * len(shape)))
    return tuple(results)


def _block(p: Partition, value: Const, lead: Stored) -> fx.Node:
    return p.emit.call(A.full.default, list(lead.node.meta["val"].shape), value.value, dtype=value.dtype)


def _number(p: Partition, value) -> fx.Node:
    return p.total(value).node


# ---- passes ----------------------------------------------------------------------------------------------------------
def fuse_updates(graph: fx.Graph) -> None:
    """``p + adamw(...)``, ``adamw(g · s)`` and casts of gradients become part of the op."""
    for node in [n for n in graph.nodes if n.target is adamw_raw]:
        _absorb_sum(graph, node)
        _absorb_scale(node)
        _absorb_casts(node)


def _items(node: fx.Node) -> dict[int, fx.Node]:
    return {u.args[1]: u for u in node.users if u.target is operator.getitem}


def _absorb_sum(graph: fx.Graph, node: fx.Node) -> None:
    params, items = node.args[0], _items(node)
    sums = [_sum_of(items.get(i), p) for i, p in enumerate(params)]
    if node.args[-1] or not all(sums):
        return
    node.args = (*node.args[:-1], True)
    node.meta["val"] = [*(p.meta["val"] for p in params), *node.meta["val"][len(params) :]]
    for i, total in enumerate(sums):
        assert total is not None
        total.replace_all_uses_with(items[i])
        items[i].meta = dict(total.meta)
        while total is not items[i]:  # the cast, then the sum
            before = next(a for a in total.all_input_nodes if a is items[i] or a.target is A.add.Tensor)
            graph.erase_node(total)
            total = before


def _sum_of(update: fx.Node | None, param: fx.Node) -> fx.Node | None:
    """The one node that makes the new parameter of this update, in the parameter's dtype."""
    if update is None or len(update.users) != 1:
        return None
    total = next(iter(update.users))
    if total.target is not A.add.Tensor or total.kwargs or set(total.args) != {update, param}:
        return None
    if total.meta["val"].dtype != param.meta["val"].dtype:
        total = next(iter(total.users)) if len(total.users) == 1 else total
        if total.target is not A._to_copy.default or total.meta["val"].dtype != param.meta["val"].dtype:
            return None
    return total


def _absorb_scale(node: fx.Node) -> None:
    grads: Sequence[fx.Node] = node.args[1]
    factors = {g.args[1] for g in grads if g.target is A.mul.Tensor and len(g.users) == 1}
    if node.args[5] is not None or len(factors) != 1 or not all(g.target is A.mul.Tensor for g in grads):
        return
    (scale,) = factors
    if not isinstance(scale, fx.Node) or scale.meta["val"].ndim or any(len(g.users) > 1 for g in grads):
        return
    if any(g.args[0].meta["val"].dtype != g.meta["val"].dtype for g in grads):
        return
    node.args = (node.args[0], [g.args[0] for g in grads], *node.args[2:5], scale, *node.args[6:])
    for g in grads:
        if not g.users:
            g.graph.erase_node(g)


def _absorb_casts(node: fx.Node) -> None:
    """A gradient that was only widened for the sum of squares and the update is read as it was: half the bytes."""
    if node.args[5] is None and any(g.target is A.mul.Tensor for g in node.args[1]):
        return  # scaled elsewhere: the product is what is read
    grads = []
    for g in node.args[1]:
        source = g.args[0] if g.target is A._to_copy.default else None
        if source is not None and _widens(source, g) and all(u.target in (adamw_raw, squares_raw) for u in g.users):
            for user in [u for u in g.users if u.target is squares_raw]:
                user.args = (source,)
            g = source
        grads.append(g)
    old = node.args[1]
    node.args = (node.args[0], grads, *node.args[2:])
    for g in old:
        if not g.users:
            g.graph.erase_node(g)


def _widens(source: fx.Node, made: fx.Node) -> bool:
    have, want = source.meta["val"].dtype, made.meta["val"].dtype
    return have in (torch.bfloat16, torch.float16) and want is torch.float32


def in_place(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Where all that ``adamw`` makes is copied into its own operands, it writes there itself. Returns old -> new
    nodes for results."""
    replaced: dict[fx.Node, fx.Node] = {}
    for node in [n for n in graph.nodes if n.target is adamw_raw and n.args[-1]]:
        olds = [*node.args[0], *node.args[2], *node.args[3]]
        items = _items(node)
        copies = [_copy_into(items.get(i), old) for i, old in enumerate(olds)]
        order = {n: i for i, n in enumerate(graph.nodes)}
        if not all(copies) or len(set(olds)) < len(olds):
            continue
        if any(order[u] > order[node] and u not in copies for old in olds for u in old.users if u.op != "output"):
            continue  # somebody reads an old value later
        with graph.inserting_before(node):
            new = graph.call_function(adamw_in_place, node.args[:-1])
            new.meta = {"val": None, "custom": {**node.meta["custom"], "donated": True}}
        for copy, old in zip(copies, olds, strict=True):
            assert copy is not None
            replaced[copy] = old
            copy.replace_all_uses_with(old)
            graph.erase_node(copy)
        for item in items.values():
            graph.erase_node(item)
        graph.erase_node(node)
    return replaced


def _copy_into(item: fx.Node | None, old: fx.Node) -> fx.Node | None:
    if item is None or old.op != "placeholder":
        return None
    copies = [u for u in item.users if u.target is A.copy_.default and u.args[0] is old]
    return copies[0] if len(copies) == 1 and len(item.users) == 1 else None
