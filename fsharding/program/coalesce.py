"""Several collectives of one group as one call: large operands as they are, small ones packed into one buffer."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

A = torch.ops.aten
C = torch.ops._c10d_functional
GATHER, REDUCE_SCATTER, ALL_REDUCE = (
    C.all_gather_into_tensor.default, C.reduce_scatter_tensor.default, C.all_reduce.default,
)  # fmt: skip
COALESCED = {
    GATHER: C.all_gather_into_tensor_coalesced.default,
    REDUCE_SCATTER: C.reduce_scatter_tensor_coalesced.default,
    ALL_REDUCE: C.all_reduce_coalesced.default,
}


def coalesce(graph: fx.Graph, members: list[fx.Node], pack_bytes: int, order: dict[fx.Node, int]) -> None:
    """Merge collectives of one op, group and dtype that stand side by side, their operands before the first.

    Those of which the larger side is at most ``pack_bytes`` share a buffer: a group call is slow on small pieces.
    ``order`` numbers the nodes as they stood before any merge; a merge of what an earlier one made counts anew.
    """
    if any(a not in order for n in members for a in (n, *n.all_input_nodes, *n.users)):
        order.update((n, i) for i, n in enumerate(graph.nodes))
    members = sorted(members, key=order.__getitem__)
    first = members[0]
    if any(order[a] > order[first] for n in members for a in n.all_input_nodes):
        return  # an operand is made between them: the order that the schedule gave is kept
    writer, made = _Writer(graph, first), []
    for kind, some in (
        (writer.packed, [n for n in members if _bytes(n) <= pack_bytes]),
        (writer.grouped, [n for n in members if _bytes(n) > pack_bytes]),
    ):
        made += list(zip(some, kind(some), strict=True)) if len(some) > 1 else []
    _replace(graph, made, order)


def _bytes(node: fx.Node) -> int:
    sizes = [x.numel() * x.dtype.itemsize for x in (node.meta["val"], node.args[0].meta["val"])]
    return max(sizes)


def _replace(graph: fx.Graph, made, order: dict[fx.Node, int]) -> None:
    """Each member's waits become what its function makes of the call that it is part of, earliest wait first."""
    waits = [(wait, finish) for node, finish in made for wait in node.users]
    for wait, finish in sorted(waits, key=lambda pair: order[pair[0]]):
        with graph.inserting_before(wait):
            wait.replace_all_uses_with(finish(graph, wait))
        graph.erase_node(wait)
    for node, _ in made:
        graph.erase_node(node)


class _Writer:
    """Adds nodes in front of ``first``."""

    def __init__(self, graph: fx.Graph, first: fx.Node):
        self.graph, self.first = graph, first

    def call(self, target, args, value, note) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {"val": value, "custom": note}
        return node

    def _flat(self, member: fx.Node, shape, note) -> fx.Node:
        x = member.args[0]
        return self.call(A.reshape.default, (x, shape), x.meta["val"].reshape(shape), note)

    def _note(self, members) -> dict:
        note = dict(members[0].meta["custom"])
        note["members"] = [
            {"param": n.meta["custom"].get("param"), "bytes": _bytes(n), "line": n.meta["custom"].get("line")}
            for n in members
        ]
        return note

    def grouped(self, members):
        """One group call; each result is waited for where it is used."""
        with self.graph.inserting_before(self.first):
            values = [n.meta["val"] for n in members]
            args = ([n.args[0] for n in members], *members[0].args[1:])
            one = self.call(COALESCED[members[0].target], args, values, self._note(members))
        return [_item(one, i, n) for i, n in enumerate(members)]

    def packed(self, members):
        """One buffer: [ranks, all elements] for a gather or reduce-scatter, flat for an all-reduce."""
        node = members[0]
        parts = 1 if node.target is ALL_REDUCE else _parts(node)
        rows = parts if node.target is REDUCE_SCATTER else 1
        after = parts if node.target is GATHER else 1
        sizes = [n.args[0].meta["val"].numel() // rows for n in members]
        plain = {k: v for k, v in node.meta["custom"].items() if k not in ("collective", "axes", "param")}
        with self.graph.inserting_before(self.first):
            flat = [self._flat(n, [rows, size], plain) for n, size in zip(members, sizes, strict=True)]
            joined = torch.cat([f.meta["val"] for f in flat], 1)
            buffer = self.call(A.cat.default, (flat, 1), joined, plain)
            length = joined.numel() // rows
            buffer = self.call(A.reshape.default, (buffer, [rows * length]), joined.reshape(-1), plain)
            value = joined.new_empty(length * after)
            started = self.call(node.target, (buffer, *node.args[1:]), value, self._note(members))
        state: dict[str, fx.Node] = {}
        return [_slice(started, i, n, sizes, after, state) for i, n in enumerate(members)]


def _parts(node: fx.Node) -> int:
    """How many ranks the group has: the one number among the arguments."""
    return next(a for a in node.args[1:] if isinstance(a, int))


def _item(started: fx.Node, i: int, member: fx.Node):
    """One result of a group call, waited for by itself."""

    def finish(graph, wait):
        item = graph.call_function(operator.getitem, (started, i))
        item.meta = {"val": member.meta["val"], "custom": _bare(member)}
        waited = graph.call_function(C.wait_tensor.default, (item,))
        waited.meta = dict(wait.meta)
        return waited

    return finish


def _slice(started: fx.Node, i: int, member: fx.Node, sizes, after: int, state: dict[str, fx.Node]):
    """This member's part of the buffer, which is waited for once, where the first of them is used."""

    def add(graph, target, args, value):
        node = graph.call_function(target, args)
        node.meta = {"val": value, "custom": _bare(member)}
        return node

    def finish(graph, wait):
        if not state:
            waited = add(graph, C.wait_tensor.default, (started,), started.meta["val"])
            rows = started.meta["val"].reshape(after, sum(sizes))
            state["rows"] = add(graph, A.reshape.default, (waited, list(rows.shape)), rows)
        rows, start = state["rows"], sum(sizes[:i])
        part = rows.meta["val"][:, start : start + sizes[i]]
        part = add(graph, A.slice.Tensor, (rows, 1, start, start + sizes[i]), part)
        return add(graph, A.reshape.default, (part, list(member.meta["val"].shape)), member.meta["val"])

    return finish


def _bare(node: fx.Node) -> dict:
    return {k: v for k, v in node.meta["custom"].items() if k not in ("collective", "axes")}
