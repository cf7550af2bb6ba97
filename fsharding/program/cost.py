"""What the ops of a program cost: floating-point operations, and memory that kernels need while they run."""

from __future__ import annotations

import math
import operator

import torch
import torch.fx as fx

from fsharding.comm import groups
from fsharding.moe import expert_ops
from fsharding.moe import ops as moe_ops
from fsharding.moe.gather import route_mine
from fsharding.program import cross_entropy
from fsharding.program.attention import attention_backward_raw, attention_raw

A = torch.ops.aten


def flops(graph: fx.Graph) -> int:
    """Floating-point operations of matrix products and attention (2 per multiply-add); elementwise work is not
    counted."""
    return sum(node_flops(n) for n in graph.nodes)


def node_flops(node: fx.Node) -> int:
    """Of one node, under balanced routing."""
    return int(_flops(node) * _share(node))


def _share(node: fx.Node) -> float:
    """Of routed rows that have room for the tokens of several ranks, the part that is this rank's."""
    for a in node.all_input_nodes:
        if a.target is operator.getitem and a.args[0].target is route_mine:
            return 1 / groups.axes_size(a.args[0].args[2])
    return 1.0


def _flops(node: fx.Node) -> int:
    def shape(i):
        return list(node.args[i].meta["val"].shape)

    if node.target in (A.mm.default, A.bmm.default):
        return 2 * math.prod(shape(0)) * shape(1)[-1]
    if node.target is A.addmm.default:
        return 2 * math.prod(shape(1)) * shape(2)[-1]
    if node.target in (A.mv.default, A.dot.default):
        return 2 * math.prod(shape(0))
    if node.target is moe_ops.ragged_dot_raw:
        return 2 * math.prod(shape(0)) * shape(1)[-1]
    if node.target is moe_ops.ragged_dw_raw:
        return 2 * math.prod(shape(0)) * shape(1)[1]
    if node.target in _FLOPS:
        return _FLOPS[node.target](*fx.node.map_arg(node.args, lambda n: n.meta["val"]))
    if node.target is attention_raw:
        b, h, q, d = shape(0)
        return 4 * b * h * q * shape(1)[2] * d
    if node.target is attention_backward_raw:
        b, h, q, d = shape(1)
        return 10 * b * h * q * shape(2)[2] * d
    return 0


def workspace(node: fx.Node) -> int:
    """Bytes that a kernel of ours allocates and frees while it runs; of PyTorch's own kernels nothing is known."""
    found = _WORKSPACE.get(node.target)
    return found(*fx.node.map_arg(node.args, lambda n: n.meta["val"])) if found else 0


_FLOPS = {**expert_ops.FLOPS, **cross_entropy.FLOPS}
_WORKSPACE = {**expert_ops.WORKSPACE, **cross_entropy.WORKSPACE}
