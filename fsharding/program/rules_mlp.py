"""The fused expert MLP in the partition: one local op, and between the ranks what the routing's dispatcher moves.

Where experts are gathered, each rank runs the op on its own tokens. Where tokens travel, their rows are exchanged and
stay in the order in which they arrive; the local op reads and writes them in that order, and the weighted sum is the
token side's. Backward exchanges the gradient's rows and the routing weights [R], and sends back dx and d weights [R].
Nothing with R rows of D numbers is kept in between but the rows that arrived.
"""

from __future__ import annotations

import operator

import torch

from fsharding.moe import expert_ops as raw
from fsharding.moe import ops
from fsharding.program import rules_moe as moe
from fsharding.program.emit import dtype_of
from fsharding.program.partition import Partition
from fsharding.program.values import GroupSizes, Permutation, Placed, RoutingState

A = torch.ops.aten
ARRIVED = "arrived"  # h -> (tokens, rows that arrived), so that backward need not send the tokens again


def tiles(p: Partition, node, args, kwargs):
    """The schedule of the experts' products: made where the rows are, once for a routing."""
    perm, sizes, _ = args
    state = moe._routing(p, perm)
    if not isinstance(sizes, GroupSizes) or sizes.routing is not state:
        p.fail("the routing was changed: pass what `fs.moe.route` returned")
    return (Permutation(state),) * 4


def _schedule(p: Partition, state: RoutingState) -> list:
    """The nodes (rows, ends, blocks, largest) on the expert side."""
    if "tiles" not in state.extra:
        moved = state.dispatcher.moves
        perm, k = (state.extra["order"], 1) if moved else (state.perm, state.k)
        state.extra["tiles"] = p.emit.items(p.emit.call(raw.tiles_raw, perm, state.sizes, k))
    return state.extra["tiles"]


def _state(p: Partition, way) -> RoutingState:
    """The one routing that all of (perm, inverse, group sizes, rows, ends, blocks, largest) belong to."""
    state = moe._routing(p, way[0])
    for value in way:
        if not isinstance(value, Permutation | GroupSizes) or value.routing is not state:
            p.fail("the routing was changed: pass what `fs.moe.route` returned")
    return state


def _whole_features(p: Partition, x: Placed) -> Placed:
    """Model axes that split a feature dim are gathered: gate and up would not be split alike."""
    return p.unshard(x, ((), *(p._real(axes) for axes in x.dims[1:])))


def _operands(p: Partition, state: RoutingState, x, w_in, w_out, weights):
    tokens = [_whole_features(p, moe._tokens(p, v, state)) for v in (x, weights)]
    experts = [
        _whole_features(p, moe._weights(p, v, state, name)) for v, name in ((w_in, "`w_in`"), (w_out, "`w_out`"))
    ]
    return tokens[0], *experts, tokens[1]


def _wanted(node, index: int) -> bool:
    return any(u.target is operator.getitem and u.args[1] == index for u in node.users)


def mlp(p: Partition, node, args, kwargs):
    """Experts where they rest, tokens travel by the dispatcher; the result is summed per token on the token side."""
    *floating, activation, out, keep = args[:4] + args[11:]
    state = _state(p, args[4:11])
    x, w_in, w_out, weights = _operands(p, state, *floating)
    out, keep = out and _wanted(node, 0), keep and _wanted(node, 1)  # a recomputed layer needs no result
    schedule = _schedule(p, state)
    if state.dispatcher.moves:
        rows = p.emit.call(ops.dispatch_raw, x.node, state.perm, state.inverse, state.k)
        arrived = state.dispatcher.push(p.emit, rows, state)
        y, h = p.emit.items(
            p.emit.call(
                raw.mlp_rows_raw, arrived, w_in.node, w_out.node, state.sizes, *schedule, activation, out, keep
            )
        )
        state.extra.setdefault(ARRIVED, {})[h] = x.node, arrived
        if out:
            back = state.dispatcher.pull(p.emit, y, state)
            y = p.emit.call(ops.combine_raw, back, weights.node, state.perm, state.inverse)
    else:
        way = state.perm, state.inverse, state.sizes, *schedule
        local = moe._entered(p, x, state), w_in.node, w_out.node, moe._entered(p, weights, state)
        y, h = p.emit.items(p.emit.call(raw.mlp_raw, *local, *way, activation, out, keep))
        y = state.dispatcher.leave(p.emit, y, state) if out else y
    shapes = [tuple(v.shape) for v in node.meta["val"]]
    return Placed(y, shapes[0], (state.token_axes, ())), Placed(h, shapes[1], ((state.name,), ()))


def mlp_backward(p: Partition, node, args, kwargs):
    """Gradients of tokens where these are, of experts where they rest: sums are pending over the axes that split tokens
    but not experts."""
    activation, needs = args[13:]
    state = _state(p, args[6:13])
    x, w_in, w_out, weights = _operands(p, state, *args[1:5])
    g, h = _whole_features(p, moe._tokens(p, args[0], state)), moe._rows(p, args[5], state)
    schedule = _schedule(p, state)
    if state.dispatcher.moves:
        made = _moved_backward(p, state, (g, x, w_in, w_out, weights, h), schedule, activation, needs)
    else:
        way = state.perm, state.inverse, state.sizes, *schedule
        g, x, weights = (moe._entered(p, v, state) for v in (g, x, weights))
        local = g, x, w_in.node, w_out.node, weights, h.node
        made = p.emit.items(p.emit.call(raw.mlp_backward_raw, *local, *way, activation, needs))
        for i in (0, 3):
            made[i] = state.dispatcher.leave(p.emit, made[i], state, small=i == 3) if needs[i] else made[i]
    shapes = [tuple(v.shape) for v in node.meta["val"]]
    tokens, experts = (state.token_axes, ()), (state.expert_axes, (), ())
    pending = moe._summed_axes(p, state)
    return (
        Placed(made[0], shapes[0], tokens),
        Placed(made[1], shapes[1], experts, pending),
        Placed(made[2], shapes[2], experts, pending),
        Placed(made[3], shapes[3], tokens),
    )


def _moved_backward(p: Partition, state: RoutingState, values, schedule, activation, needs) -> list:
    g, x, w_in, w_out, weights, h = values
    emit, travel = p.emit, state.dispatcher
    source, arrived = state.extra.get(ARRIVED, {}).get(h.node, (None, None))
    if source is not x.node:  # h went through the host, or was given by hand
        arrived = travel.push(emit, emit.call(ops.dispatch_raw, x.node, state.perm, state.inverse, state.k), state)
    wide = emit.cast(weights.node, torch.promote_types(dtype_of(x.node), torch.float32))
    scale = emit.call(A.index_select.default, emit.reshape(wide, [-1]), 0, state.perm)
    scale = travel.push(emit, scale, state)
    rows = travel.push(emit, emit.call(ops.dispatch_raw, g.node, state.perm, state.inverse, state.k), state)
    local = rows, arrived, w_in.node, w_out.node, scale, h.node, state.sizes
    dx, dw_in, dw_out, dscale = emit.items(
        emit.call(raw.mlp_rows_backward_raw, *local, *schedule, activation, needs)
    )
    if needs[0]:
        back = travel.pull(emit, dx, state)
        dx = emit.call(ops.dispatch_t_raw, back, state.perm, state.inverse, state.k)
    if needs[3]:
        slots = emit.call(A.index_select.default, travel.pull(emit, dscale, state), 0, state.inverse)
        slots = emit.reshape(slots, [p.local_size(weights.shape[0], state.token_axes), state.k])
        dscale = emit.cast(slots, dtype_of(weights.node))
    return [dx, dw_in, dw_out, dscale]


RULES = {raw.tiles_raw: tiles, raw.mlp_raw: mlp, raw.mlp_backward_raw: mlp_backward}
