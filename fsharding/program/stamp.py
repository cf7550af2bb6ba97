"""A traced body that a loop calls as one op while the outer graph is traced, copied into it once a step afterwards."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fsharding import oplib
from fsharding.errors import ShardingError
from fsharding.program.bundle import fakes
from fsharding.program.graphs import add_call, ancestors, copy_call, replace_uses


@dataclass
class Stamp:
    """One graph: ``inputs`` says what its placeholders are ("primal", "saved", "cotangent" or "constant", and which);
    ``outputs`` are its result nodes."""

    graph: fx.Graph
    inputs: list[tuple[str, int]]
    outputs: list[fx.Node]

    @property
    def vals(self) -> list[torch.Tensor]:
        return [n.meta["val"] for n in self.outputs]


_numbers = itertools.count()
_marking: contextvars.ContextVar[bool] = contextvars.ContextVar("fsharding_marking", default=True)


def marks() -> bool:
    """Are gradients that a transform computes marked as such?"""
    return _marking.get()


@contextlib.contextmanager
def unmarked():
    """The gradients computed inside belong to no argument of the user's."""
    token = _marking.set(False)
    try:
        yield
    finally:
        _marking.reset(token)


@dataclass
class Run:
    """A loop over a stamped body: one opaque op in the outer trace, and one for its gradient.

    Operands: the leaves of the first carry, those of each x in the order of the steps, what all steps share, constants.
    Results: the last carry, each step's ys, and a token. The gradient's op takes the operands, a cotangent for each
    floating result and the token, which tells whose gradient it is: what else it reads of the forward pass is found
    when the two are replaced by copies.
    """

    ahead: Stamp
    back: Stamp | None
    steps: int
    carry: int  # leaves of the carry
    item: int  # leaves of one x
    shared: int
    results: int  # leaves of the carry and of one y

    def __post_init__(self):
        self.key = f"scan{next(_numbers)}"
        _RUNS[self.key] = self
        one = self.ahead.vals[: self.results]
        self.values = one[: self.carry] + one[self.carry :] * self.steps  # what the results look like
        self.primals = self.carry + self.steps * self.item + self.shared

    def of_step(self, i: int, carry: Sequence, operands: Sequence) -> list:
        """What step i is called with."""
        at = self.carry + i * self.item
        return [*carry, *operands[at : at + self.item], *operands[self.primals - self.shared : self.primals]]


_RUNS: dict[str, Run] = {}  # those of the traces that run now: the fakes of the ops look here


def _run(key, xs):
    raise AssertionError("a stamped graph is copied into its program before anything runs")


def _fake(key, xs):
    device, values = xs[0].device if xs else "cpu", _RUNS[key].values
    return [*fakes((v, v.dtype) for v in values), torch.empty(0, device=device)]


def _fake_back(key, xs):
    return fakes((x, x.dtype) for x in xs[: _RUNS[key].primals] if x.is_floating_point())


stamp_raw = oplib.raw_op("stamp(str key, Tensor[] xs) -> Tensor[]", _run, _fake)
back_raw = oplib.raw_op("stamp_back(str key, Tensor[] xs) -> Tensor[]", _run, _fake_back)


# ---- calls -----------------------------------------------------------------------------------------------------------
class _Pull(torch.autograd.Function):
    """The gradient as an op of its own: a second derivative through it raises and nothing else does."""

    @staticmethod
    def forward(key, *tensors):
        return tuple(back_raw(key, list(tensors)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *cotangents):
        raise ShardingError(
            "a second derivative through `fs.scan` that the trace did not see coming: take it by `fs.grad` of "
            "`fs.grad`, both inside the sharded function, or write the loop out."
        )


class _Call(torch.autograd.Function):
    """The loop."""

    @staticmethod
    def forward(run: Run, *tensors):
        return tuple(stamp_raw(run.key, list(tensors)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.run, *tensors = inputs
        *results, token = output
        ctx.mark_non_differentiable(token, *(x for x in results if not x.is_floating_point()))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, token)

    @staticmethod
    def backward(ctx, *cotangents):
        *tensors, token = ctx.saved_tensors
        run, zeros = ctx.run, {}

        def given(g, value):
            kind = tuple(value.shape), value.dtype
            if g is None and kind not in zeros:
                zeros[kind] = torch.zeros(value.shape, dtype=value.dtype, device=token.device)
            return zeros[kind] if g is None else g

        pairs = zip(cotangents[:-1], run.values, strict=True)
        known = [given(g, value) for g, value in pairs if value.is_floating_point()]
        grads = iter(_Pull.apply(run.key, *tensors, *known, token))
        primals, constants = tensors[: run.primals], tensors[run.primals :]
        return None, *(next(grads) if x.is_floating_point() else None for x in primals), *(None for _ in constants)


def call(run: Run, primals: Sequence, constants: Sequence) -> tuple[list, list[list]]:
    """The loop in the running trace: the last carry, and each step's ys."""
    if run.back is None:
        outs = stamp_raw(run.key, [*primals, *constants])
    else:
        outs = _Call.apply(run, *primals, *constants)
    each = run.results - run.carry
    starts = (run.carry + i * each for i in range(run.steps))
    return list(outs[: run.carry]), [list(outs[start : start + each]) for start in starts]


# ---- one joint graph -> two ------------------------------------------------------------------------------------------
def split(program, primals: int, count: int, gradients: bool) -> tuple[Stamp, Stamp | None]:
    """Forward and backward of a joint graph ``(primals, cotangents, constants) -> (count results, gradients)``.

    The forward graph also returns what the backward one reads of it: single tensors, never operands or tuples.
    """
    graph = program.graph.graph
    holders = [n for n in graph.nodes if n.op == "placeholder"]
    kinds = {n: ("primal", i) for i, n in enumerate(holders[:primals])}
    kinds |= {n: ("cotangent", i) for i, n in enumerate(holders[primals : program.num_inputs])}
    kinds |= {n: ("constant", i) for i, n in enumerate(holders[program.num_inputs :])}
    leaves = list(list(graph.nodes)[-1].args[0])
    if not gradients:
        return _stamp(graph, kinds, set(graph.nodes), leaves, None), None
    ahead = ancestors(leaves[:count])
    ahead |= {n for n in kinds if kinds[n][0] != "cotangent"}
    ahead |= {n for n in graph.nodes if n.target is operator.getitem and n.args[0] in ahead}
    behind = [n for n in graph.nodes if n.op == "call_function" and n not in ahead]
    read = [a for n in behind for a in n.all_input_nodes] + leaves[count:]
    saved = [n for n in dict.fromkeys(read) if n in ahead and n not in kinds]
    front = _stamp(graph, kinds, ahead, leaves[:count] + saved, None)
    kinds |= {n: ("saved", i) for i, n in enumerate(saved)}
    return front, _stamp(graph, kinds, set(behind), leaves[count:], "backward")


def _stamp(graph: fx.Graph, kinds: dict, inside: set[fx.Node], results: list[fx.Node], phase: str | None) -> Stamp:
    body, env, inputs = fx.Graph(), {}, []

    def given(node: fx.Node) -> bool:
        return node in kinds and (node.op == "placeholder" or node not in inside)

    needed = ancestors(results, given)
    for node in graph.nodes:
        if node not in needed:
            continue
        if given(node):
            env[node] = body.placeholder(node.name)
            inputs.append(kinds[node])
        else:
            env[node] = body.node_copy(node, env.__getitem__)
        env[node].meta = dict(node.meta)
        if phase and "custom" in node.meta:
            env[node].meta["custom"] = {**node.meta["custom"], "phase": phase}
    return Stamp(body, inputs, [env[n] for n in results])


# ---- copies ----------------------------------------------------------------------------------------------------------
def inline(graph: fx.Graph) -> None:
    """Replace every loop by one copy of its body a step."""
    steps: dict[fx.Node, list] = {}  # by token, what each step was called with and what backward reads of it
    calls = [n for n in graph.nodes if n.target in (stamp_raw, back_raw)]
    for node in calls:
        run = _RUNS[node.args[0]]
        with graph.inserting_before(node):
            if node.target is stamp_raw:
                results, kept = _forward(graph, node, run)
            else:
                results, kept = _backward(graph, node, run, steps[_source(node.args[1][-1])]), None
        values = {item: results[item.args[1]] for item in node.users if item.args[1] < len(results)}
        steps |= {item: kept for item in node.users if item not in values}
        replace_uses(values)
        for item in values:
            graph.erase_node(item)
    for node in reversed(calls):
        for item in list(node.users):  # tokens
            for user in list(item.users):
                graph.erase_node(user)
            graph.erase_node(item)
        graph.erase_node(node)
        _RUNS.pop(node.args[0], None)


def _source(node: fx.Node) -> fx.Node:
    while node.target is not operator.getitem:
        node = node.args[0]  # an alias
    return node


def _forward(graph: fx.Graph, node: fx.Node, run: Run) -> tuple[list, list]:
    operands = list(node.args[1])
    carry, ys, kept = operands[: run.carry], [], []
    for i in range(run.steps):
        primals = run.of_step(i, carry, operands)
        outs = _copy(graph, run.ahead, {"primal": primals, "constant": operands[run.primals :]}, node)
        kept.append((primals, outs[run.results :]))
        carry = outs[: run.carry]
        ys += outs[run.carry : run.results]
    return carry + ys, kept


def _backward(graph: fx.Graph, node: fx.Node, run: Run, kept: list) -> list:
    """Gradients of the carry, of each x and of what is shared, the last step first."""
    operands = list(node.args[1])
    carried, of_y = (_floating(vals) for vals in (run.values[: run.carry], run.ahead.vals[run.carry : run.results]))
    first = len(operands) - 1 - carried - of_y * run.steps  # cotangents and the token come last
    constants, cotangents = operands[run.primals : first], operands[first:-1]
    carry, ys = cotangents[:carried], cotangents[carried:]
    items: list[list] = [[]] * run.steps
    shared: list = []
    for i in reversed(range(run.steps)):
        primals, saved = kept[i]
        pulled = [*carry, *ys[i * of_y : (i + 1) * of_y]]
        given = {"primal": primals, "saved": saved, "cotangent": pulled, "constant": constants}
        grads = _copy(graph, run.back, given, node)
        behind = carried + _floating(x.meta["val"] for x in primals[run.carry : run.carry + run.item])
        carry, items[i] = grads[:carried], grads[carried:behind]
        more = grads[behind:]
        shared = [_added(graph, a, b) for a, b in zip(shared, more, strict=True)] if shared else more
    return [*carry, *(g for item in items for g in item), *shared]


def _floating(values: Iterable[torch.Tensor]) -> int:
    return sum(v.is_floating_point() for v in values)


def _added(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    node = add_call(graph, torch.ops.aten.add.Tensor, (a, b))
    node.meta = {**b.meta, "custom": dict(b.meta.get("custom", {}))}
    return node


def _copy(graph: fx.Graph, stamp: Stamp, given: dict[str, Sequence], call: fx.Node) -> list[fx.Node]:
    """The results of one copy; notes of the call (a recomputed region, a direction) carry over."""
    holders = (n for n in stamp.graph.nodes if n.op == "placeholder")
    env: dict[fx.Node, Any] = {n: given[kind][i] for n, (kind, i) in zip(holders, stamp.inputs, strict=True)}
    outer = call.meta.get("custom", {})
    note = {"remat": outer["remat"]} if "remat" in outer else {}
    if outer.get("phase") == "backward":
        note["phase"] = "backward"
    for inner in stamp.graph.nodes:
        if inner.op != "placeholder":
            copy = env[inner] = copy_call(graph, inner, env.__getitem__)
            copy.meta = {**inner.meta, "custom": {**inner.meta.get("custom", {}), **note}}
    return [env[n] for n in stamp.outputs]
