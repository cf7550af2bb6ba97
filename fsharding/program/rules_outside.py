"""Cotangents that come from outside: in the joint program of a function and its pull-back they are inputs.

The trace marks each with an op on the result that it belongs to; the partition makes it an input with that result's
layout. So results of any shape and spec get cotangents that fit, without a trace of its own for finding out.
"""

from __future__ import annotations

import torch

from fsharding.oplib import raw_op
from fsharding.program.emit import dtype_of
from fsharding.program.partition import Input, Partition

cotangent_raw = raw_op(
    "cotangent(Tensor x, int number) -> Tensor",
    lambda x, number: torch.zeros_like(x),
    lambda x, number: torch.empty_like(x, memory_format=torch.contiguous_format),
)
"""Stands for the cotangent of result ``number``, whose value is ``x``."""


def cotangent(p: Partition, node, args, kwargs):
    """The cotangent of a result: an input, laid out as the result leaves."""
    value, number = args
    kind, dims, shape, local = p.result(number, value, node.args[0])
    at_rest = "stored" if kind == "stored" else "rows"
    return p.enter_late(Input(f"cotangent[{number}]", tuple(shape), dtype_of(local), dims, at_rest))


RULES = {cotangent_raw: cotangent}
