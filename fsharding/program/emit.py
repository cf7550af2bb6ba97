"""Writes the local program: each call adds one node and computes the shape of its result on meta tensors.

No tracer is involved, so that a program for 4,096 ranks costs what one for 8 costs, and its text holds nothing of the
rank that wrote it. The number of routed rows is known at run time only: shapes here show what balanced routing gives,
and whatever takes a number of rows as an argument takes the node that carries it.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
import torch.fx as fx

from fsharding.annotate.mesh import Mesh
from fsharding.program.graphs import add_call

A = torch.ops.aten
C = torch.ops._c10d_functional
FACTORIES = {
    A.full.default, A.arange.default, A.arange.start, A.arange.start_step, A.linspace.default, A.eye.default, A.eye.m,
}  # fmt: skip


class Emitter:
    """One local program under construction.

    Attributes:
        note: what is put into ``meta["custom"]`` of the nodes to come: phase, line, param, collective.
    """

    def __init__(self, mesh: Mesh):
        self.mesh, self.graph, self.note = mesh, fx.Graph(), {}
        self._items: dict[tuple[fx.Node, int], fx.Node] = {}
        # Results by op and operands, and tensors by their description: a layer's ops come again in each layer, and
        # then one tensor stands for all that look alike, which makes the look-up cheap.
        self._shapes: dict[Any, Any] = {}
        self._alike: dict[Any, torch.Tensor] = {}
        self._last: fx.Node | None = None  # input

    @contextlib.contextmanager
    def noted(self, **more):
        """Nodes added inside carry these notes as well."""
        note, self.note = self.note, {**self.note, **more}
        try:
            yield
        finally:
            self.note = note

    def input(self, name: str, shape, dtype) -> fx.Node:
        with self.graph.inserting_after(self._last) if self._last is not None else contextlib.nullcontext():
            self._last = node = self.graph.placeholder(name)
        node.meta["val"] = self._one_for_all(torch.empty(tuple(shape), dtype=dtype, device="meta"))
        return node

    def _one_for_all(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._alike.setdefault((tuple(value.shape), value.stride(), value.dtype), value)
        return type(value)(map(self._one_for_all, value)) if type(value) in (list, tuple) else value

    def call(self, target, *args, **kwargs) -> fx.Node:
        """Add ``target(*args, **kwargs)``; arguments may hold nodes at any depth."""
        values, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        if target in FACTORIES or "device" in named:
            named = {**named, "device": "meta"}
        key = _signature((target, values, named))
        if key not in self._shapes:
            with torch.no_grad():
                self._shapes[key] = target(*values, **named)
        return self.add(target, args, kwargs, self._shapes[key])

    def add(self, target, args, kwargs, value) -> fx.Node:
        """Add a node whose result is known to look like ``value``."""
        node = add_call(self.graph, target, args, kwargs)
        node.meta["val"], node.meta["custom"] = self._one_for_all(value), dict(self.note)
        return node

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """Element ``index`` of a node with several results."""
        if (node, index) not in self._items:
            self._items[node, index] = self.call(operator.getitem, node, index)
        return self._items[node, index]

    def items(self, node: fx.Node) -> list[fx.Node]:
        return [self.item(node, i) for i in range(len(node.meta["val"]))]

    # ---- small helpers that avoid no-op nodes ---------------------------------------------------------------------
    def reshape(self, x: fx.Node, sizes) -> fx.Node:
        sizes = list(sizes)
        while x.target is A.reshape.default and value_of(x.args[0]).is_contiguous():
            x = x.args[0]  # a view of a view
        if all(isinstance(s, int) for s in sizes) and list(shape_of(x)) == sizes:
            return x
        return self.call(A.reshape.default, x, sizes)

    def permute(self, x: fx.Node, order) -> fx.Node:
        order = list(order)
        return x if order == list(range(len(order))) else self.call(A.permute.default, x, order)

    def contiguous(self, x: fx.Node) -> fx.Node:
        return x if x.meta["val"].is_contiguous() else self.call(A.contiguous.default, x)

    def cast(self, x: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        if dtype is None or x.meta["val"].dtype == dtype:
            return x
        return self.call(A._to_copy.default, x, dtype=dtype)

    # ---- collectives ----------------------------------------------------------------------------------------------
    def collective(self, kind: str, axes: tuple[str, ...], target, x: fx.Node, *args) -> fx.Node:
        """One ``_c10d_functional`` op over the group of ``axes`` and its wait."""
        x = self.contiguous(x)  # a copy is no collective: it must not carry the note of one
        with self.noted(collective=kind, axes=self.mesh.sort_axes(axes)):
            started = self.call(target, x, *args, self.mesh.alias(axes))
        return self.call(C.wait_tensor.default, started)

    def all_reduce(self, x: fx.Node, axes: tuple[str, ...], op: str = "sum") -> fx.Node:
        return self.collective("all_reduce", axes, C.all_reduce.default, x, op)

    def all_gather(self, x: fx.Node, axes: tuple[str, ...]) -> fx.Node:
        size = self.mesh.axes_size(axes)
        return self.collective("all_gather", axes, C.all_gather_into_tensor.default, x, size)

    def reduce_scatter(self, x: fx.Node, axes: tuple[str, ...]) -> fx.Node:
        size = self.mesh.axes_size(axes)
        return self.collective("reduce_scatter", axes, C.reduce_scatter_tensor.default, x, "sum", size)


def _signature(value: Any) -> Any:
    """A hashable description: tensors by identity (the key's owner keeps them), numbers by their type as well (1 is not
    1.0)."""
    kind = type(value)
    if kind is int:
        return value
    if isinstance(value, torch.Tensor):
        return "tensor", id(value)
    if isinstance(value, tuple | list):
        return tuple([_signature(v) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _signature(v)) for k, v in value.items()])
    return (kind, repr(value)) if isinstance(value, int | float | complex) else value


def value_of(node: fx.Node) -> Any:
    return node.meta["val"]


def shape_of(node: fx.Node) -> tuple:
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype
