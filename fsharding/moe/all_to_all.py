"""Dispatchers as pure functions over the emitter: how a routing's rows travel in the local program.

A dispatcher offers ``plan`` (fills the routing state), ``send`` (token side -> expert side) and ``back`` (its
transpose). ``local`` moves nothing: the weights were gathered. ``all_to_all`` exchanges exact splits over the expert
axis.
"""

from __future__ import annotations

import torch

from fsharding.moe import exchange as x

A = torch.ops.aten


class Local:
    """Every rank serves its own tokens with all experts."""

    def plan(self, emit, state):
        return state

    def send(self, emit, rows, state):
        return rows

    back = send


class AllToAll:
    """Tokens travel to the rank that owns their expert; one look of the host at the split sizes a layer."""

    def __init__(self, axis: str):
        self.axis = axis

    def plan(self, emit, state):
        alias = emit.mesh.alias((self.axis,))
        note, emit.note = emit.note, {**emit.note, "collective": "all_to_all", "axes": (self.axis,)}
        received = emit.call(x.exchange_counts, state.counts, alias)
        emit.note = note
        splits = torch.empty(2, emit.mesh.shape[self.axis], dtype=torch.int64, device="meta")
        sizes = emit.add(
            x.host_sizes, (state.counts, received), {}, (splits, state.rows)
        )  # balanced: as many as it sends
        splits, rows = emit.items(sizes)
        order, inverse, local = emit.items(emit.call(x.expert_order, received, rows))
        state.extra = dict(splits=splits, order=order, inverse=inverse, alias=alias, sent=state.rows)
        state.rows, state.sizes, state.expert_axes = rows, local, (self.axis,)
        return state

    def send(self, emit, rows, state):
        arrived = self._exchange(emit, rows, state.rows, state, False)
        return emit.call(A.index_select.default, arrived, 0, state.extra["order"])

    def back(self, emit, rows, state):
        by_source = emit.call(A.index_select.default, rows, 0, state.extra["inverse"])
        return self._exchange(emit, by_source, state.extra["sent"], state, True)

    def _exchange(self, emit, rows, size, state, back):
        note, emit.note = emit.note, {**emit.note, "collective": "all_to_all", "axes": (self.axis,)}
        out = emit.call(x.exchange, rows, state.extra["splits"], size, state.extra["alias"], back)
        emit.note = note
        return out


DISPATCHERS = {"all_to_all": AllToAll}
