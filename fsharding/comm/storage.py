"""Storage <-> use: gather a stored leaf for use, bring a gradient back to rest. One collective each, on our own groups.

A block is cut from its tensor by tuples of axes per dim. A collective over a set of axes sees its ranks in mesh order,
which need not be the order of the blocks: the axes' coordinates become dims of their own, are permuted to where they
belong and merged. For dim 0 in mesh order nothing is permuted and nothing copied.
"""

from __future__ import annotations

import math

import torch.fx as fx

from fsharding.comm import shards

Dims = tuple[tuple[str, ...], ...]


def real_axes(mesh, axes) -> tuple[str, ...]:
    """Axes that cut something: those of size > 1."""
    return tuple(a for a in axes if mesh.shape[a] > 1) if axes else ()


def block_size(mesh, size: int, axes) -> int:
    """Size of the largest block of one dim, to which the others are padded."""
    for axis in axes:
        size = -(-size // mesh.shape[axis])
    return size


def _plan(mesh, local: Dims):
    """Axes to communicate over (mesh order), and per dim its own of them (tuple order)."""
    per_dim = [real_axes(mesh, axes) for axes in local]
    return mesh.sort_axes([a for axes in per_dim for a in axes]), per_dim


def gather(emit, x: fx.Node, shape, local: Dims) -> fx.Node:
    """All blocks of a tensor of ``shape`` (whole along the dims' axes in ``local``) from this rank's padded block."""
    mesh = emit.mesh
    axes, per_dim = _plan(mesh, local)
    if not axes:
        return x
    block = tuple(x.meta["val"].shape)
    y = emit.all_gather(x, axes)
    if per_dim[0] == axes and y.meta["val"].shape[0] == shape[0]:
        return y
    y = emit.reshape(y, [mesh.shape[a] for a in axes] + list(block))
    order = []
    for dim, own in enumerate(per_dim):
        order += [axes.index(a) for a in own] + [len(axes) + dim]
    y = emit.permute(y, order)
    parts = [math.prod(mesh.shape[a] for a in own) for own in per_dim]
    y = emit.reshape(y, [n * b for n, b in zip(parts, block, strict=True)])
    for dim, own in enumerate(per_dim):
        if parts[dim] * block[dim] != shape[dim]:
            y = emit.call(shards.unpad_blocks, y, dim, shape[dim], [mesh.shape[a] for a in own], block[dim])
    return y


def reduce_scatter(emit, x: fx.Node, shape, local: Dims) -> fx.Node:
    """The sum over the ranks of ``x`` (of ``shape``), cut into this rank's padded block: the transpose of
    :func:`gather`."""
    mesh = emit.mesh
    axes, per_dim = _plan(mesh, local)
    if not axes:
        return x
    if per_dim[0] == axes and shape[0] % mesh.axes_size(axes) == 0:
        return emit.reduce_scatter(x, axes)
    split, order = [], [0] * len(axes)
    for dim, own in enumerate(per_dim):
        x, block = _padded(emit, x, dim, shape[dim], own)
        for a in own:
            order[axes.index(a)] = len(split)
            split.append(mesh.shape[a])
        order.append(len(split))
        split.append(block)
    y = emit.permute(emit.reshape(x, split), order)
    blocks = [split[i] for i in order[len(axes) :]]
    y = emit.reshape(y, [mesh.axes_size(axes) * blocks[0], *blocks[1:]])
    return emit.reduce_scatter(y, axes)


def _padded(emit, x, dim, size, own):
    sizes = [emit.mesh.shape[a] for a in own]
    block = block_size(emit.mesh, size, own)
    if block * math.prod(sizes) != size:
        x = emit.call(shards.pad_blocks, x, dim, sizes, block)
    return x, block


def cut(emit, x: fx.Node, shape, local: Dims) -> fx.Node:
    """This rank's (padded) block of a tensor that every rank holds: no communication."""
    mesh = emit.mesh
    for dim, axes in enumerate(local):
        axes = real_axes(mesh, axes)
        if axes:
            alias = mesh.alias(()) + ",".join(axes)  # in the order of the tuple, unlike a group's
            x = emit.call(shards.shard_slice, x, dim, block_size(mesh, shape[dim], axes), alias)
    return x
