"""AdamW: Adam with weight decay that does not pass through the moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fsharding.errors import ShardingError
from fsharding.oplib import wide_dtype
from fsharding.optim.base import (
    GradientTransformation,
    Scalars,
    is_part_of_a_program,
    map_leaves,
    step_count,
    zeros_like_tree,
)
from fsharding.optim.schedule import Schedule, rate
from fsharding.program.update import adamw_leaf, adamw_raw
from fsharding.tree import map_with_path


class AdamWState(NamedTuple):
    """``step``: 0-d int64, updates made so far. ``m``, ``v``: trees of the parameters' structure and placement."""

    step: torch.Tensor
    m: Any
    v: Any


def adamw(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Any | Callable[[Any], Any] | None = None,
    state_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2).

    With t the number of this update, starting at 1::

        m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g^2
        update = -lr ( (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p )

    which is what ``torch.optim.AdamW`` computes. Arithmetic is in float32 (float64 for float64 leaves) whatever the
    dtype of parameters and moments; updates come in that wide dtype, ``apply_updates`` rounds once.

    Args:
        learning_rate: a float, or a schedule: 0-d step count -> 0-d rate.
        mask: which leaves decay: a tree of bools or a prefix of it, or a function from parameters to one.
        state_dtype: dtype of the moments; None takes each parameter's own. float32 is advised for bf16 parameters.

    ``update`` needs ``params``. Raises ShardingError for hyperparameters out of range and for trees or shapes that
    do not match, with the key path of the leaf.
    """
    _check(learning_rate, b1, b2, eps, weight_decay)

    def init(params):
        zeros = zeros_like_tree("adamw.init", params, state_dtype)
        return AdamWState(step_count(params), zeros, zeros_like_tree("adamw.init", params, state_dtype))

    def update(grads, state, params=None):
        if params is None:
            raise ShardingError("adamw.update: params is missing; call update(grads, state, params)")
        if not isinstance(state, AdamWState):
            raise ShardingError(f"adamw.update: state is a {type(state).__name__}; pass what adamw.init returned")
        lr, step = rate(learning_rate, state.step), state.step + 1
        time = step.to(torch.float64)
        scalars = Scalars(-lr, 1.0 - b1**time, 1.0 - b2**time)
        decays = mask(params) if callable(mask) else mask

        groups: dict[tuple, list] = {}

        def leaf(p, g, m, v, decay=True):
            hyper = (b1, b2, eps, weight_decay if decay else 0.0)
            if not is_part_of_a_program(p, g, m, v):
                return adamw_leaf(p, g, m, v, scalars.like(p), None, *hyper, False)
            group = groups.setdefault((wide_dtype(p.dtype), hyper), [])
            group.append((p, g, m, v))
            return tuple(_Later(group, len(group) - 1, column) for column in range(3))

        trees = dict(params=params, grads=grads, m=state.m, v=state.v)
        updates, m, v = map_leaves("adamw.update", leaf, 3, trees, flags=decays)
        if groups:
            made = {id(g): _all_at_once(g, scalars, hyper) for (_, hyper), g in groups.items()}
            updates, m, v = (map_with_path(lambda _, x: _found(x, made), tree) for tree in (updates, m, v))
        return updates, AdamWState(step, m, v)

    return GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class _Later:
    """Stands for a leaf of a result until the one op that makes all leaves of its group has run."""

    group: list
    leaf: int
    column: int


def _all_at_once(group: list, scalars: Scalars, hyper: tuple) -> list[torch.Tensor]:
    p, g, m, v = map(list, zip(*group, strict=True))
    b1, b2, eps, decay = map(float, hyper)
    numbers = [_zero_dim(x, p[0]) for x in scalars.like(p[0])]
    return adamw_raw(p, g, m, v, numbers, None, b1, b2, eps, decay, False)


def _zero_dim(x: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=wide_dtype(like.dtype), device=like.device)


def _found(x: Any, made: dict[int, list[torch.Tensor]]) -> torch.Tensor:
    if not isinstance(x, _Later):
        return x
    return made[id(x.group)][x.column * len(x.group) + x.leaf]


def _check(learning_rate, b1, b2, eps, weight_decay):
    if not callable(learning_rate) and learning_rate < 0:
        raise ShardingError(f"adamw: learning_rate={learning_rate} must not be negative")
    for name, value in (("b1", b1), ("b2", b2)):
        if not 0.0 <= value < 1.0:
            raise ShardingError(f"adamw: {name}={value} must be in [0, 1)")
    for name, value in (("eps", eps), ("weight_decay", weight_decay)):
        if value < 0:
            raise ShardingError(f"adamw: {name}={value} must not be negative")
