"""Graphs that are called like ops while an outer graph is traced, and copied into it afterwards."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fsharding import oplib
from fsharding.errors import ShardingError
from fsharding.program.graphs import ancestors


@dataclass
class Stamp:
    """One graph: ``inputs`` says what its placeholders are ("primal", "saved", "cotangent" or "constant", and which);
    ``outputs`` are its result nodes."""

    key: str
    graph: fx.Graph
    inputs: list[tuple[str, int]]
    outputs: list[fx.Node]

    @property
    def vals(self) -> list[torch.Tensor]:
        return [n.meta["val"] for n in self.outputs]


_STAMPS: dict[str, Stamp] = {}  # those of the traces that run now: the fakes of the op look here
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


def _run(key, xs):
    raise AssertionError("a stamped graph is copied into its program before anything runs")


def _fake(key, xs):
    return [torch.empty(v.shape, dtype=v.dtype, device=xs[0].device if xs else "cpu") for v in _STAMPS[key].vals]


stamp_raw = oplib.raw_op("stamp(str key, Tensor[] xs) -> Tensor[]", _run, _fake)


# ---- calls -----------------------------------------------------------------------------------------------------------
class _Pull(torch.autograd.Function):
    """The backward graph as an op of its own: a second derivative through it raises and nothing else does."""

    @staticmethod
    def forward(key, *tensors):
        return tuple(stamp_raw(key, list(tensors)))

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
    """One step: the forward graph gives the results and what the backward graph will read besides its operands."""

    @staticmethod
    def forward(ahead: Stamp, back: Stamp | None, count: int, primals: int, *tensors):
        return tuple(stamp_raw(ahead.key, _operands(ahead, tensors[:primals], (), (), tensors[primals:])))

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.back, ctx.count, ctx.primals, *tensors = inputs
        ctx.kinds = [(x.shape, x.dtype) for x in output[: ctx.count]]
        floats = [x.is_floating_point() for x in output[: ctx.count]]
        ctx.mark_non_differentiable(*(x for i, x in enumerate(output) if i >= ctx.count or not floats[i]))
        ctx.set_materialize_grads(False)  # most outputs are kept values, which nobody differentiates
        ctx.save_for_backward(*tensors, *output[ctx.count :])

    @staticmethod
    def backward(ctx, *cotangents):
        saved = ctx.saved_tensors
        total = len(saved) - (len(cotangents) - ctx.count)
        primals, constants, kept = saved[: ctx.primals], saved[ctx.primals : total], saved[total:]
        given = [
            torch.zeros(shape, dtype=dtype, device=primals[0].device) if g is None else g
            for g, (shape, dtype) in zip(cotangents, ctx.kinds, strict=False)
            if dtype.is_floating_point
        ]
        grads = iter(_Pull.apply(ctx.back.key, *_operands(ctx.back, primals, kept, given, constants)))
        return (
            None,
            None,
            None,
            None,
            *(next(grads) if x.is_floating_point() else None for x in primals),
            *(None for _ in constants),
        )


def call(ahead: Stamp, back: Stamp | None, count: int, primals: Sequence, constants: Sequence) -> list[torch.Tensor]:
    """The results of one step, in the running trace."""
    if back is None:
        return list(stamp_raw(ahead.key, _operands(ahead, primals, (), (), constants)))[:count]
    return list(_Call.apply(ahead, back, count, len(primals), *primals, *constants))[:count]


def _operands(stamp: Stamp, primals, saved, cotangents, constants) -> list[torch.Tensor]:
    kinds = {"primal": primals, "saved": saved, "cotangent": cotangents, "constant": constants}
    return [kinds[kind][i] for kind, i in stamp.inputs]


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
    made = Stamp(f"scan{next(_numbers)}", body, inputs, [env[n] for n in results])
    _STAMPS[made.key] = made
    return made


# ---- copies ----------------------------------------------------------------------------------------------------------
def inline(graph: fx.Graph) -> None:
    """Replace every call by a copy of its graph; notes of the call (a recomputed region) carry over."""
    calls = [n for n in graph.nodes if n.target is stamp_raw]
    for node in calls:
        body = _STAMPS[node.args[0]]
        env: dict[fx.Node, Any] = dict(
            zip((n for n in body.graph.nodes if n.op == "placeholder"), node.args[1], strict=True)
        )
        outer = node.meta.get("custom", {})
        with graph.inserting_before(node):
            for inner in body.graph.nodes:
                if inner.op == "placeholder":
                    continue
                copy = env[inner] = graph.node_copy(inner, env.__getitem__)
                custom = dict(inner.meta.get("custom", {}))
                if "remat" in outer:
                    custom["remat"] = outer["remat"]
                if outer.get("phase") == "backward":
                    custom["phase"] = "backward"
                copy.meta = {**inner.meta, "custom": custom}
        for item in list(node.users):
            item.replace_all_uses_with(env[body.outputs[item.args[1]]])
            graph.erase_node(item)
        graph.erase_node(node)
    for key in {n.args[0] for n in calls}:
        _STAMPS.pop(key, None)
