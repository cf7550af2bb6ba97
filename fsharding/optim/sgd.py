"""Stochastic gradient descent, with momentum if asked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fsharding.errors import ShardingError
from fsharding.optim.base import GradientTransformation, Scalars, map_leaves, step_count, wide, zeros_like_tree
from fsharding.optim.schedule import Schedule, rate


class SGDState(NamedTuple):
    """``step``: 0-d int64, updates made so far. ``momentum``: a tree like the parameters, None without momentum."""

    step: torch.Tensor
    momentum: Any


def sgd(learning_rate: float | Schedule, momentum: float = 0.0, nesterov: bool = False) -> GradientTransformation:
    """SGD with heavy-ball momentum (Polyak, 1964) or Nesterov's, in the form of Sutskever et al., 2013.

    ``b = momentum b + g``, then ``update = -lr b``, with Nesterov ``update = -lr (g + momentum b)``; as in
    ``torch.optim.SGD``, the rate is outside of the buffer. Arithmetic is in float32 or wider.

    Raises ShardingError for hyperparameters out of range and for trees or shapes that do not match.
    """
    if not callable(learning_rate) and learning_rate < 0:
        raise ShardingError(f"sgd: learning_rate={learning_rate} must not be negative")
    if not 0.0 <= momentum < 1.0:
        raise ShardingError(f"sgd: momentum={momentum} must be in [0, 1)")
    if nesterov and momentum == 0.0:
        raise ShardingError("sgd: nesterov needs momentum > 0")

    def init(params):
        buffers = zeros_like_tree("sgd.init", params) if momentum else None
        return SGDState(step_count(params), buffers)

    def plain(g, minus_lr):
        return (minus_lr.like(g)[0] * wide(g),)

    def heavy(g, b, minus_lr):
        gw = wide(g)
        bw = momentum * wide(b) + gw
        direction = gw + momentum * bw if nesterov else bw
        return minus_lr.like(g)[0] * direction, bw.to(b.dtype)

    def update(grads, state, params=None):
        if not isinstance(state, SGDState):
            raise ShardingError(f"sgd.update: state is a {type(state).__name__}; pass what sgd.init returned")
        minus_lr, buffers = Scalars(-rate(learning_rate, state.step)), None
        trees = dict(grads=grads) if params is None else dict(params=params, grads=grads)
        skip = len(trees) - 1  # parameters are read for the check of structure and shapes only
        if momentum:
            trees["momentum"] = state.momentum
            updates, buffers = map_leaves("sgd.update", lambda *x: heavy(*x[skip:], minus_lr), 2, trees)
        else:
            (updates,) = map_leaves("sgd.update", lambda *x: plain(*x[skip:], minus_lr), 1, trees)
        return updates, SGDState(state.step + 1, buffers)

    return GradientTransformation(init, update)
