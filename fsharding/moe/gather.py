"""The ``gather`` dispatcher: every rank of the expert axis sees all its tokens, and the results are summed back.

Legend: P ranks of the axis, E experts (rank r owns E/P consecutive ones), T tokens a rank, k experts a token.

Each rank gathers the tokens, ids and weights of the axis [P·T, ...], routes them to its own experts, and leaves out all
other slots: they come last in the expert order, past every group. Its outputs [P·T, D] are sums over its experts, and a
reduce-scatter adds those of all ranks and brings each token home. All sizes are known beforehand, so the host looks at
nothing and the step can be one CUDA graph; a token crosses the wire once for each other rank, not once for each of its
experts. The price: rows are as many as if all tokens chose this rank's experts, P·T·k, of which the products work on
those that did. For small P, or k of the order of P.
"""

from __future__ import annotations

import torch

from fsharding.comm import groups
from fsharding.moe import fast, ops
from fsharding.moe.local import Local
from fsharding.oplib import raw_op


def _route_mine(ids, experts, group):
    own = ids - groups.place(group, groups.current_rank()) * experts
    if ids.is_cuda and fast.present():
        return ops.route(own, experts)  # it drops what is out of range
    ops.check_ids(ids, experts * groups.axes_size(group))
    own = torch.where((own >= 0) & (own < experts), own, experts)
    perm, inverse, counts = ops.route(own, experts + 1)
    return perm, inverse, counts[:experts].clone()


route_mine = raw_op(
    "route_mine(Tensor ids, int experts, str group) -> (Tensor, Tensor, Tensor)",
    _route_mine,
    lambda ids, experts, group: (
        ids.new_empty(ids.numel(), dtype=torch.int64),
        ids.new_empty(ids.numel(), dtype=torch.int64),
        ids.new_empty(experts, dtype=torch.int32),
    ),
)
"""As ``route`` to this rank's ``experts`` of the group's: slots [T, k] that chose others come last, in no group."""

choices = raw_op(
    "choices(Tensor ids, int num_experts) -> Tensor",
    lambda ids, num_experts: ops.choices(ids.reshape(-1), num_experts),
    lambda ids, num_experts: ids.new_empty(num_experts, dtype=torch.int32),
)
"""int32 [E]: how many of the slots chose each expert."""

valid_rows = raw_op(
    "valid_rows(Tensor y, Tensor group_sizes) -> Tensor",
    lambda y, sizes: torch.where((torch.arange(y.shape[0], device=y.device) < sizes.sum())[:, None], y, 0),
    lambda y, sizes: torch.empty_like(y),
)
"""Rows past the groups become zero, whatever they hold."""


class Gather(Local):
    """All tokens of the axis come, all results go; no look of the host at the data."""

    def __init__(self, axis: str):
        self.axis = axis

    def route(self, emit, ids, num_experts: int):
        """(perm, inverse) of the tokens of all ranks of the axis, rows per expert of this rank's, and the choices of
        its own tokens."""
        parts, alias = emit.mesh.shape[self.axis], emit.mesh.alias((self.axis,))
        all_ids = emit.all_gather(ids, (self.axis,))
        made = emit.items(emit.call(route_mine, all_ids, num_experts // parts, alias))
        return *made, emit.call(choices, ids, num_experts)

    def plan(self, emit, state):
        state.rows *= emit.mesh.shape[self.axis]
        state.expert_axes = (self.axis,)
        return state

    def enter(self, emit, x, state):
        """Token side [T, ...] -> the tokens of all ranks [P·T, ...]; gathered once, and kept if both directions read
        them. Its note lets the schedule start it as soon as ``x`` is there, beside the routing."""
        key = "entered", x
        if key not in state.extra:
            state.extra[key] = self._moved(emit, emit.all_gather, x)
        return state.extra[key]

    def leave(self, emit, y, state, small: bool = False):
        """The transpose of ``enter``: sums over the ranks, each token's at home. A ``small`` one does not queue behind
        those of whole tokens."""
        return emit.reduce_scatter(y, (self.axis,)) if small else self._moved(emit, emit.reduce_scatter, y)

    def _moved(self, emit, collective, x):
        with emit.noted(tokens=True):
            return collective(x, (self.axis,))

    def valid(self, emit, rows, state):
        return emit.call(valid_rows, rows, state.sizes)

    back = valid
