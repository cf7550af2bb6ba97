"""From the global program and the inputs' specs to the local program of one rank, the same text on every rank.

The global graph is interpreted once with placed values (``values.py``); each op's rule (``rules.py``) says how blocks
propagate and writes local ops and explicit collectives through the emitter. Three domains: *placed* values (rows and
what is computed from them), *stored* values (parameters and states at rest, gathered when they meet rows) and *routed
rows* (between ``dispatch`` and ``combine``), which are placed values whose first dim carries a pseudo axis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fsharding.annotate.mesh import Mesh
from fsharding.comm import storage
from fsharding.errors import ShardingError
from fsharding.program.placing import NoRule, Placing
from fsharding.program.source import line_of, phase_of
from fsharding.program.values import (
    Const,
    Dims,
    Placed,
    Stored,
    is_routed,
)


@dataclass(frozen=True)
class Experts:
    """How experts are served: over which mesh axis tokens travel, and by which dispatcher.

    Args:
        axis: the mesh axis that splits the group dim of ``ragged_dot``'s weights.
        dispatcher: ``"all_to_all"``: rows travel to their experts, by exact splits that the host reads once a layer.
            ``"gather"``: tokens are gathered over the axis and results summed back, without a look of the host (so the
            step can be one CUDA graph) and with one crossing a token and rank; room for the rows of all ranks.
    """

    axis: str = "ep"
    dispatcher: str = "all_to_all"


@dataclass(frozen=True)
class Input:
    """One flat input: ``kind`` is "stored", "rows" or "constant" (read by reference, on every rank)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: Dims
    kind: str = "rows"


@dataclass
class LocalProgram:
    """What one rank runs. ``outputs`` holds per flat output its (kind, dims, global shape)."""

    graph: fx.Graph
    inputs: list[Input]
    outputs: list[tuple[str, Dims, tuple[int, ...]]]
    mesh: Mesh
    nodes: list[fx.Node]  # output nodes, in order


class Partition(Placing):
    """Interprets one global program; see the module's docstring. Rules call the methods of :class:`Placing`."""

    def __init__(
        self,
        mesh: Mesh,
        experts: Experts | None = None,
        reduce_dtype: torch.dtype | None = None,
        strict: bool = False,
    ):
        super().__init__(mesh)
        self.experts, self.reduce_dtype, self.strict = experts, reduce_dtype, strict
        self.rows: dict[fx.Node, Dims] = {}  # how the inputs that are rows are split
        self.whole: dict[Any, Placed] = {}  # what was gathered because a rule needed it whole (``whole.py``)
        self.found_at: dict[str, Dims] = {}  # where the operands of `fs.constrain` lay, for their cotangents
        self.lookups: dict[Any, Any] = {}  # embeddings whose rows travel; see ``rules_lookup.py``
        self._late: list[Input] = []
        self._results: dict[int, tuple] = {}

    # ---- running --------------------------------------------------------------------------------------------------
    def run(
        self, program: fx.GraphModule, inputs: Sequence[Input], out_dims: Sequence[Dims | None] | None
    ) -> LocalProgram:
        # The table imports the rules, which import this module.
        from fsharding.program.fallback import fall_back
        from fsharding.program.rules import rule_for

        env: dict[fx.Node, Any] = {}
        self._out_dims = out_dims
        placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
        for node, spec in zip(placeholders, inputs, strict=True):
            env[node] = self._enter(spec)
            cuts = tuple(storage.real_axes(self.mesh, axes) for axes in spec.dims)
            if spec.kind == "rows" and any(cuts):
                self.rows[node] = tuple(cuts[: max(i for i, axes in enumerate(cuts) if axes) + 1])
        left = {n: len(n.users) for n in program.graph.nodes}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            if node.op == "output":
                return self._leave(args[0], node.args[0], inputs)
            self.node = node
            self.emit.note = {"phase": phase_of(node), "line": line_of(node)}
            env[node] = self._apply(rule_for(node.target), fall_back, node, args, kwargs)
            for used in node.all_input_nodes:
                left[used] -= 1
                if not left[used]:
                    del env[used]
        raise AssertionError("a graph ends with its output")

    def _apply(self, rule, fall_back, node, args, kwargs):
        try:
            try:
                return rule(self, node, args, kwargs)
            except NoRule as why:
                return fall_back(self, node, args, kwargs, why)
        except Exception as error:
            self._unplanned(error)

    @contextlib.contextmanager
    def _planned(self):
        """Whatever goes wrong in a rule, such as an op without a shape function, names the op and the user's line."""
        try:
            yield
        except Exception as error:
            self._unplanned(error)

    def _unplanned(self, error: Exception):
        if isinstance(error, ShardingError):
            raise error
        raise ShardingError(
            f"{line_of(self.node)}: `{self.node.target}` cannot be planned ({type(error).__name__}: {error}). "
            "Write it with other ops."
        ) from error

    def _enter(self, spec: Input):
        shape = tuple(storage.block_size(self.mesh, n, axes) for n, axes in zip(spec.shape, spec.dims, strict=True))
        node = self.emit.input(_identifier(spec.name), shape, spec.dtype)
        if spec.kind == "stored":
            return Stored(node, spec.shape, spec.dims, spec.name)
        return Placed(node, spec.shape, spec.dims)

    def enter_late(self, spec: Input):
        """An input that only a rule knows, such as a cotangent: behind all others."""
        self._late.append(spec)
        return self._enter(spec)

    def _leave(self, values, sources, inputs) -> LocalProgram:
        found = [self.result(i, *pair) for i, pair in enumerate(zip(values, sources, strict=True))]
        nodes = [node for *_, node in found]
        self.emit.graph.output(nodes)
        outputs = [(kind, dims, shape) for kind, dims, shape, _ in found]
        return LocalProgram(self.emit.graph, [*inputs, *self._late], outputs, self.mesh, nodes)

    def result(self, number: int, value, source: fx.Node) -> tuple[str, Dims, tuple[int, ...], fx.Node]:
        """Flat output ``number`` as it leaves: (kind, dims, global shape, node)."""
        if number not in self._results:
            self.node, current = source, self.node
            self.emit.note = {"phase": phase_of(source), "line": line_of(source)}
            want = self._out_dims[number] if self._out_dims is not None else None
            with self._planned():
                self._results[number] = self._output(value, want)
            self.node = current
        return self._results[number]

    def _output(self, value, want: Dims | None):
        if isinstance(value, Stored):
            if want is None or same_dims(self.mesh, value.dims, want):
                return "stored", value.dims, value.shape, value.node
            return "stored", want, value.shape, self.rest(self.placed(value), want).node
        placed = self.total(self.relayout(value, value.dims) if isinstance(value, Const) and value.dims else value)
        if any(map(is_routed, placed.dims)):
            self.fail(
                "routed rows are returned: their number differs between ranks and steps. Return what `combine` gives"
            )
        if want is not None and not same_dims(self.mesh, placed.dims, want):
            placed = self.total(self.relayout(self._gather_extra(placed, want), want))
        return ("rows" if any(placed.dims) else "whole"), placed.dims, placed.shape, placed.node

    def _gather_extra(self, x: Placed, want: Dims) -> Placed:
        extra = tuple(() if a == b[: len(a)] else a for a, b in zip(x.dims, want, strict=True))
        return self.unshard(x, extra)


def same_dims(mesh: Mesh, a: Dims, b: Dims) -> bool:
    return all(storage.real_axes(mesh, x) == storage.real_axes(mesh, y) for x, y in zip(a, b, strict=True))


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name).strip("_") or "arg"
