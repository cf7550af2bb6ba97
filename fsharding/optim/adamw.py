"""AdamW: Adam with weight decay that does not pass through the moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fsharding.errors import ShardingError
from fsharding.optim.base import GradientTransformation, Scalars, map_leaves, step_count, wide, zeros_like_tree
from fsharding.optim.schedule import Schedule, rate


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

        def leaf(p, g, m, v, decay=True):
            return adamw_leaf(p, g, m, v, scalars.like(p), (b1, b2, eps, weight_decay if decay else 0.0))

        trees = dict(params=params, grads=grads, m=state.m, v=state.v)
        updates, m, v = map_leaves("adamw.update", leaf, 3, trees, flags=decays)
        return updates, AdamWState(step, m, v)

    return GradientTransformation(init, update)


def adamw_leaf(p, g, m, v, scalars, hyper):
    """Update, new m and new v of one leaf, next to each other: nothing of the whole tree lives at once."""
    minus_lr, correct1, correct2 = scalars
    b1, b2, eps, decay = hyper
    gw = wide(g)
    mw = b1 * wide(m) + (1.0 - b1) * gw
    vw = b2 * wide(v) + (1.0 - b2) * (gw * gw)
    direction = (mw / correct1) / ((vw / correct2).sqrt() + eps)
    if decay:
        direction = direction + decay * wide(p)
    return minus_lr * direction, mw.to(m.dtype), vw.to(v.dtype)


def _check(learning_rate, b1, b2, eps, weight_decay):
    if not callable(learning_rate) and learning_rate < 0:
        raise ShardingError(f"adamw: learning_rate={learning_rate} must not be negative")
    for name, value in (("b1", b1), ("b2", b2)):
        if not 0.0 <= value < 1.0:
            raise ShardingError(f"adamw: {name}={value} must be in [0, 1)")
    for name, value in (("eps", eps), ("weight_decay", weight_decay)):
        if value < 0:
            raise ShardingError(f"adamw: {name}={value} must not be negative")
