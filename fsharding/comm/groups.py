"""Who am I on a mesh: coordinates of the running rank, from the text of a group alias.

Programs read the same on every rank, so ops receive a mesh by name (``fs[efsdp=2,ep=2]/ep``) and look up at run time
where they stand. ``as_rank`` lets one process stand for any rank (``fs.simulate`` and tests).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math

import torch.distributed as dist

_pretended: contextvars.ContextVar[int | None] = contextvars.ContextVar("fsharding_rank", default=None)


@contextlib.contextmanager
def as_rank(rank: int):
    """Ops inside take this process for ``rank``."""
    token = _pretended.set(rank)
    try:
        yield
    finally:
        _pretended.reset(token)


def current_rank() -> int:
    """The pretended rank, else that of the running process group, else 0."""
    pretended = _pretended.get()
    if pretended is not None:
        return pretended
    return dist.get_rank() if dist.is_initialized() else 0


@functools.lru_cache(maxsize=1024)
def parse(alias: str) -> tuple[dict[str, int], tuple[str, ...]]:
    """Mesh shape (in order) and axes of an alias: ``fs[a=2,b=3]/b`` -> ({"a": 2, "b": 3}, ("b",)).

    What follows a ``#`` names one of several groups over the same axes.
    """
    mesh, _, axes = alias.partition("#")[0].partition("/")
    inside = mesh[mesh.index("[") + 1 : -1]
    sizes = {name: int(size) for name, size in (item.split("=") for item in inside.split(","))}
    return sizes, tuple(axes.split(",")) if axes else ()


@functools.lru_cache(maxsize=4096)
def coordinates(alias: str, rank: int) -> dict[str, int]:
    """Axis name -> coordinate of a rank on the alias's mesh (row-major)."""
    out, rest = {}, rank
    for name, size in reversed(parse(alias)[0].items()):
        rest, out[name] = divmod(rest, size)
    return out


def axes_size(alias: str) -> int:
    sizes, axes = parse(alias)
    return math.prod(sizes[axis] for axis in axes)


def over(alias: str, axes) -> str:
    """The alias of the group over these axes on the mesh of another alias."""
    sizes, _ = parse(alias)
    return f"{alias.partition('/')[0]}/{','.join(a for a in sizes if a in set(axes))}"


def place(alias: str, rank: int) -> int:
    """A rank's number in its group, which is in mesh order."""
    sizes, axes = parse(alias)
    at, found = coordinates(alias, rank), 0
    for axis in (a for a in sizes if a in axes):
        found = found * sizes[axis] + at[axis]
    return found
