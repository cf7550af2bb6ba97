"""Layer-major order: all micro-batches of a layer before the next layer, so that one gather of its weights serves all.

A node's layer is the latest whose weights it needs, directly or through its operands; in the backward pass, counted
from the end. Micro-batches do not depend on each other, so the order that this gives is one of the program's own.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from fsharding.program.source import phase_of

A = torch.ops.aten
C = torch.ops._c10d_functional


def layer_major(graph: fx.Graph, chains, layers: dict[fx.Node, str], sort) -> None:
    """Reorder in place.

    Args:
        chains: the ``Chains`` of the graph.
        layers: of each node that brings a leaf to its use, the layer of the leaf.
        sort: ``sort(graph, keys)`` orders topologically by keys.
    """
    numbers: dict[str, int] = {}
    for node in graph.nodes:
        if phase_of(node) == "forward" and node not in chains.moves:
            for layer in _reads(node, layers):
                numbers.setdefault(layer, len(numbers))
    count, level, keys = len(numbers), {}, {}
    for i, node in enumerate(graph.nodes):
        backward = phase_of(node) == "backward"
        if node in chains.moves or node.op != "call_function":
            keys[node] = (-1, 0, i)
            continue
        if node in chains.rests or phase_of(node) == "update":
            keys[node] = (2, 0, i)
            continue
        own = [numbers[layer] for layer in _reads(node, layers) if layer in numbers]
        at = [count - n for n in own] if backward else own
        at += [level[a] for a in node.all_input_nodes if a in level and (phase_of(a) == "backward") == backward]
        level[node] = max(at, default=0)
        keys[node] = (int(backward), level[node], i)
    sort(graph, keys)


def _reads(node: fx.Node, layers: dict[fx.Node, str]):
    return [layers[a] for a in node.all_input_nodes if a in layers]


def merge_reductions(graph: fx.Graph, chains) -> None:
    """``reduce(a) + reduce(b)`` becomes ``reduce(a + b)``: micro-batches' gradients are added before they travel.

    Only where the sum is as wide before as behind the reduction, and both reductions are the same to the last argument.
    """
    ends = {n: chain for n in graph.nodes if (chain := _chain(n, chains)) is not None}
    for node in list(graph.nodes):
        if node.target is not A.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
            continue
        a, b = node.args
        if a not in ends or b not in ends or _text(ends[a]) != _text(ends[b]):
            continue
        left, right = ends[a][0].args[0], ends[b][0].args[0]
        if left.meta["val"].dtype != node.meta["val"].dtype or len(a.users) > 1 or len(b.users) > 1:
            continue
        ends[node] = _joined(graph, node, ends[b], left, right)
        last = ends[node][-1]
        node.replace_all_uses_with(last)
        ends[last] = ends.pop(node)
        chains.rests.update(ends[last])
        for old in (node, *reversed(ends[b]), *reversed(ends[a])):
            if not old.users:
                graph.erase_node(old)


def _chain(end: fx.Node, chains) -> list[fx.Node] | None:
    """From the first reduction to ``end``, one node behind the other; None where ``end`` ends no such chain."""
    if end not in chains.rests:
        return None
    chain = [end]
    while chain[-1].target not in (C.reduce_scatter_tensor.default, C.all_reduce.default) or _earlier(
        chain[-1], chains
    ):
        before = [a for a in chain[-1].all_input_nodes if a in chains.rests]
        if len(before) != 1 or len(chain[-1].all_input_nodes) != 1:
            return None
        chain.append(before[0])
    return chain[::-1]


def _earlier(node: fx.Node, chains) -> bool:
    """Is there another reduction in front of this one?"""
    a = node.args[0]
    while a in chains.rests and len(a.all_input_nodes) == 1:
        if a.target is C.wait_tensor.default:
            return True
        a = a.all_input_nodes[0]
    return False


def _text(chain: list[fx.Node]) -> list:
    return [(n.target, n.args[1:], n.kwargs) for n in chain]


def _joined(graph: fx.Graph, node: fx.Node, chain: list[fx.Node], left: fx.Node, right: fx.Node) -> list[fx.Node]:
    with graph.inserting_before(node):
        total = graph.call_function(A.add.Tensor, (left, right))
        note = {k: v for k, v in chain[0].meta["custom"].items() if k not in ("collective", "axes", "param")}
        total.meta = {"val": left.meta["val"], "custom": {**note, "phase": "backward"}}
        made, at = [], total
        for old in chain:
            at = graph.call_function(old.target, (at, *old.args[1:]), dict(old.kwargs))
            at.meta = dict(old.meta)
            made.append(at)
    return made
