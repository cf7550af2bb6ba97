"""What happens to an op without a rule for its operands: it runs on whole ones. Always right, never fast, never
silent."""

from __future__ import annotations

import torch
import torch.fx as fx

from fsharding.errors import ShardingError
from fsharding.program.partition import Partition
from fsharding.program.placing import NoRule
from fsharding.program.rules import rule_for
from fsharding.program.rules_reduce import substitute, walk
from fsharding.program.values import VALUES, GroupSizes, Permutation, is_routed
from fsharding.program.whole import warn


def fall_back(p: Partition, node: fx.Node, args, kwargs, why: NoRule):
    """Gather every operand over all axes, run the op on every rank. Shows as ``kind="fallback"`` in ``collectives()``.

    Raises the refusal itself under ``strict``, for routed rows (their order differs between layouts) and for ops of
    ours.
    """
    if p.strict or not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == "fsharding":
        raise ShardingError(str(why)) from None
    values = [v for v in walk((args, kwargs)) if isinstance(v, VALUES)]
    if any(isinstance(v, Permutation) for v in values):
        raise ShardingError(str(why)) from None
    note, p.emit.note = p.emit.note, {**p.emit.note, "fallback": True}
    whole = {}
    for value in values:
        x = p.total(value.placed if isinstance(value, GroupSizes) else value)
        if any(map(is_routed, x.dims)):
            raise ShardingError(str(why)) from None
        whole[id(value)] = p.unshard(x, x.dims)
    p.emit.note = note
    args, kwargs = substitute((args, kwargs), whole)
    warn(node)
    # By its rule again, which knows what the op means: a kernel could read how its operands lie in memory.
    return rule_for(node.target)(p, node, args, kwargs)
