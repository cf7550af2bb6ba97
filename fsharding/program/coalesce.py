"""Several collectives of one group as one call: large operands as they are, small ones packed into one buffer."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from fsharding.program.graphs import add_call

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
    ``order`` numbers the nodes as they stood before any merge; what a merge adds has the number of what it stands
    before.
    """
    members = sorted(members, key=order.__getitem__)
    first = members[0]
    if any(order[a] > order[first] for n in members for a in n.all_input_nodes):
        return  # an operand is made between them: the order that the schedule gave is kept
    writer, made = _Writer(graph, first, order), []
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
        wait.replace_all_uses_with(finish(_Writer(graph, wait, order), wait))
        graph.erase_node(wait)
    for node, _ in made:
        graph.erase_node(node)


class _Writer:
    """Adds nodes in front of ``first``."""

    def __init__(self, graph: fx.Graph, first: fx.Node, order: dict[fx.Node, int]):
        self.graph, self.first, self.order = graph, first, order

    def call(self, target, args, value, note) -> fx.Node:
        with self.graph.inserting_before(self.first):
            node = add_call(self.graph, target, args)
        node.meta = {"val": value, "custom": dict(note)}
        self.order[node] = self.order[self.first]
        return node

    def reshape(self, x: fx.Node, shape: tuple[int, ...], note) -> fx.Node:
        value = x.meta["val"]
        if tuple(value.shape) == shape:
            return x
        return self.call(A.reshape.default, (x, [*shape]), value.reshape(shape), note)

    def _note(self, members) -> dict:
        note = dict(members[0].meta["custom"])
        note["members"] = [
            {"param": n.meta["custom"].get("param"), "bytes": _bytes(n), "line": n.meta["custom"].get("line")}
            for n in members
        ]
        return note

    def grouped(self, members):
        """One group call; each result is waited for where it is used."""
        values = [n.meta["val"] for n in members]
        args = ([n.args[0] for n in members], *members[0].args[1:])
        one = self.call(COALESCED[members[0].target], args, values, self._note(members))
        return [_item(one, i, n) for i, n in enumerate(members)]

    def packed(self, members):
        """One flat buffer; of a reduce-scatter the parts of each rank, one rank behind the other."""
        node = members[0]
        rows = _parts(node) if node.target is REDUCE_SCATTER else 1
        after = _parts(node) if node.target is GATHER else 1
        sizes = [n.args[0].meta["val"].numel() // rows for n in members]
        plain = {k: v for k, v in node.meta["custom"].items() if k not in ("collective", "axes", "param")}
        shapes = [(rows, size) if rows > 1 else (size,) for size in sizes]
        flat = [self.reshape(n.args[0], shape, plain) for n, shape in zip(members, shapes, strict=True)]
        dim = len(shapes[0]) - 1
        joined = torch.cat([f.meta["val"] for f in flat], dim)
        buffer = self.reshape(self.call(A.cat.default, (flat, dim), joined, plain), (joined.numel(),), plain)
        value = joined.new_empty(joined.numel() // rows * after)
        started = self.call(node.target, (buffer, *node.args[1:]), value, self._note(members))
        state: dict[str, fx.Node] = {}
        return [_slice(started, i, n, sizes, after, state) for i, n in enumerate(members)]


def _parts(node: fx.Node) -> int:
    """How many ranks the group has: the one number among the arguments."""
    return next(a for a in node.args[1:] if isinstance(a, int))


def _item(started: fx.Node, i: int, member: fx.Node):
    """One result of a group call, waited for by itself."""

    def finish(writer: _Writer, wait: fx.Node) -> fx.Node:
        item = writer.call(operator.getitem, (started, i), member.meta["val"], _bare(member))
        return writer.call(C.wait_tensor.default, (item,), wait.meta["val"], wait.meta["custom"])

    return finish


def _slice(started: fx.Node, i: int, member: fx.Node, sizes, after: int, state: dict[str, fx.Node]):
    """This member's part of the buffer, which is waited for once, where the first of them is used."""

    def finish(writer: _Writer, wait: fx.Node) -> fx.Node:
        note = _bare(member)
        if not state:
            waited = writer.call(C.wait_tensor.default, (started,), started.meta["val"], note)
            state["rows"] = writer.reshape(waited, (after, sum(sizes)), note) if after > 1 else waited
        rows, start = state["rows"], sum(sizes[:i])
        dim = 1 if after > 1 else 0
        part = rows.meta["val"].narrow(dim, start, sizes[i])
        part = writer.call(A.slice.Tensor, (rows, dim, start, start + sizes[i]), part, note)
        if all(user.target is A.reshape.default for user in wait.users):  # they bring it to their shape themselves
            for user in [u for u in wait.users if u.meta["val"].shape == part.meta["val"].shape]:
                user.replace_all_uses_with(part)
                writer.graph.erase_node(user)
            return part
        return writer.reshape(part, tuple(member.meta["val"].shape), note)

    return finish


def _bare(node: fx.Node) -> dict:
    return {k: v for k, v in node.meta["custom"].items() if k not in ("collective", "axes")}
