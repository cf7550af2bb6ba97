"""The ``all_to_all`` dispatcher: rows travel to their experts by exact splits. What dispatchers offer: ``local.py``."""

from __future__ import annotations

import torch

from fsharding.moe import exchange as x
from fsharding.moe.gather import Gather
from fsharding.moe.local import Local

A = torch.ops.aten


class AllToAll(Local):
    """Tokens travel to the rank that owns their expert; one look of the host at the split sizes a layer."""

    moves = True

    def __init__(self, axis: str):
        self.axis = axis

    def plan(self, emit, state):
        alias = emit.mesh.alias((self.axis,))
        with emit.noted(collective="all_to_all", axes=(self.axis,)):
            received = emit.call(x.exchange_counts, state.counts, alias)
        splits = torch.empty(2, emit.mesh.shape[self.axis], dtype=torch.int64, device="meta")
        sizes = emit.add(
            x.host_sizes, (state.counts, received), {}, (splits, state.rows)
        )  # balanced: as many as it sends
        splits, rows = emit.items(sizes)
        order, inverse, local = emit.items(emit.call(x.expert_order, received, rows))
        state.extra = dict(splits=splits, order=order, inverse=inverse, alias=alias, sent=state.rows)
        state.rows, state.sizes, state.expert_axes = rows, local, (self.axis,)
        return state

    def push(self, emit, rows, state):
        """Rows [R, ...] of this rank's tokens, by expert -> rows that arrive here, by source rank."""
        return self._exchange(emit, rows, state.rows, state, False)

    def pull(self, emit, rows, state):
        """The transpose of ``push``."""
        return self._exchange(emit, rows, state.extra["sent"], state, True)

    def send(self, emit, rows, state):
        return emit.call(A.index_select.default, self.push(emit, rows, state), 0, state.extra["order"])

    def back(self, emit, rows, state):
        return self.pull(emit, emit.call(A.index_select.default, rows, 0, state.extra["inverse"]), state)

    def _exchange(self, emit, rows, size, state, back):
        with emit.noted(collective="all_to_all", axes=(self.axis,)):
            return emit.call(x.exchange, rows, state.extra["splits"], size, state.extra["alias"], back)


DISPATCHERS = {"all_to_all": AllToAll, "gather": Gather}
