"""Placed values under construction: what rules call to gather, cut, add up, lay to rest and align their operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from fsharding.annotate.mesh import Mesh
from fsharding.comm import storage
from fsharding.errors import ShardingError
from fsharding.program.emit import Emitter, dtype_of
from fsharding.program.source import line_of
from fsharding.program.values import (
    Const,
    Dims,
    GroupSizes,
    Lazy,
    Pending,
    Permutation,
    Placed,
    RoutingState,
    Spread,
    Stored,
    Viewed,
    is_routed,
)
from fsharding.program.whole import WAYS_OUT, reconcile, rows_differ

A = torch.ops.aten


class NoRule(ShardingError):
    """No rule serves an op on these operands; on whole ones it would be right."""


class Placing:
    """Values of one local program, and the node of the global program that is being interpreted."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.emit = mesh, Emitter(mesh)
        self.routings: dict[str, RoutingState] = {}
        self.node: fx.Node | None = None
        self._constants: dict[Any, fx.Node] = {}

    # ---- errors ---------------------------------------------------------------------------------------------------
    def fail(self, why: str, kind: type[ShardingError] = ShardingError):
        name = getattr(self.node.target, "name", lambda: str(self.node.target))() if self.node is not None else "?"
        where = f"{line_of(self.node)}: " if self.node is not None and line_of(self.node) else ""
        raise kind(f"{where}`{name}`: {why}.")

    def refuse(self, why: str):
        """No rule serves this case: the op runs on whole operands, or is refused under ``strict``."""
        self.fail(f"{why}. {WAYS_OUT}", NoRule)

    # ---- values ---------------------------------------------------------------------------------------------------
    def shape_of_meta(self):
        return tuple(self.node.meta["val"].shape)

    def placed(self, value, keep: tuple[str, ...] = ()) -> Placed:
        """Any value as a placed one: stored leaves are gathered (over all axes but ``keep``), constants made."""
        if isinstance(value, Placed):
            return value
        if isinstance(value, Stored):
            return self.gathered(value, keep)
        if isinstance(value, Viewed):
            if keep not in value.made:
                made = value.apply(self.gathered(value.base, keep))
                value.made[keep] = self.placed(made)  # a view may be an expansion
            return value.made[keep]
        if isinstance(value, Const | Lazy):
            return self.relayout(value, ((),) * value.ndim)
        if isinstance(value, Spread):
            return self.relayout(value, value.base.dims)
        if isinstance(value, Pending):
            return self._settle(value)
        if isinstance(value, GroupSizes):
            return value.placed
        if isinstance(value, Permutation):
            self.fail("a routing's permutation is only for `dispatch` and `combine`: other ops cannot read it")
        raise AssertionError(f"not a value: {value!r}")

    def gathered(self, value: Stored, keep: tuple[str, ...]) -> Placed:
        """The leaf whole but for ``keep`` and model axes; each leaf is gathered once."""
        kept = tuple(a for a in self.mesh.axis_names if a in keep or a in self.mesh.model_axes)
        stay = tuple(tuple(a for a in axes if a in kept) for axes in value.dims)
        if stay not in value.gathered:
            move = tuple(tuple(a for a in axes if a not in kept) for axes in value.dims)
            for axes, s in zip(value.dims, stay, strict=True):
                if self._real(axes)[: len(self._real(s))] != self._real(s):
                    self.fail(
                        f"{value.name or 'a stored value'} is split over {axes}: the axes that stay in use, {s}, must "
                        "be the major ones of their tuple"
                    )
            shape = tuple(n // self.mesh.axes_size(s) for n, s in zip(value.shape, stay, strict=True))
            with self.emit.noted(param=value.name):
                node = storage.gather(self.emit, value.node, shape, move)
            value.gathered[stay] = Placed(node, value.shape, stay)
        return value.gathered[stay]

    def total(self, value) -> Placed:
        """As :meth:`placed`, pending sums added up over the ranks."""
        x = self.placed(value)
        axes = storage.real_axes(self.mesh, self.mesh.sort_axes(x.partial))
        if axes:
            return Placed(self.emit.all_reduce(x.node, axes), x.shape, x.dims)
        return Placed(x.node, x.shape, x.dims) if x.partial else x

    def _settle(self, value: Pending) -> Placed:
        out = None
        for axes in sorted(value.parts, key=sorted):
            part = self.total(Placed(value.parts[axes], value.shape, ((),) * len(value.shape), axes)).node
            out = part if out is None else self.emit.call(A.add.Tensor, out, part)
        return Placed(out, value.shape, ((),) * len(value.shape))

    def local_size(self, size: int, axes) -> Any:
        """Length of this rank's block: an int, or a node for routed rows."""
        if is_routed(axes):
            return self.routings[axes[0]].rows
        parts = self.mesh.axes_size(axes)
        if size % parts:
            self.refuse(f"a dim of size {size} would be split {parts} ways ({', '.join(axes)}), which does not divide")
        return size // parts

    def local_shape(self, shape, dims) -> list:
        return [self.local_size(n, axes) for n, axes in zip(shape, dims, strict=True)]

    def scalar(self, const: Const, ndim: int) -> fx.Node:
        """A constant as a tensor of ``ndim`` dims of size 1, made once."""
        key = (const.value, type(const.value), const.dtype, ndim)
        if key not in self._constants:
            self._constants[key] = self.emit.call(A.full.default, [1] * ndim, const.value, dtype=const.dtype)
        return self._constants[key]

    def relayout(self, value, dims: Dims) -> Placed:
        """``value`` with these dims: whole dims are cut (free); a dim that is split in another way is an error."""
        if isinstance(value, Const):
            shape = self.local_shape(value.shape, dims)
            return Placed(self.emit.call(A.full.default, shape, value.value, dtype=value.dtype), value.shape, dims)
        if isinstance(value, Lazy):
            if dims not in value.made:
                value.made[dims] = value.make(dims)
            return value.made[dims]
        if isinstance(value, Spread):
            base = self.relayout(
                value.base,
                tuple(d if n == m else () for d, n, m in zip(dims, value.base.shape, value.shape, strict=True)),
            )
            node = self.emit.call(A.expand.default, base.node, self.local_shape(value.shape, dims))
            return Placed(node, value.shape, dims, base.partial)
        x = self.placed(value)
        node, now = x.node, []
        for dim, (have, want) in enumerate(zip(x.dims, dims, strict=True)):
            have_real, want_real = storage.real_axes(self.mesh, _true(have)), storage.real_axes(self.mesh, _true(want))
            if is_routed(have) or is_routed(want):
                if have != want:
                    self.fail(_mixed_rows(have, want, x.shape[dim]))
            elif have_real != want_real:
                if have_real != want_real[: len(have_real)]:
                    (self.fail if rows_differ(self) else self.refuse)(
                        f"dim {dim} of one operand is split over {have_real}, of another over {want_real}. Rows never "
                        "move on their own: give both the same spec"
                    )
                self.local_size(x.shape[dim], want)
                rest = want_real[len(have_real) :]
                size = self.local_size(x.shape[dim], have)
                node = storage.cut(self.emit, node, [size] * (dim + 1), ((),) * dim + (rest,))
            now.append(want)
        return Placed(node, x.shape, tuple(now), x.partial)

    def unshard(self, x: Placed, extra: Dims) -> Placed:
        """``x`` gathered over the axes in ``extra`` (the minor ones of each dim's tuple)."""
        if not any(storage.real_axes(self.mesh, axes) for axes in extra):
            return x
        x = self.total(x)
        stay = tuple(tuple(a for a in have if a not in gone) for have, gone in zip(x.dims, extra, strict=True))
        shape = [self.local_size(n, s) for n, s in zip(x.shape, stay, strict=True)]
        return Placed(storage.gather(self.emit, x.node, shape, extra), x.shape, stay)

    def rest(self, x: Placed, dims: Dims, name: str | None = None, reduce_dtype=None) -> Stored:
        """``x`` laid to rest over ``dims``: reduce-scatter where it is a pending sum, a cut where it is whole."""
        with self.emit.noted(param=name):
            return self._rested(x, dims, reduce_dtype)

    def _rested(self, x: Placed, dims: Dims, reduce_dtype) -> Stored:
        extra = []
        for have, want in zip(x.dims, dims, strict=True):
            have, want = storage.real_axes(self.mesh, have), storage.real_axes(self.mesh, want)
            extra.append(() if have == want[: len(have)] else have)
        dtype = dtype_of(x.node)
        if reduce_dtype is not None and x.partial and dtype.is_floating_point:
            x = Placed(self.emit.cast(x.node, reduce_dtype), x.shape, x.dims, x.partial)
        if any(extra):
            x = self.unshard(x, tuple(extra))
        have = [storage.real_axes(self.mesh, axes) for axes in x.dims]
        todo = [storage.real_axes(self.mesh, axes)[len(h) :] for axes, h in zip(dims, have, strict=True)]
        summed = tuple(tuple(a for a in axes if a in x.partial) for axes in todo)
        # A cut over axes that are not summed must come first where it is major to a summed axis: rare, so cut all
        # first.
        plain = tuple(tuple(a for a in axes if a not in x.partial) for axes in todo)
        shape = [self.local_size(n, h) for n, h in zip(x.shape, have, strict=True)]
        node = x.node
        if any(plain) and any(summed):
            node = self.total(x).node
            node = storage.cut(self.emit, node, shape, tuple(todo))
        else:
            node = storage.reduce_scatter(self.emit, node, shape, summed)
            left = storage.real_axes(self.mesh, self.mesh.sort_axes(set(x.partial) - {a for s in summed for a in s}))
            if left:
                node = self.emit.all_reduce(node, left)
            if any(plain):
                node = storage.cut(self.emit, node, shape, plain)
        return Stored(self.emit.cast(node, dtype), x.shape, dims)

    # ---- propagation ----------------------------------------------------------------------------------------------
    def merge(self, operands: Sequence[tuple[Placed | Spread | Const, Sequence[Any]]]) -> dict[Any, tuple[str, ...]]:
        """One tuple of axes per label, from operands whose dims carry labels (None: must be whole).

        Raises where two operands split a label differently, or where one axis would split two labels.
        """
        found: dict[Any, tuple[str, ...]] = {}
        for value, labels in operands:
            for axes, label in zip(_dims_of(value), labels, strict=True):
                if label is None:
                    if storage.real_axes(self.mesh, _true(axes)) or is_routed(axes):
                        self.refuse(f"it needs a dim whole that is split over {_shown(axes)}")
                elif len(self._real(axes)) > len(self._real(found.get(label, ()))):
                    found[label] = axes
                else:
                    found.setdefault(label, axes)
        used: dict[str, Any] = {}
        for label, axes in found.items():
            for axis in self._real(axes):
                if axis in used:
                    (self.fail if any(map(is_routed, found.values())) else self.refuse)(
                        f"axis {axis!r} splits two dims that meet here. Give the operands specs that agree"
                    )
                used[axis] = label
        return found

    def _real(self, axes):
        return axes if is_routed(axes) else storage.real_axes(self.mesh, axes)

    def align(self, operands: Sequence[tuple[Any, Sequence[Any]]]) -> tuple[list[Placed], dict[Any, tuple[str, ...]]]:
        """Operands cut so that equal labels have equal blocks. Pending sums are added up first; what must be whole
        is gathered, loudly."""
        ready = [(v if isinstance(v, Const | Lazy | Spread) else self.total(v), labels) for v, labels in operands]
        ready = reconcile(self, [(self._spread_total(v), labels) for v, labels in ready])
        found = self.merge(ready)
        return [
            self.relayout(v, tuple(found.get(n, ()) if n is not None else () for n in labels)) for v, labels in ready
        ], found

    def _spread_total(self, value):
        if isinstance(value, Spread) and value.base.partial:
            return Spread(self.total(value.base), value.shape)
        return value

    def row_axes(self, axes) -> tuple[str, ...]:
        """The mesh axes over which a sum along this dim is pending."""
        if is_routed(axes):
            return self.routings[axes[0]].token_axes
        return axes

    def contract(self, target: Callable, operands, out: Sequence[Any], *extra, **kwargs) -> Placed:
        """``target`` on aligned operands; labels that ``out`` lacks are summed over, pending where they were split."""
        placed, found = self.align(operands)
        node = self.emit.call(target, *(x.node for x in placed), *extra, **kwargs)
        dims = tuple(found.get(n, ()) for n in out)
        partial = {a for n, axes in found.items() if n not in out for a in self.row_axes(axes)}
        return Placed(node, self.shape_of_meta(), dims, frozenset(storage.real_axes(self.mesh, partial)))


def _true(axes):
    return () if is_routed(axes) else axes


def _shown(axes):
    return "a routing's experts" if is_routed(axes) else ", ".join(axes)


def _mixed_rows(have, want, size):
    if is_routed(have) and is_routed(want):
        return "rows of two different routings meet: combine each before they are used together"
    return (
        f"routed rows meet a value of {size} rows that is not routed. Between `dispatch` and `combine` only row-wise "
        "ops, `ragged_dot` and `expand` are legal"
    )


def _dims_of(value) -> Dims:
    if isinstance(value, Const | Lazy):
        return ((),) * value.ndim
    if isinstance(value, Spread):
        return value.base.dims
    return value.dims
