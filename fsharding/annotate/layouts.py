"""Layouts: ordered, printable, editable rules that turn logical axes of parameters into specs.

    layout = fsharding.layouts.dp2ep(mesh)       # print it, edit it with .replace(...)
    specs = layout(axes_tree)                    # a tree of P, one for each Param
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from .. import tree as trees
from ..errors import ShardingError
from .mesh import Mesh
from .spec import P

__all__ = ["Layout", "Rule", "dp2ep", "fsdp", "hsdp", "legacy_ep", "tensor_parallel"]

ANY = "any dim"


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of a layout: which leaves it is for, and which mesh axes cut which of their dims.

    ``leaf``: a logical axis that the leaf must have, or None for any leaf. ``cut``: pairs (dim, mesh axes, major to
    minor); a dim is a logical axis name, several in order of preference, or "any dim": the first free dim that the
    axes divide (a gather along dim 0 needs no local permutation), or the largest free one if they divide none.
    ``even``: dims (as written in ``cut``) that must be divisible, or the rule does not apply and the next one is
    asked. A rule without cuts replicates.
    """

    name: str
    leaf: str | None
    cut: tuple[tuple[str | tuple[str, ...], tuple[str, ...]], ...]
    even: tuple[str, ...] = ()

    def __str__(self) -> str:
        who = f'leaves with "{self.leaf}"' if self.leaf else "any leaf"
        what = ", ".join(self._show(dim, axes) for dim, axes in self.cut if axes) or "replicated"
        return f"{self.name}: {who}: {what}"

    def _show(self, dim: str | tuple[str, ...], axes: tuple[str, ...]) -> str:
        name = dim if isinstance(dim, str) else " or ".join(dim)
        return f"{name} over {'·'.join(axes)}{' (must divide)' if dim in self.even else ''}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """An ordered list of rules for one mesh; each leaf takes the first rule that is for it and applies.

    Call it on a tree of ``Param`` for a tree of ``P``. 0-d leaves are P(). Raises ShardingError for a leaf that no rule
    places, with its path, dim, size and the axes that do not fit.
    """

    name: str
    mesh: Mesh
    rules: tuple[Rule, ...]

    def __post_init__(self):
        for rule in self.rules:
            for _, axes in rule.cut:
                for axis in axes:
                    if axis not in self.mesh.shape:
                        raise ShardingError(f'The rule "{rule.name}" of the layout {self.name} needs the mesh axis '
                                            f'"{axis}"; the mesh has {", ".join(self.mesh.axis_names)}. Add the axis '
                                            "(size 1 switches it off) or edit the rule.")

    def __repr__(self) -> str:
        lines = [f"{number}. {rule}" for number, rule in enumerate(self.rules, start=1)]
        return "\n".join([f"layout {self.name} on {self.mesh!r}", *lines])

    def replace(self, name: str, *rules: Rule) -> Layout:
        """A layout in which these rules stand in the place of the rule of this name; none removes it."""
        if name not in (known := [rule.name for rule in self.rules]):
            raise ShardingError(f'The layout {self.name} has no rule "{name}"; it has {", ".join(known)}.')
        at = known.index(name)
        return dataclasses.replace(self, rules=(*self.rules[:at], *rules, *self.rules[at + 1:]))

    def __call__(self, axes_tree: Any) -> Any:
        return trees.map_with_path(self._spec, axes_tree)

    def _spec(self, path: str, leaf: Any) -> P:
        if not hasattr(leaf, "shape"):
            raise ShardingError(f"{path or 'The value'} is a {type(leaf).__name__}; a layout places a tree of Param.")
        shape, names = tuple(leaf.shape), getattr(leaf, "axes", None)
        if names is None:
            if any(rule.leaf for rule in self.rules):
                raise ShardingError(f"{path or 'The value'} has no logical axes, and the layout {self.name} goes by "
                                    "them. Describe it with Param(shape, axes=...).")
            names = (None,) * len(shape)
        if not shape:
            return P()
        reasons = []
        for rule in self.rules:
            if rule.leaf is None or rule.leaf in names:
                spec = _apply(rule, shape, names, self.mesh, reasons)
                if spec is not None:
                    return spec
                if rule.leaf is not None and not any(other.leaf == rule.leaf for other in self._after(rule)):
                    break  # a leaf with rules of its own never falls through to the general ones
        raise ShardingError(f"{path or 'The value'} has the shape {shape} with axes {names}, and no rule of the layout "
                            f"{self.name} places it: {'; '.join(reasons) or 'no rule is for it'}. Change the sizes or "
                            "the mesh, or edit the rules with layout.replace(...).")

    def _after(self, rule: Rule) -> Sequence[Rule]:
        return self.rules[self.rules.index(rule) + 1:]


def _apply(rule: Rule, shape: tuple[int, ...], names: Sequence[str | None], mesh: Mesh, reasons: list[str]) -> P | None:
    dims: list[tuple[str, ...]] = [()] * len(shape)
    for where, axes in rule.cut:
        if not axes:
            continue
        parts = mesh.axes_size(axes)
        dim = _find(where, shape, names, dims, parts)
        if dim is None:
            reasons.append(f'"{rule.name}" finds no free dim {where} for {"·".join(axes)}')
            return None
        if where in rule.even and shape[dim] % parts:
            sizes = " · ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            reasons.append(f'"{rule.name}" needs dim {dim} ("{names[dim]}", size {shape[dim]}) to be divisible by '
                           f"{sizes}")
            return None
        dims[dim] = axes
    while dims and not dims[-1]:
        dims.pop()
    return P(*dims)


def _find(where: str | tuple[str, ...], shape, names, dims, parts: int) -> int | None:
    free = [dim for dim in range(len(shape)) if not dims[dim]]
    for wanted in (where,) if isinstance(where, str) else where:
        if wanted == ANY and free:
            fitting = [dim for dim in free if shape[dim] and shape[dim] % parts == 0]
            return fitting[0] if fitting else max(free, key=lambda dim: (shape[dim], -dim))
        for dim in free:
            if names[dim] == wanted:
                return dim
    return None


# ---- the four layouts ----------------------------------------------------------------------------------------------
def fsdp(mesh: Mesh) -> Layout:
    """Every leaf over all data axes, in mesh order, on one dim."""
    return Layout("fsdp", mesh, (Rule("all", None, ((ANY, mesh.data_axes),)),))


def hsdp(mesh: Mesh) -> Layout:
    """As ``fsdp``, but replicated over the axis "replicate"."""
    return Layout("hsdp", mesh, (Rule("all", None, ((ANY, _without(mesh, "replicate")),)),))


def dp2ep(mesh: Mesh) -> Layout:
    """Dense leaves over ("efsdp", "ep") together; experts (leaves with the logical axis "expert") over ep, then efsdp.

    The expert dim goes over ("ep", "efsdp") if both together divide it, else over ep alone, and another dim over
    efsdp. Everything is replicated over "replicate", if the mesh has it.
    """
    return Layout("dp2ep", mesh, (*_experts(), _dense(mesh, ("efsdp", "ep"))))


def legacy_ep(mesh: Mesh) -> Layout:
    """Dense leaves over "efsdp" only, so that they are replicated over ep; experts as in ``dp2ep``."""
    return Layout("legacy_ep", mesh, (*_experts(), _dense(mesh, ("efsdp",))))


def tensor_parallel(layout: Layout, axis: str = "tp", cut: Sequence[str] = ("heads", "kv_heads")) -> Layout:
    """A layout with tensor parallelism beside it: these logical axes are cut over a model axis (Shoeybi et al. 2019).

    A weight that makes heads is cut by columns, the one that takes them by rows: each rank computes its heads, and one
    sum over ``axis`` joins them. Where another dim is free it rests over the layout's data axes as before. Experts keep
    their own rules. Norms and what lies between such blocks are computed on every rank of the axis.

    Raises ShardingError for an axis that is no model axis, for a layout without a rule for any leaf, and, at a leaf,
    for a dim that the axis does not divide.
    """
    if axis not in layout.mesh.model_axes:
        known = ", ".join(layout.mesh.model_axes) or "none"
        raise ShardingError(f'tensor_parallel cuts over a model axis; "{axis}" is none of this mesh (it has {known}). '
                            f'Make the mesh with model_axes=("{axis}",).')
    general = [rule for rule in layout.rules if rule.leaf is None]
    if not general:
        raise ShardingError(f"The layout {layout.name} has no rule for any leaf, to which the axis could be added.")
    rest = tuple((ANY, axes) for _, axes in general[0].cut)
    own = [rule for rule in layout.rules if rule.leaf is not None]
    for name in cut:
        own += [Rule(f"{name} over {axis}", name, ((name, (axis,)), *rest), even=(name,)),
                Rule(f"{name} over {axis}, nothing else to cut", name, ((name, (axis,)),), even=(name,))]
    return Layout(f"{layout.name} and {axis}", layout.mesh, (*own, *general))


def _experts() -> tuple[Rule, Rule]:
    return (Rule("experts, both on the expert dim", "expert", (("expert", ("ep", "efsdp")),), even=("expert",)),
            Rule("experts, efsdp on a weight dim", "expert", (("expert", ("ep",)), (ANY, ("efsdp",))),
                 even=("expert",)))


def _dense(mesh: Mesh, axes: tuple[str, ...]) -> Rule:
    # One tuple in mesh order, so that uneven dims are legal; axes that the mesh lacks are reported by Layout.
    order = {axis: number for number, axis in enumerate(mesh.axis_names)}
    return Rule("dense", None, ((ANY, tuple(sorted(axes, key=lambda axis: order.get(axis, math.inf)))),))


def _without(mesh: Mesh, *axes: str) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.data_axes if axis not in axes)
