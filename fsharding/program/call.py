"""The arguments of one call: flat leaves with the key paths that a user would write."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsharding import tree as trees
from fsharding.annotate.mesh import Mesh
from fsharding.annotate.param import ShapeDtype
from fsharding.errors import ShardingError


@dataclass
class Call:
    """One call's arguments, flat."""

    paths: list[str]
    leaves: list[Any]
    treedef: Any
    argnums: list[int]  # which positional argument each leaf belongs to, -1 for keywords
    static: tuple
    mesh: Mesh
    stored: list[bool]  # which leaves are at rest
    count: int  # of positional arguments
    name: str  # of the function

    def apply(self, fn: Callable, leaves: Sequence[Any]) -> Any:
        """``fn`` on these arguments with other leaves."""
        positional, named = trees.unflatten(self.treedef, leaves)
        statics, rest = dict(self.static[0]), iter(positional)
        args = [statics[i] if i in statics else next(rest) for i in range(len(positional) + len(statics))]
        return fn(*args, **named, **dict(self.static[1]))


def argument_names(fn, count) -> list[str]:
    try:
        names = [
            p.name
            for p in inspect.signature(fn).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(count)]


def locate(path: str, numbers, names) -> tuple[int, str]:
    """Which positional argument a flat path lies in, and the path as the user would write it."""
    head, _, rest = path[1:].partition("]")
    if head == "0":
        index, _, tail = rest[1:].partition("]")
        number = numbers[int(index)]
        return number, names[number] + tail
    return -1, rest.removeprefix(".")


class _Same:
    """An object as a key: equal to itself only, and kept alive so that its identity stays its own."""

    def __init__(self, value):
        self.value = value

    def __hash__(self):
        return id(self.value)

    def __eq__(self, other):
        return isinstance(other, _Same) and self.value is other.value


def captured(fn: Callable) -> tuple:
    """What a function closes over or reads from its module, tensors by identity and numbers by value.

    Part of a program's key: a name that is bound to another tensor or number traces again.
    """
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return ()
    values = [_contents(cell) for cell in fn.__closure__ or ()]
    values += [fn.__globals__.get(name) for name in code.co_names]
    return tuple(
        _Same(v) if isinstance(v, torch.Tensor) else (type(v), v)
        for v in values
        if isinstance(v, torch.Tensor | bool | int | float | str)
    )


def _contents(cell):
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def is_wide(leaves: Sequence[Any]) -> bool:
    return any(getattr(x, "dtype", None) == torch.float64 for x in leaves)


def below_argument(path: str) -> str:
    cut = min((i for i in (path.find(".", 1), path.find("[", 1)) if i > 0), default=len(path))
    return path[cut:]


def tails(path: str) -> tuple[str, str]:
    """How the key path of a result may read below an argument: as it is, or without its first step."""
    return (path if not path or path.startswith("[") else f".{path}"), below_argument(path)


def abstract(path, x, wide: bool = False) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a leaf. Python floats are of the default dtype, or float64 beside float64 tensors
    (``wide``)."""
    if isinstance(x, torch.Tensor) and x.layout != torch.strided:
        raise ShardingError(
            f"{path} is a sparse tensor ({x.layout}), which no mesh holds: pass its parts, or `.to_dense()`."
        )
    if isinstance(x, torch.Tensor | ShapeDtype):
        return tuple(x.shape), x.dtype
    if isinstance(x, bool):
        return (), torch.bool
    if isinstance(x, int):
        return (), torch.int64
    if isinstance(x, float):
        return (), torch.float64 if wide else torch.get_default_dtype()
    raise ShardingError(
        f"{path} is a {type(x).__name__}: arguments are tensors, numbers, None and containers of them. Name it in "
        "`static_argnums` or `static_argnames` if it is a setting, or register its class with optree if it holds "
        "tensors."
    )
