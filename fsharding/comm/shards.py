"""Raw ops on blocks: cut this rank's block, lay uneven blocks side by side, mask what is padding.

Uneven dims are stored in blocks of equal size, padded at the end, so that the local program reads the same on all
ranks.
"""

from __future__ import annotations

import itertools
import math

import torch

from fsharding.annotate.spec import local_slices, padded_shape, shard_sizes
from fsharding.comm import groups
from fsharding.oplib import raw_op
from fsharding.random import draw_block


def _ends(sizes):
    return zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)


def _pad_to(x, dim, size):
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def _block_like(x, dim, size):
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _shard_slice(x, dim, block, alias):
    sizes, axes = groups.parse(alias)
    where = groups.coordinates(alias, groups.current_rank())
    (own,) = local_slices((x.shape[dim],), (axes,), sizes, where)
    return _pad_to(x.narrow(dim, own.start, own.stop - own.start), dim, block).clone(
        memory_format=torch.contiguous_format
    )


shard_slice = raw_op(
    "shard_slice(Tensor x, int dim, int block, str axes) -> Tensor",
    _shard_slice,
    lambda x, dim, block, axes: _block_like(x, dim, block).contiguous(),
)
"""This rank's block of ``dim``, cut by ``axes`` (an alias, major to minor), padded with zeros to ``block``."""


def _pad_blocks(x, dim, axis_sizes, block):
    cuts = _ends(shard_sizes(x.shape[dim], axis_sizes))
    return torch.cat([_pad_to(x.narrow(dim, start, size), dim, block) for start, size in cuts], dim)


def _unpad_blocks(x, dim, size, axis_sizes, block):
    sizes = shard_sizes(size, axis_sizes)
    return torch.cat([x.narrow(dim, i * block, n) for i, n in enumerate(sizes)], dim)


pad_blocks = raw_op(
    "pad_blocks(Tensor x, int dim, int[] axis_sizes, int block) -> Tensor",
    _pad_blocks,
    lambda x, dim, axis_sizes, block: _block_like(x, dim, block * math.prod(axis_sizes)).contiguous(),
)
"""The blocks that axes of these sizes cut ``dim`` into, side by side, each padded with zeros to ``block``."""

unpad_blocks = raw_op(
    "unpad_blocks(Tensor x, int dim, int size, int[] axis_sizes, int block) -> Tensor",
    _unpad_blocks,
    lambda x, dim, size, axis_sizes, block: _block_like(x, dim, size).contiguous(),
)
"""The inverse of ``pad_blocks``; ``dim`` has ``size`` again."""


def _draw_shard(key, shape, kind, dtype, dims, mesh):
    sizes, _ = groups.parse(mesh)
    where = local_slices(shape, decode_dims(dims), sizes, groups.coordinates(mesh, groups.current_rank()))
    return draw_block(key, kind, shape, [s.start for s in where], [s.stop - s.start for s in where], dtype)


def _fake_draw(key, shape, kind, dtype, dims, mesh):
    sizes, _ = groups.parse(mesh)
    return key.new_empty(padded_shape(shape, decode_dims(dims), sizes), dtype=dtype)


draw_shard = raw_op(
    "draw_shard(Tensor key, int[] shape, str kind, ScalarType dtype, str dims, str mesh) -> Tensor",
    _draw_shard,
    _fake_draw,
)
"""This rank's block of an array of random numbers of global ``shape``; ``dims`` must divide it."""


def decode_dims(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(filter(None, part.split(","))) for part in text.split(";")[:-1])


def encode_dims(dims) -> str:
    return "".join(",".join(axes) + ";" for axes in dims)


def _mask_padding(x, shape, dims, mesh, value):
    sizes, _ = groups.parse(mesh)
    slices = local_slices(shape, decode_dims(dims), sizes, groups.coordinates(mesh, groups.current_rank()))
    out = torch.full_like(x, value)
    inside = tuple(slice(0, s.stop - s.start) for s in slices)
    out[inside] = x[inside]
    return out


mask_padding = raw_op(
    "mask_padding(Tensor x, int[] shape, str dims, str mesh, Scalar value) -> Tensor",
    _mask_padding,
    lambda x, *rest: torch.empty_like(x),
)
"""A stored block of a tensor of global ``shape``, its padding replaced by ``value`` (as before a reduction)."""
