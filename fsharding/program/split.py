"""The joint program of a function and its pull-back, cut in two by data flow.

The forward graph computes what the results need; the backward graph computes the gradients from the cotangents and from
what the forward graph saved. Every node that computes or communicates is in exactly one of them. What costs nothing is
made again instead of saved: views, constants, and what brings a stored leaf to its gather (a cast). Recomputed regions
and second gathers are in the backward graph by themselves, because no result needs them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from fsharding import _compat as compat
from fsharding.program.chains import WAIT, Chains
from fsharding.program.emit import FACTORIES
from fsharding.program.graphs import ancestors, drop_dead
from fsharding.program.partition import LocalProgram
from fsharding.program.remat import offload_raw
from fsharding.program.trace import is_view

# They belong to the node that they read: an element of several results, the end of a collective, a way to the host.
_TOGETHER = (operator.getitem, WAIT, offload_raw)


@dataclass
class Halves:
    """A joint program's two graphs.

    Attributes:
        forward: the program's inputs but the cotangents -> results, then ``tensors``, then ``numbers``.
        backward: ``inputs``, ``tensors``, ``numbers``, then cotangents -> gradients.
        inputs: which of the program's inputs the backward graph reads, by number. They are saved as they came.
        tensors: nodes of the joint graph whose values are saved.
        numbers: the same for ints, such as the number of rows that a rank received.
    """

    forward: fx.Graph
    backward: fx.Graph
    inputs: list[int]
    tensors: list[fx.Node]
    numbers: list[fx.Node]


def ahead(graph: fx.Graph, results: int) -> set[fx.Node]:
    """The nodes that the first ``results`` outputs need, inputs among them."""
    found = ancestors(list(graph.nodes)[-1].args[0][:results])
    for node in graph.nodes:
        if node.target in _TOGETHER and all(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def stamp(graph: fx.Graph, results: int) -> None:
    """Say of each node in which half it will be, as its phase: what schedules read is then what the split does."""
    first = ahead(graph, results)
    for node in graph.nodes:
        if node.op == "call_function":
            phase = "forward" if node in first else "backward"
            node.meta["custom"] = {**node.meta.get("custom", {}), "phase": phase}


def split(program: LocalProgram, results: int, cotangents: int) -> Halves:
    """Cut a scheduled joint program: its last ``cotangents`` inputs are cotangents, its first ``results`` outputs are
    results, the others gradients."""
    graph = program.graph
    holders = [n for n in graph.nodes if n.op == "placeholder"]
    primals, late = holders[: len(holders) - cotangents], holders[len(holders) - cotangents :]
    first = ahead(graph, results) | set(primals)
    outputs = list(list(graph.nodes)[-1].args[0])
    behind = [n for n in graph.nodes if n.op == "call_function" and n not in first]
    cheap = _Cheap(program)
    saved = _saved([a for n in behind for a in n.all_input_nodes] + outputs[results:], first, cheap)
    inputs = [i for i, n in enumerate(primals) if n in saved]
    tensors = [n for n in saved if n.op != "placeholder" and isinstance(n.meta["val"], torch.Tensor)]
    numbers = [n for n in saved if n.op != "placeholder" and not isinstance(n.meta["val"], torch.Tensor)]
    assert not any(isinstance(n.meta["val"], tuple | list) for n in numbers), "an element is saved, never a tuple"
    made = [n for n in graph.nodes if n.op == "call_function" and n in first]
    forward = _graph(primals, made, [*outputs[:results], *tensors, *numbers])
    given = [*(primals[i] for i in inputs), *tensors, *numbers, *late]
    return Halves(forward, _graph(given, behind, outputs[results:]), inputs, tensors, numbers)


def _saved(read: Sequence[fx.Node], first: set[fx.Node], cheap: _Cheap) -> list[fx.Node]:
    """What must be kept so that ``read`` is there in the backward graph, in order of first need."""
    found: dict[fx.Node, None] = {}
    seen, stack = set(), [n for n in reversed(read) if n in first]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if cheap(node):
            stack += reversed(node.all_input_nodes)
        else:
            found[node] = None
    return list(found)


class _Cheap:
    """Is a value made again rather than saved? Only what needs no work and no memory of its own."""

    def __init__(self, program: LocalProgram):
        self.chains = Chains(program)

    def __call__(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        if node in self.chains.moves and node not in self.chains.whole:
            return True  # made of a leaf at rest, which lives anyway
        if not node.all_input_nodes:
            return node.target in FACTORIES
        if node.target is operator.getitem:
            return is_view(node.args[0])
        return is_view(node) and _shares(node)


def _shares(node: fx.Node) -> bool:
    """``reshape`` and others are views or copies, by the strides of what they get: tried on a tensor without data."""
    like = node.args[0].meta["val"]
    base = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    rest, named = fx.node.map_arg((node.args[1:], node.kwargs), lambda n: n.meta["val"])
    with torch.no_grad():
        made = node.target(base, *rest, **named)
    return compat.shares_storage(made[0] if isinstance(made, tuple | list) else made, base)


def _graph(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.Graph:
    """A graph of copies. What ``nodes`` read and nobody gave is copied in front of its first reader."""
    graph, made = fx.Graph(), {}
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)

    def bring(node: fx.Node) -> fx.Node:
        if node not in made:
            for a in node.all_input_nodes:
                bring(a)
            made[node] = graph.node_copy(node, made.__getitem__)
            made[node].meta = dict(node.meta)
        return made[node]

    for node in nodes:
        bring(node)
    graph.output([bring(n) for n in results])
    drop_dead(graph)
    graph.lint()
    return graph
