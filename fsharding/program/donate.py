"""The last passes over a local program: move updates next to their inputs, write donated inputs in place, free
early."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

from fsharding.program.call import below_argument, tails
from fsharding.program.partition import LocalProgram
from fsharding.program.trace import is_view

A = torch.ops.aten
C = torch.ops._c10d_functional
# A started collective reads its operand until it is waited for.
_STARTED = {
    C.all_gather_into_tensor.default,
    C.reduce_scatter_tensor.default,
    C.all_reduce.default,
    C.all_to_all_single.default,
}


def shares_memory(node: fx.Node) -> bool:
    """May the result show the memory of the first operand? What is waited for shows that of its collective."""
    return is_view(node) or node.target is C.wait_tensor.default


def memory_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Per node the node that made the memory which it shows."""
    owner: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        owner[node] = owner[node.args[0]] if shares_memory(node) else node
    return owner


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
    """Let outputs take the memory of donated inputs: ``copy_`` as soon as both are at rest. Output -> input, by index.

    No two outputs show the same memory, and none that of an argument which the caller keeps: such outputs are copies.
    """
    graph, holders = program.graph, [n for n in program.graph.nodes if n.op == "placeholder"]
    owner = memory_of(graph)
    pairs = _match(program, donated, names, owner)
    results = _separate(program, holders, donated, pairs, owner)
    order = list(graph.nodes)
    position: dict[fx.Node, tuple[int, ...]] = {n: (i,) for i, n in enumerate(order)}
    for count, (out, into) in enumerate(pairs.items()):
        new, old = results[out], holders[into]
        last = max([new, *(n for n in _readers(old) if n.op != "output")], key=position.__getitem__)
        with graph.inserting_after(_tail(last)):
            copy = graph.call_function(A.copy_.default, (old, new))
        # Right behind `last`, so before what was put behind it earlier.
        position[copy] = (*position[_tail(last)], -count)
        copy.meta = {"val": old.meta["val"], "custom": {**new.meta.get("custom", {}), "donated": True}}
        results[out] = copy
    order[-1].args = (results,)
    graph.lint()
    return pairs


def _separate(program, holders, donated, pairs, owner) -> list[fx.Node]:
    """The outputs, copied where they would share memory with each other, a kept argument or one that is written."""
    results = list(program.nodes)
    kept = set(holders) - {holders[i] for i in donated}
    seen = {holders[into] for into in pairs.values()} | kept
    for i, node in enumerate(results):
        if i in pairs:
            continue
        if owner[node] in seen:
            with program.graph.inserting_after(_tail(node)):
                results[i] = program.graph.call_function(A.clone.default, (node,))
            results[i].meta = dict(node.meta)
            results[i].meta["custom"] = {k: node.meta.get("custom", {}).get(k) for k in ("phase", "line")}
        else:
            seen.add(owner[node])
    return results


def _tail(node: fx.Node) -> fx.Node:
    """After the placeholders, if the node is one."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def _readers(node: fx.Node) -> set[fx.Node]:
    """All nodes that read the memory of ``node``, through views and started collectives as well."""
    found, stack = set(), [node]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                if shares_memory(user) or user.target in _STARTED:
                    stack.append(user)
    return found


def _match(program: LocalProgram, donated, names, owner) -> dict[int, int]:
    """Outputs to donated inputs of the same layout; those of equal key path (below the argument) first."""
    holders = [n for n in program.graph.nodes if n.op == "placeholder"]
    free, taken = list(donated), {}

    def fits(out, into):
        (kind, dims, shape), given = program.outputs[out], program.inputs[into]
        node = program.nodes[out]
        at_rest = kind == given.kind or (kind == "whole" and not any(given.dims))
        alike = dims == given.dims and shape == given.shape and node.meta["val"].dtype == given.dtype
        # A view of an argument would be copied onto the memory that it shows.
        return at_rest and alike and owner[node] not in holders

    for exact in (True, False):
        for out in range(len(program.outputs)):
            if out in taken:
                continue
            for into in free:
                same_path = below_argument(program.inputs[into].name) in tails(names[out])
                if fits(out, into) and (same_path or not exact):
                    taken[out] = into
                    free.remove(into)
                    break
    return taken
