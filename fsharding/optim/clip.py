"""The global norm, and clipping by it, on every kind of leaf.

Inside ``fs.shard`` leaves are stored shards and the program is the single-device one: the partition turns the pending
sums of squares into one all-reduce per set of mesh axes. Outside, DTensor leaves say themselves how they are split:
their sums are stacked by mesh, and each mesh dim costs at most one all-reduce whatever the number of leaves. A leaf
replicated over a dim is left out of that dim's all-reduce, so that it counts once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsharding.errors import ShardingError
from fsharding.optim.base import (
    GradientTransformation,
    Scalars,
    device_of,
    flatten,
    is_part_of_a_program,
    local,
    map_leaves,
    wide,
)
from fsharding.program.update import squares_raw


class ClipState(NamedTuple):
    """``norm``: 0-d, the global norm of the last gradients before clipping (0 at the start), for logging."""

    norm: torch.Tensor


def global_norm(tree: Any) -> torch.Tensor:
    """The 2-norm of all leaves taken as one vector: a 0-d float32 tensor (float64 if a leaf is float64).

    Squares are summed in float32 or wider, then one square root. Leaves may be plain tensors (counted as one value
    that every rank holds), DTensors on any meshes, and empty shards. An empty tree has norm 0. Every rank of the
    meshes must call it, with the same tree. Raises ShardingError for DTensors with pending (``Partial``) sums.
    """
    paths, leaves, _ = flatten("global_norm", tree)
    sharded, total = {}, None
    for path, leaf in zip(paths, leaves, strict=True):
        if is_part_of_a_program(leaf):
            square = squares_raw(leaf)
        else:
            x = wide(local(leaf))
            square = (x * x).sum()
        dims = _sharded_dims(path, leaf)
        if dims:
            sums = sharded.setdefault(leaf.device_mesh, {})
            sums[dims] = sums[dims] + square if dims in sums else square
        else:
            total = square if total is None else total + square
    for mesh, sums in sharded.items():
        for square in _reduce(mesh, sums):
            total = square if total is None else total + square
    return torch.zeros(()) if total is None else total.sqrt()


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Scale all gradients by ``max_norm / max(norm, max_norm)``, norm being ``global_norm`` of them.

    (Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, algorithm 1.) A norm of zero
    gives a scale of 1; a norm that is not finite gives gradients that are not finite. dtypes are kept. The state
    carries the norm, which saves a second one for the log.
    Raises ShardingError unless ``max_norm`` is positive.
    """
    if not max_norm > 0:
        raise ShardingError(f"clip_by_global_norm: max_norm={max_norm} must be positive")

    def init(params):
        return ClipState(torch.zeros((), dtype=_norm_dtype(params), device=device_of(params)))

    def update(grads, state, params=None):
        norm = global_norm(grads)
        scale = Scalars(max_norm / torch.clamp(norm, min=max_norm))

        def leaf(g):
            return ((wide(g) * scale.like(g)[0]).to(g.dtype),)

        (clipped,) = map_leaves("clip_by_global_norm.update", leaf, 1, dict(grads=grads))
        return clipped, ClipState(norm)

    return GradientTransformation(init, update)


def _norm_dtype(tree):
    # what ``global_norm`` of gradients like these returns, so that the state keeps its dtype from the first step on
    _, leaves, _ = flatten("clip_by_global_norm.init", tree)
    wides = {torch.float64 if x.dtype == torch.float64 else torch.float32 for x in leaves}
    return torch.float64 if torch.float64 in wides else torch.float32


def _sharded_dims(path, leaf):
    """The mesh dims that split this leaf; a dim of size 1 splits nothing."""
    if not isinstance(leaf, DTensor):
        return ()
    if any(p.is_partial() for p in leaf.placements):
        raise ShardingError(
            f"global_norm: {path or 'the leaf'} has pending sums ({leaf.placements}); redistribute it as its "
            "parameter is placed first"
        )
    mesh = leaf.device_mesh
    return tuple(d for d, p in enumerate(leaf.placements) if not p.is_replicate() and mesh.size(d) > 1)


def _reduce(mesh, sums):
    """Per set of dims, the sum over the ranks along these dims: one all-reduce for each dim of the mesh."""
    values = dict(sums)
    for dim in range(mesh.ndim):
        keys = [k for k in values if dim in k]
        if keys:
            stack = torch.stack([values[k] for k in keys])
            dist.all_reduce(stack, group=mesh.get_group(dim))
            values.update(zip(keys, stack.unbind(), strict=True))
    return values.values()
