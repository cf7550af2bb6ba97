"""Learning rates as plain functions of the step count.

A schedule maps a 0-d integer tensor (updates already made: 0 at the first) to a 0-d float64 tensor. It holds no state
and never branches in Python on the count, so one traced program serves every step. Optimizers take a float or a
schedule wherever they say ``learning_rate``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fsharding.errors import ShardingError

Schedule = Callable[[torch.Tensor], torch.Tensor]


def constant(value: float) -> Schedule:
    """``value`` at every step."""

    def schedule(step):
        return torch.full_like(_count(step), value)

    return schedule


def linear(start: float, end: float, steps: int) -> Schedule:
    """From ``start`` at step 0 straight to ``end`` at ``steps``, then ``end``.

    Raises ShardingError if ``steps`` is not positive.
    """
    _positive("linear", "steps", steps)

    def schedule(step):
        done = torch.clamp(_count(step) / steps, max=1.0)
        return start + (end - start) * done

    return schedule


def warmup_cosine(peak: float, warmup: int, total: int, end: float = 0.0, start: float = 0.0) -> Schedule:
    """From ``start`` straight up to ``peak`` at step ``warmup``, then half a cosine down to ``end`` at ``total``.

    With progress x = (step - warmup) / (total - warmup), the second part is
    ``end + (peak - end) * (1 + cos(pi * x)) / 2`` (Loshchilov and Hutter, "SGDR", 2017, equation 5, one cycle).
    Past ``total`` it stays at ``end``. Raises ShardingError unless 0 <= warmup < total.
    """
    _positive("warmup_cosine", "total", total)
    if not 0 <= warmup < total:
        raise ShardingError(f"warmup_cosine: warmup={warmup} must be in [0, total={total}); shorten the warm-up")

    def schedule(step):
        count = _count(step)
        rising = start + (peak - start) * count / max(warmup, 1)
        done = torch.clamp((count - warmup) / (total - warmup), 0.0, 1.0)
        falling = end + (peak - end) * 0.5 * (1.0 + torch.cos(math.pi * done))
        return torch.where(count < warmup, rising, falling)

    return schedule


def rate(learning_rate: float | Schedule, step: torch.Tensor) -> float | torch.Tensor:
    """The learning rate of the update that follows ``step`` earlier ones."""
    return learning_rate(step) if callable(learning_rate) else learning_rate


def _count(step):
    # float64: a count past 2**24 is still exact, and a 0-d value costs nothing
    return torch.as_tensor(step).to(torch.float64)


def _positive(where, name, value):
    if value <= 0:
        raise ShardingError(f"{where}: {name}={value} must be positive")
