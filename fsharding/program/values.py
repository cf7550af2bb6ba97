"""What the interpreter of the global program holds in place of tensors.

``dims`` is always one tuple of mesh axes per tensor dim, major to minor. Shapes are global; a node's own shape is
local.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

Dims = tuple[tuple[str, ...], ...]
ROUTED = "routed:"  # pseudo axes: rows that live wherever a routing sent them; their number is known at run time


def is_routed(axes) -> bool:
    return bool(axes) and axes[0].startswith(ROUTED)


@dataclass(eq=False)
class Placed:
    """A global value: blocks over the axes in ``dims``; the true value is the sum over the axes in ``partial``."""

    node: fx.Node
    shape: tuple[int, ...]
    dims: Dims
    partial: frozenset[str] = frozenset()

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def whole(self) -> bool:
        """Does every rank hold all of it (up to a pending sum)?"""
        return not any(self.dims)


@dataclass(eq=False)
class Stored:
    """A parameter, an optimizer state or what is made of them elementwise: this rank's padded block, at rest."""

    node: fx.Node
    shape: tuple[int, ...]
    dims: Dims
    name: str | None = None
    gathered: dict[Any, Placed] = field(default_factory=dict)


@dataclass(eq=False)
class Viewed:
    """A view of a stored value, taken only after its gather: ``apply(placed base) -> placed view``."""

    base: Stored
    apply: Any
    shape: tuple[int, ...]
    made: dict[Any, Placed] = field(default_factory=dict)


@dataclass(eq=False)
class Const:
    """One number everywhere. Not a tensor until a local shape is known: a global-size buffer is never made."""

    value: float | int | bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: Dims | None = None  # where an output of this value should live

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(eq=False)
class Lazy:
    """Random numbers, or what is made of them alone: ``make(dims)`` writes the block once it is known which is
    needed."""

    make: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    made: dict[Any, Placed] = field(default_factory=dict)

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(eq=False)
class Spread:
    """``base`` (same number of dims, some of size 1) expanded to ``shape``: stays small until it meets a placed
    value."""

    base: Placed
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(eq=False)
class Pending:
    """A 0-d (or whole) sum of sums over different sets of axes: one all-reduce for each set when it is used."""

    parts: dict[frozenset[str], fx.Node]
    shape: tuple[int, ...]


@dataclass(eq=False)
class RoutingState:
    """One routing in the local program. See ``moe/all_to_all.py`` for the fields that exchanging dispatchers fill."""

    name: str  # the pseudo axis of its rows
    token_axes: tuple[str, ...]
    tokens: int
    k: int
    num_experts: int
    perm: fx.Node
    inverse: fx.Node
    counts: fx.Node  # int32 [E]: rows of this rank's tokens
    rows: Any  # int or node: rows on this rank between dispatch and combine
    sizes: fx.Node  # int32 [local experts]: rows per local expert
    expert_axes: tuple[str, ...] = ()
    dispatcher: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    returned: dict[fx.Node, fx.Node] = field(default_factory=dict)


@dataclass(eq=False)
class Permutation:
    """``perm`` or ``inverse`` of a routing: only the MoE ops may read it."""

    routing: RoutingState


@dataclass(eq=False)
class GroupSizes:
    """A routing's group sizes: local counts for the MoE ops, the global count for everything else."""

    routing: RoutingState
    placed: Placed


VALUES = (Placed, Stored, Viewed, Const, Lazy, Spread, Pending, GroupSizes, Permutation)
