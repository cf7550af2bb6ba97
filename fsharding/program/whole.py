"""Operands that a rule needs whole but finds split: gathered for it, never silently.

Each such gather shows as ``kind="fallback"`` in ``collectives()``, warns with the user's line, and is an error under
``strict``. An operand that keeps its other cuts keeps most of the work split: ``x @ x.T`` over split rows gathers the
second operand and leaves the first as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from fsharding.comm import storage
from fsharding.program.source import line_of
from fsharding.program.values import Dims, Placed, Spread, is_routed

WAYS_OUT = (
    "No rule is verified for this case; compute it on unsharded values (for stored values: on rows), write it with "
    "other ops, or by hand with `fs.shard_map`"
)


def rows_differ(p) -> bool:
    """Does the current op depend on rows that were given different specs? Then a cut that does not fit is the user's
    doing: rows never move on their own."""
    seen, todo, specs = set(), [p.node], set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
            specs |= {p.rows[node]} if node in p.rows else set()
    return len(specs) > 1


def gather_loudly(p, x: Placed, extra: Dims, why: str) -> Placed:
    """``x`` gathered over ``extra`` (the minor axes of each dim's tuple): recorded, and warned about.

    Raises:
        ShardingError: under ``strict``, with ``why``.
    """
    if not any(storage.real_axes(p.mesh, axes) for axes in extra):
        return x
    if p.strict:
        p.fail(f"{why}. {WAYS_OUT}")
    key = (x.node, x.partial, extra)
    if key not in p.whole:
        note, p.emit.note = p.emit.note, {**p.emit.note, "fallback": True}
        p.whole[key] = p.unshard(x, extra)
        p.emit.note = note
    warn(p.node)
    return p.whole[key]


def warn(node) -> None:
    name = getattr(node.target, "name", lambda: str(node.target))().removeprefix("aten::")
    warnings.warn(
        f"{line_of(node) or 'fs.shard'}: `{name}` has no rule for operands that are split like this; every rank "
        "gathers what it needs whole (right, but slow). `strict=True` makes this an error.",
        stacklevel=2,
    )


def reconcile(p, operands: Sequence[tuple[Any, Sequence[Any]]]) -> list[tuple[Any, Sequence[Any]]]:
    """The same operands, gathered where a dim without a label is split and where one axis would split two labels.

    Of two operands that compete for an axis the first keeps it. Routed rows and ops of ours are left as they are.
    """
    if getattr(p.node.target, "namespace", "") == "fsharding":
        return list(operands)
    owner: dict[str, Any] = {}
    out = []
    for value, labels in operands:
        base = value.base if isinstance(value, Spread) else value
        if isinstance(base, Placed) and not any(map(is_routed, base.dims)):
            extra = tuple(_unwanted(p, axes, label, owner) for axes, label in zip(base.dims, labels, strict=True))
            if any(extra):
                base = _gathered(p, base, extra, labels)
                value = Spread(base, value.shape) if isinstance(value, Spread) else base
        out.append((value, labels))
    return out


def _gathered(p, base: Placed, extra, labels) -> Placed:
    why = _why(p, extra, labels)
    if any(e and label is not None for e, label in zip(extra, labels, strict=True)) and rows_differ(p):
        p.fail(f"{why}: rows that meet have different specs. Give the operands specs that agree")
    return gather_loudly(p, base, extra, why)


def _unwanted(p, axes, label, owner) -> tuple[str, ...]:
    """From the first axis on that may not stay: the axes to gather over."""
    real = storage.real_axes(p.mesh, axes)
    for i, axis in enumerate(real):
        if label is None or owner.setdefault(axis, label) != label:
            return real[i:]
    return ()


def _why(p, extra, labels) -> str:
    axes = ", ".join(p.mesh.sort_axes({a for e in extra for a in e}))
    if any(e and label is None for e, label in zip(extra, labels, strict=True)):
        return f"it needs a dim whole that is split over {axes}"
    return f"axis {axes} splits two dims that meet here"
