"""What brings stored leaves to their use and gradients to rest, as chains of nodes; and second chains, for gathering a
leaf again.

Reads the text of key paths only to find layers: leaves that share a path up to the first index are one layer.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable

import torch
import torch.fx as fx

from fsharding.comm import shards
from fsharding.program.graphs import copy_call
from fsharding.program.partition import LocalProgram
from fsharding.program.source import phase_of

A = torch.ops.aten
C = torch.ops._c10d_functional
GATHER = C.all_gather_into_tensor.default
REDUCE = (C.reduce_scatter_tensor.default, C.all_reduce.default)
WAIT = C.wait_tensor.default
PRODUCTS = {A.mm.default, A.bmm.default}
# What may stand in a chain from a stored leaf to its use: nothing that computes.
_MOVES = {
    A._to_copy.default, A.reshape.default, A.view.default, A.permute.default, A.transpose.int, A.t.default,
    A.expand.default, A.unsqueeze.default, A.squeeze.dim, A.squeeze.dims, A.select.int, A.slice.Tensor,
    A.contiguous.default, A.clone.default, A.unbind.int, operator.getitem, shards.unpad_blocks, shards.shard_slice,
    GATHER, WAIT,
}  # fmt: skip
_LAYER = re.compile(r"^(.*?\[\d+\])")


# ---- what moves ------------------------------------------------------------------------------------------------------
class Chains:
    """Which nodes only bring stored leaves to their use, and which bring gradients to rest.

    Attributes:
        moves: nodes that depend on stored leaves alone and compute nothing.
        whole: those of them that hold a gathered leaf, from the collective on.
        rests: nodes between a gradient and its place of rest.
    """

    def __init__(self, program: LocalProgram):
        graph = program.graph
        holders = [n for n in graph.nodes if n.op == "placeholder"]
        given = zip(holders, program.inputs, strict=True)
        self.stored = {n: leaf.name for n, leaf in given if leaf.kind == "stored"}
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.moves: set[fx.Node] = set()
        self.whole: set[fx.Node] = set()
        self.rests: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if self._moves(node):
                self.moves.add(node)
                if node.target is GATHER or any(a in self.whole for a in node.all_input_nodes):
                    self.whole.add(node)
            elif _to_rest(node):
                self.rests.add(node)

    def _moves(self, node: fx.Node) -> bool:
        known = all(a in self.stored or a in self.moves for a in node.all_input_nodes)
        return node.target in _MOVES and bool(node.all_input_nodes) and known and phase_of(node) != "update"

    def users(self, node: fx.Node) -> Iterable[fx.Node]:
        """Who reads a moving node's value for a computation, through what moves it further."""
        for user in node.users:
            if user in self.moves:
                yield from self.users(user)
            else:
                yield user

    def layers(self) -> dict[fx.Node, str]:
        """Of each stored leaf, and of what brings it to its use, the layer."""
        found = {n: _layer(name) for n, name in self.stored.items()}
        for node in sorted(self.moves, key=self.position.__getitem__):
            found[node] = found[node.all_input_nodes[0]]
        return found

    def gathers(self) -> list[fx.Node]:
        return [n for n in self.moves if n.target is GATHER]


def _to_rest(node: fx.Node) -> bool:
    note = node.meta.get("custom", {})
    return bool(note.get("param")) and not note.get("lookup") and phase_of(node) == "backward"


def layer_of(node: fx.Node) -> str:
    """Which bucket a collective of a leaf belongs to: the key path up to its first index, or the whole path."""
    return _layer(node.meta["custom"].get("param") or node.name)


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found[1] if found else name


# ---- gather again ----------------------------------------------------------------------------------------------------
def regather(graph: fx.Graph, chains: Chains, apart: bool = False) -> None:
    """A second chain, from the gather on, for what the backward pass reads of a leaf.

    A leaf whose whole form the backward pass needs first, right where the forward pass ends, is kept: freeing it would
    not lower the peak. If they run ``apart``, none is.
    """
    forward = {
        n: max((chains.position[u] for u in chains.users(n) if _runs_in(u, "forward")), default=-1)
        for n in chains.gathers()
    }
    last = max(forward.values(), default=-1)
    products = [i for n, i in chains.position.items() if n.target in PRODUCTS]
    for node, used in sorted(forward.items(), key=lambda item: chains.position[item[0]]):
        late = [u for u in chains.users(node) if _runs_in(u, "backward")]
        if late and (apart or (used >= 0 and any(used < i <= last for i in products))):
            _copy_chain(graph, chains, node, late)


def _runs_in(node: fx.Node, phase: str) -> bool:
    return node.op == "call_function" and (phase_of(node) == "backward") == (phase == "backward")


def _copy_chain(graph: fx.Graph, chains: Chains, root: fx.Node, late: list[fx.Node]) -> None:
    chain, stack = {root}, [root]
    while stack:
        for user in stack.pop().users:
            if user in chains.whole and user not in chain:
                chain.add(user)
                stack.append(user)
    first = min(late, key=chains.position.__getitem__)
    made: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(first):
        for node in sorted(chain, key=chains.position.__getitem__):
            made[node] = copy_call(graph, node, lambda a: made.get(a, a))
            made[node].meta = {**node.meta, "custom": {**node.meta["custom"], "phase": "backward"}}
    for user in set(late):
        for node in [a for a in user.all_input_nodes if a in made]:
            user.replace_input_with(node, made[node])
    for node in reversed(list(made.values())):
        if not node.users:
            graph.erase_node(node)
