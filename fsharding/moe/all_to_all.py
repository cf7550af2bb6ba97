"""Dispatchers as pure functions over the emitter: how a routing's rows travel in the local program.

A dispatcher offers ``route`` (the order of the rows and their counts), ``plan`` (fills the routing state), ``enter``
(this rank's tokens -> those that it serves) and ``leave`` (its transpose), ``send`` (token side -> expert side) and
``back`` (its transpose), and ``valid`` (rows with zeros where no expert is). One that ``moves`` rows also offers the
two halves of ``send`` and ``back``: ``push`` and ``pull`` exchange rows and leave them in the order in which they
arrive, and ``state.extra`` says where each row of the expert order stands then (``order``).

``local`` moves nothing: the weights were gathered. ``all_to_all`` exchanges exact splits over the expert axis.
``gather`` (see ``gather.py``) gathers tokens and sums results.
"""

from __future__ import annotations

import torch

from fsharding.moe import exchange as x
from fsharding.moe import ops
from fsharding.moe.gather import Gather

A = torch.ops.aten


class Local:
    """Every rank serves its own tokens with all experts."""

    moves = False

    def route(self, emit, ids, num_experts: int):
        perm, inverse, counts = emit.items(emit.call(ops.route, ids, num_experts))
        return perm, inverse, counts, counts

    def plan(self, emit, state):
        return state

    def send(self, emit, rows, state):
        return rows

    back = enter = valid = send

    def leave(self, emit, y, state, small: bool = False):
        return y


class AllToAll(Local):
    """Tokens travel to the rank that owns their expert; one look of the host at the split sizes a layer."""

    moves = True

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
        note, emit.note = emit.note, {**emit.note, "collective": "all_to_all", "axes": (self.axis,)}
        out = emit.call(x.exchange, rows, state.extra["splits"], size, state.extra["alias"], back)
        emit.note = note
        return out


DISPATCHERS = {"all_to_all": AllToAll, "gather": Gather}
