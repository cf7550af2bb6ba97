"""Optimizers as pairs of pure functions.

``init(params) -> state`` and ``update(grads, state, params) -> (updates, state)``, composed by ``chain``.

The same code runs on plain tensors, on trees of DTensors, and traced inside ``fs.shard``, where parameters, gradients
and states are stored shards and every elementwise step stays local.
"""

from fsharding.optim.adamw import AdamWState, adamw
from fsharding.optim.base import GradientTransformation, apply_updates, chain
from fsharding.optim.clip import ClipState, clip_by_global_norm, global_norm
from fsharding.optim.schedule import Schedule, constant, linear, warmup_cosine
from fsharding.optim.sgd import SGDState, sgd

__all__ = [
    "AdamWState",
    "ClipState",
    "GradientTransformation",
    "SGDState",
    "Schedule",
    "adamw",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "global_norm",
    "linear",
    "sgd",
    "warmup_cosine",
]
