"""The MoE steps in the partition: a routing becomes a plan, rows travel by the chosen dispatcher, experts stay or come.

Between ``dispatch`` and ``combine`` a value's first dim carries a pseudo axis that names its routing.
"""

from __future__ import annotations

import torch

from fsharding.moe import ops
from fsharding.moe.all_to_all import DISPATCHERS
from fsharding.moe.local import Local
from fsharding.program.partition import Partition
from fsharding.program.values import (
    ROUTED,
    Const,
    GroupSizes,
    Permutation,
    Placed,
    RoutingState,
    Stored,
    Viewed,
    is_routed,
)

A = torch.ops.aten


def _expert_axis(p: Partition) -> str | None:
    """The axis over which tokens travel, if there is one that splits anything."""
    axis = p.experts.axis if p.experts is not None else None
    if axis in p.node.meta.get("custom", {}).get("manual", ()):
        return None  # in a `shard_map` over it each rank routes its own tokens to the experts that it was given
    return axis if axis is not None and p.mesh.shape[axis] > 1 else None


def route(p: Partition, node, args, kwargs):
    """A plan: which rows go where, over the axes that split the tokens."""
    ids, num_experts = args
    x = p.total(ids)
    axis = _expert_axis(p)
    if axis and num_experts % p.mesh.shape[axis]:
        p.fail(
            f"{num_experts} experts cannot be split over the {p.mesh.shape[axis]} ranks of axis {axis!r}: the number "
            "of experts must be a multiple of it"
        )
    if is_routed(x.dims[0]) or p._real(x.dims[1]):
        p.refuse("routing needs whole rows of choices")
    axes = x.dims[0]
    if axis and axis not in axes:  # tokens that all ranks of the axis hold are served once, not once a rank
        axes = (*axes, axis)
        x = p.relayout(x, (axes, ()))
    dispatcher = DISPATCHERS[p.experts.dispatcher](axis) if axis else Local()
    perm, inverse, sizes, counts = dispatcher.route(p.emit, x.node, num_experts)
    k = x.shape[1]
    rows = p.local_size(x.shape[0], axes) * k
    state = RoutingState(
        f"{ROUTED}{len(p.routings)}", p._real(axes), x.shape[0], k, num_experts, perm, inverse, counts, rows, sizes
    )
    state.dispatcher = dispatcher
    dispatcher.plan(p.emit, state)
    p.routings[state.name] = state
    return (
        Permutation(state),
        Permutation(state),
        GroupSizes(state, Placed(counts, (num_experts,), ((),), frozenset(state.token_axes))),
    )


def _routing(p, value) -> RoutingState:
    if not isinstance(value, Permutation):
        p.fail("the routing was changed: pass what `fs.moe.route` returned")
    return value.routing


def _tokens(p, value, state, ndim=2):
    """Token-side rows, cut as the routing's tokens are."""
    x = (
        value
        if isinstance(value, Const) or hasattr(value, "base") and not isinstance(value, Viewed)
        else p.total(value)
    )
    return p.relayout(
        x, (state.token_axes,) + ((),) * (ndim - 1) if isinstance(x, Const) else _with_first(x, state.token_axes)
    )


def _with_first(x, axes):
    dims = x.dims if isinstance(x, Placed) else x.base.dims
    return (axes, *dims[1:])


def _rows(p, value, state):
    """Expert-side rows of this routing."""
    want = (state.name,)
    if isinstance(value, Const):
        return p.relayout(value, (want, *((),) * (value.ndim - 1)))
    if hasattr(value, "base") and not isinstance(value, Viewed):
        return p.relayout(value, (want, *value.base.dims[1:]))
    x = p.total(value)
    if x.dims[0] != want:
        p.fail(
            "it takes rows that `dispatch` made with the same routing (and only row-wise ops since). These rows come "
            "from " + ("another routing" if is_routed(x.dims[0]) else "elsewhere")
        )
    return x


def _routed(p, node, out, state, feature):
    return Placed(out, p.shape_of_meta(), ((state.name,), *feature))


def _entered(p, x: Placed, state):
    """The tokens that this rank serves, of a value on the token side."""
    return state.dispatcher.enter(p.emit, x.node, state)


def _left(p, out, state, feature, pending=frozenset(), small=False):
    """A result for each token that this rank serves, at home."""
    out = state.dispatcher.leave(p.emit, out, state, small)
    return Placed(out, p.shape_of_meta(), (state.token_axes, *feature), pending)


def dispatch(p: Partition, node, args, kwargs):
    """Token rows to expert rows, over the experts' axis by the chosen dispatcher."""
    x, perm, _, k = args
    state = _routing(p, perm)
    x = _tokens(p, x, state)
    rows = p.emit.call(ops.dispatch_raw, _entered(p, x, state), state.perm, state.inverse, k)
    return _routed(p, node, state.dispatcher.send(p.emit, rows, state), state, x.dims[1:])


def dispatch_t(p: Partition, node, args, kwargs):
    """Expert rows back to token rows: the transpose of dispatch."""
    g, perm, _, k = args
    state = _routing(p, perm)
    g = _rows(p, g, state)
    rows = state.dispatcher.back(p.emit, g.node, state)
    out = p.emit.call(ops.dispatch_t_raw, rows, state.perm, state.inverse, k)
    return _left(p, out, state, g.dims[1:])


def _returned(p, y: Placed, state):
    """Expert-side rows back on the token side. The weights' gradient reads the rows that ``combine`` brought back."""
    if y.node not in state.returned:
        state.returned[y.node] = state.dispatcher.back(p.emit, y.node, state)
    return state.returned[y.node]


def combine(p: Partition, node, args, kwargs):
    """Expert rows back to token rows, summed with their weights."""
    y, w, perm, _ = args
    state = _routing(p, perm)
    y, w = _rows(p, y, state), _tokens(p, w, state)
    out = p.emit.call(ops.combine_raw, _returned(p, y, state), _entered(p, w, state), state.perm, state.inverse)
    return _left(p, out, state, y.dims[1:])


def combine_t(p: Partition, node, args, kwargs):
    """The transpose of combine in its rows."""
    g, w, perm, _ = args
    state = _routing(p, perm)
    g, w = _tokens(p, g, state), _tokens(p, w, state)
    rows = p.emit.call(ops.combine_t_raw, _entered(p, g, state), _entered(p, w, state), state.perm, state.inverse)
    return _routed(p, node, state.dispatcher.send(p.emit, rows, state), state, g.dims[1:])


def combine_w(p: Partition, node, args, kwargs):
    """The transpose of combine in its weights."""
    g, y, perm, _, k = args
    state = _routing(p, perm)
    g, y = _tokens(p, g, state), _rows(p, y, state)
    dims = p.merge([(g, [0, 1]), (Placed(y.node, y.shape, (g.dims[0], y.dims[1])), [0, 1])])
    g = p.relayout(g, (g.dims[0], dims.get(1, ())))
    out = p.emit.call(
        ops.combine_w_raw, _entered(p, g, state), _returned(p, y, state), state.perm, state.inverse, k
    )
    return _left(p, out, state, ((),), frozenset(p._real(dims.get(1, ()))), small=True)


# ---- experts ---------------------------------------------------------------------------------------------------------
def _weights(p, value, state, what):
    """Per-expert values with the group dim split as the experts are, whole in the data axes otherwise."""
    axes = state.expert_axes
    if axes and isinstance(value, Stored) and p._real(value.dims[0])[: len(axes)] != axes:
        _not_leading(p, value.name or what, value.dims, axes)
    x = p.placed(value, keep=axes)
    x = p.total(x)
    if p._real(x.dims[0]) != p._real(axes):
        if p._real(x.dims[0]):
            _not_leading(p, what, x.dims, axes)
        if isinstance(value, Viewed) and axes:
            _not_leading(p, value.base.name or what, value.base.dims, axes)
        x = p.relayout(x, (axes, *x.dims[1:]))
    return x


def _not_leading(p, name, dims, axes):
    from fsharding.annotate.spec import P

    p.fail(
        f"the experts of {name} are split over {dims[0] or 'nothing'}, but tokens travel over {axes}. Its spec must "
        f"lead with that axis, as in {P(axes[0], 'efsdp') if len(dims) > 1 else P(axes[0])}; or shard with "
        "`experts=None`"
    )


def _state_of_sizes(p, sizes, x):
    if not isinstance(sizes, GroupSizes):
        if is_routed(getattr(x, "dims", ((),))[0] if getattr(x, "dims", None) else ()):
            p.fail("the group sizes of dispatched rows must be their own `routing.group_sizes`")
        return None
    return sizes.routing


def ragged_dot(p: Partition, node, args, kwargs):
    """Rows where they are, weights as the experts are split."""
    x, w, sizes = args
    state = _state_of_sizes(p, sizes, x)
    if state is None:
        return _plain(p, node, args, kwargs)
    x, w = _rows(p, x, state), _weights(p, w, state, "the weights")
    bare = Placed(x.node, x.shape, ((), x.dims[1]))
    (_, w), found = p.align([(bare, [None, "k"]), (Placed(w.node, w.shape, ((), *w.dims[1:])), [None, "k", "n"])])
    x = p.relayout(x, ((state.name,), found.get("k", ())))
    out = p.emit.call(ops.ragged_dot_raw, x.node, w.node, state.sizes)
    return Placed(out, p.shape_of_meta(), ((state.name,), found.get("n", ())), frozenset(p._real(found.get("k", ()))))


def _plain(p, node, args, kwargs):
    """Group sizes that no routing made: right on values that every rank holds."""
    from fsharding.program.rules_reduce import replicated

    return replicated(p, node, args, kwargs)


def _summed_axes(p, state):
    """Axes over which per-expert sums are pending: all that split tokens, but for those that split experts."""
    return frozenset(a for a in state.token_axes if a not in state.expert_axes)


def ragged_dw(p: Partition, node, args, kwargs):
    """Per-expert gradients; axes that split tokens but not experts leave a pending sum."""
    x, g, sizes = args
    state = _state_of_sizes(p, sizes, x)
    if state is None:
        return _plain(p, node, args, kwargs)
    x, g = _rows(p, x, state), _rows(p, g, state)
    out = p.emit.call(ops.ragged_dw_raw, x.node, g.node, state.sizes)
    return Placed(out, p.shape_of_meta(), (state.expert_axes, x.dims[1], g.dims[1]), _summed_axes(p, state))


def expand(p: Partition, node, args, kwargs):
    """Per-expert values for each row, split as the experts are."""
    b, sizes, _ = args
    state = _state_of_sizes(p, sizes, b)
    if state is None:
        return _plain(p, node, args, kwargs)
    b = _weights(p, b, state, "the per-expert values")
    out = p.emit.call(ops.expand_raw, b.node, state.sizes, state.rows)
    return _routed(p, node, out, state, b.dims[1:])


def segment_sum(p: Partition, node, args, kwargs):
    """Per-expert sums of rows; axes that split tokens but not experts leave a pending sum."""
    g, sizes = args
    state = _state_of_sizes(p, sizes, g)
    if state is None:
        return _plain(p, node, args, kwargs)
    g = _rows(p, g, state)
    out = p.emit.call(ops.segment_sum_raw, state.dispatcher.valid(p.emit, g.node, state), state.sizes)
    return Placed(out, p.shape_of_meta(), (state.expert_axes, *g.dims[1:]), _summed_axes(p, state))
