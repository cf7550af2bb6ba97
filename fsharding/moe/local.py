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

from fsharding.moe import ops


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
