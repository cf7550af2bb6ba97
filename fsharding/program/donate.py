"""The last passes over a local program: move updates next to their inputs, write donated inputs in place, free
early."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

from fsharding.program.call import below_argument
from fsharding.program.partition import LocalProgram

A = torch.ops.aten
C = torch.ops._c10d_functional
# Ops whose result may share memory with an operand, or that read it until they are waited for.
_ALIASING = {
    A.reshape.default, A.permute.default, A.expand.default, A.slice.Tensor, A.select.int, A.unsqueeze.default,
    A.squeeze.dims, A.split.Tensor, A.split_with_sizes.default, A.unbind.int, A.contiguous.default,
    C.wait_tensor.default, C.all_gather_into_tensor.default, C.reduce_scatter_tensor.default, C.all_reduce.default,
}  # fmt: skip


def pull_updates_forward(graph: fx.Graph) -> None:
    """Place each node of the update phase right after the last of its operands.

    An optimizer written over whole trees computes all updates, then adds all of them: a second copy of the parameters.
    In this order one leaf's chain of ops runs to its end before the next leaf's begins.
    """
    nodes = list(graph.nodes)
    update = {n for n in nodes if n.op == "call_function" and n.meta.get("custom", {}).get("phase") == "update"}
    # What needs arguments only (a decayed moment) could run at once, and would then live all along: it runs when used.
    idle = {n for n in nodes if n.op == "placeholder"}
    keys: dict[fx.Node, tuple[float, ...]] = {}
    for i, node in enumerate(nodes):
        operands = [keys[a] for a in node.all_input_nodes if a not in idle]
        if node in update and not operands:
            idle.add(node)
            continue
        keys[node] = (*max(operands), i) if node in update else (i,)
    for i, node in reversed(list(enumerate(nodes))):
        if node not in keys:
            first = min((keys[u] for u in node.users), default=(len(nodes),))
            keys[node] = (*first[:-1], first[-1] - 0.5, i)
    ordered = sorted(nodes, key=keys.__getitem__)
    for before, after in zip(ordered, ordered[1:], strict=False):
        if before.next is not after:
            before.append(after)
    graph.lint()


def write_back(program: LocalProgram, donated: Sequence[int], names: Sequence[str]) -> dict[int, int]:
    """Let outputs take the memory of donated inputs: ``copy_`` as soon as both are at rest. Output index -> input
    index."""
    graph, holders = program.graph, [n for n in program.graph.nodes if n.op == "placeholder"]
    pairs = _match(program, donated, names)
    position = {n: i for i, n in enumerate(graph.nodes)}
    order = list(graph.nodes)
    output = order[-1]
    results = list(output.args[0])
    for out, into in pairs.items():
        new, old = results[out], holders[into]
        last = max([position[new], *(position[n] for n in _readers(old) if n.op != "output")])
        with graph.inserting_after(_tail(order[last])):
            copy = graph.call_function(A.copy_.default, (old, new))
        copy.meta = {"val": old.meta["val"], "custom": {**new.meta.get("custom", {}), "donated": True}}
        results[out] = copy
    output.args = (results,)
    graph.lint()
    return pairs


def _tail(node: fx.Node) -> fx.Node:
    """After the placeholders, if the node is one."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def _readers(node: fx.Node) -> set[fx.Node]:
    found, stack = set(), [node]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                if user.target in _ALIASING or user.op == "call_function" and "getitem" in str(user.target):
                    stack.append(user)
    return found


def _match(program: LocalProgram, donated, names) -> dict[int, int]:
    """Outputs to donated inputs of the same layout; those of equal key path (below the argument) first."""
    holders = [n for n in program.graph.nodes if n.op == "placeholder"]
    free, taken = list(donated), {}

    def fits(out, into):
        (kind, dims, shape), given = program.outputs[out], program.inputs[into]
        node = program.nodes[out]
        at_rest = kind == given.kind or (kind == "whole" and not any(given.dims))
        alike = dims == given.dims and shape == given.shape and node.meta["val"].dtype == given.dtype
        return at_rest and alike and node not in holders

    for exact in (True, False):
        for out in range(len(program.outputs)):
            if out in taken:
                continue
            for into in free:
                if fits(out, into) and (
                    not exact or below_argument(names[out]) == below_argument(program.inputs[into].name)
                ):
                    taken[out] = into
                    free.remove(into)
                    break
    return taken
