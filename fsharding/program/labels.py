"""Sharding rules written as labels: ``"b t [d], [d] -> b t [d]"``.

One term per tensor operand and per result, one label per dim. A plain label may be split, alike in all operands that
carry it. A label in brackets must be whole. A plain label that a result lacks is summed over: each rank's result is one
term of a sum. ``...`` stands for any number of leading dims, the same in all operands that have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fsharding.errors import ShardingError
from fsharding.program.partition import Partition
from fsharding.program.values import Placed, is_routed

_TOKEN = re.compile(r"\.\.\.|\[\s*[A-Za-z_]\w*\s*\]|[A-Za-z_]\w*|\S")


@dataclass(frozen=True)
class Labels:
    """A parsed rule: per operand and per result the labels of its dims; ``whole`` are those in brackets."""

    text: str
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    whole: frozenset[str]


def parse(text: str) -> Labels:
    """Read a rule string.

    Raises:
        ShardingError: it has no ``->``, an unreadable label, a repeated one, one that only a result has, or one that is
            in brackets here and plain there.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ShardingError(f"rule {text!r} has no `->`: write operands, `->`, results, as in 'b [d], [d] -> b [d]'.")
    whole: set[str] = set()
    plain: set[str] = set()
    terms = [tuple(_term(t, text, whole, plain) for t in side.split(",")) for side in (left, right)]
    if both := whole & plain:
        raise ShardingError(f"rule {text!r} has {sorted(both)} both in brackets and plain: one label, one meaning.")
    if new := {n for t in terms[1] for n in t} - {n for t in terms[0] for n in t} - whole:
        raise ShardingError(f"rule {text!r}: results have {sorted(new)}, which no operand has. Put it in brackets.")
    return Labels(text, *terms, frozenset(whole))


def _term(text: str, rule: str, whole: set[str], plain: set[str]) -> tuple[str, ...]:
    found = []
    for i, token in enumerate(_TOKEN.findall(text)):
        name = token.strip("[] ")
        if token != "..." and not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ShardingError(
                f"rule {rule!r}: {token!r} is no label. Labels are names, names in brackets, and `...`."
            )
        if token == "..." and i:
            raise ShardingError(f"rule {rule!r}: `...` stands for leading dims, so it comes first in a term.")
        if name in found:
            raise ShardingError(f"rule {rule!r} has {name!r} twice in one term: a diagonal cannot be split.")
        (whole if token.startswith("[") else plain).add(name)
        found.append(name)
    return tuple(found)


def label_rule(rule: str | Callable[..., str]) -> Callable:
    """The rule, as the partition calls it, that serves an op by labels.

    Args:
        rule: labels, or a function of the op's arguments (tensors as meta tensors of global shape) that returns them.
    """
    fixed = parse(rule) if isinstance(rule, str) else None

    def serve(p: Partition, node: fx.Node, args, kwargs):
        labels = fixed or parse(_ask(p, rule, node))
        return _serve(p, node, args, kwargs, labels)

    said = getattr(rule, "__doc__", None) or f"labels by `{getattr(rule, '__name__', 'a function')}`"
    serve.__doc__ = f"`{rule}`" if isinstance(rule, str) else said
    return serve


def _ask(p: Partition, rule, node: fx.Node) -> str:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    text = rule(*args, **kwargs)
    if not isinstance(text, str):
        p.fail(f"its registered rule returned {text!r} where labels are wanted, such as 'b [d] -> b [d]'")
    return text


def _serve(p: Partition, node: fx.Node, args, kwargs, labels: Labels):
    slots = tensor_slots(node.target, args, kwargs)
    if len(slots) != len(labels.operands):
        p.fail(
            f"its rule {labels.text!r} has {len(labels.operands)} operands, the op has {len(slots)} tensor arguments"
        )
    pairs = [
        (v, _expand(p, v, term, labels)) for (_, v), term in zip(slots, labels.operands, strict=True) if v is not None
    ]
    _check_sizes(p, pairs, labels)
    placed, found = p.align([(v, [None if n in labels.whole else n for n in names]) for v, names in pairs])
    local = iter(placed)
    full, named = list(args), dict(kwargs)
    for (where, value), _ in zip(slots, labels.operands, strict=True):
        new = next(local).node if value is not None else None
        if isinstance(where, int) and where < len(full):
            full[where] = new
        elif not isinstance(where, int):
            named[where] = new
    return _results(p, node, p.emit.call(node.target, *full, **named), labels, found)


def tensor_slots(target, args, kwargs) -> list[tuple[int | str, Any]]:
    """Where an op takes tensors, by its schema, and what stands there (None for an optional one left out)."""
    found: list[tuple[int | str, Any]] = []
    for i, argument in enumerate(target._schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        if "List" in str(argument.type):
            raise ShardingError(f"`{target.name()}` takes a list of tensors: a rule of labels cannot serve it.")
        where: int | str = i if i < len(args) or argument.name not in kwargs else argument.name
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        found.append((where, value))
    return found


def _expand(p: Partition, value, term: Sequence[str], labels: Labels) -> list[str]:
    ndim = len(value.shape)
    names = _names(term, ndim)
    if len(names) != ndim:
        p.fail(f"its rule {labels.text!r} describes {len(names)} dims of an operand that has {ndim}")
    return names


def _names(term: Sequence[str], ndim: int) -> list[str]:
    """One label a dim: those behind ``...`` are counted from the end, so that operands of one rank agree."""
    if term[:1] != ("...",):
        return list(term)
    lead = ndim - len(term) + 1
    return [f"...{lead - i}" for i in range(lead)] + list(term[1:])


def _check_sizes(p: Partition, pairs, labels: Labels) -> None:
    sizes: dict[str, int] = {}
    for value, names in pairs:
        for name, n in zip(names, value.shape, strict=True):
            if sizes.setdefault(name, n) != n and name not in labels.whole:
                p.fail(f"its rule {labels.text!r} says that {name!r} is one size, but it is {sizes[name]} and {n}")


def _results(p: Partition, node, out, labels: Labels, found):
    values = node.meta["val"]
    many = isinstance(values, tuple | list)
    values = list(values) if many else [values]
    if len(values) != len(labels.results):
        p.fail(f"its rule {labels.text!r} has {len(labels.results)} results, the op has {len(values)}")
    made = []
    for i, (value, term) in enumerate(zip(values, labels.results, strict=True)):
        if value is None:  # a gradient that nobody asked for
            made.append(None)
            continue
        names = _expand(p, value, term, labels)
        dims = tuple(found.get(n, ()) for n in names)
        summed = {a for n, axes in found.items() if n not in names for a in p.row_axes(axes) if p._real((a,))}
        own = p.emit.item(out, i) if many else out
        if list(own.meta["val"].shape) != [n for n in p.local_shape(value.shape, dims)] and not any(
            map(is_routed, dims)
        ):
            p.fail(
                f"its rule {labels.text!r} promises blocks {p.local_shape(value.shape, dims)}, the op returns "
                f"{list(own.meta['val'].shape)}"
            )
        made.append(Placed(own, tuple(value.shape), dims, frozenset(summed)))
    return tuple(made) if many else made[0]


def splittable(labels: Labels, operands: Sequence[tuple[torch.Tensor, Sequence[str]]]):
    """Per plain label: its name, its size and, per (tensor, term), the dim that carries it (None: no dim does)."""
    named = [(x, _names(term, x.ndim)) for x, term in operands]
    for name in dict.fromkeys(n for _, names in named for n in names if n not in labels.whole):
        dims = [names.index(name) if name in names else None for _, names in named]
        yield name, next(x.shape[d] for (x, _), d in zip(named, dims, strict=True) if d is not None), dims
