"""``constrain``: where an intermediate value lies, said by hand. JAX's ``with_sharding_constraint``."""

from __future__ import annotations

from typing import Any

import torch

from fsharding import _compat as compat
from fsharding import oplib
from fsharding.annotate.spec import P
from fsharding.errors import ShardingError
from fsharding.program.partition import Partition
from fsharding.program.values import Const, Lazy, Placed, is_routed

KEEP = "*"

constrain_raw = oplib.raw_op(
    "constrain(Tensor x, str dims, str key) -> Tensor",
    lambda x, dims, key: x.clone(),
    lambda x, dims, key: torch.empty_like(x),
)
constrain_t_raw = oplib.raw_op(
    "constrain_t(Tensor g, str dims, str key) -> Tensor",
    lambda g, dims, key: g.clone(),
    lambda g, dims, key: torch.empty_like(g),
)
"""The cotangent of the call ``key``: it lies as that call found its operand."""


class _Constrain(torch.autograd.Function):
    """An identity."""

    @staticmethod
    def forward(x, dims, key):
        return constrain_raw(x, dims, key)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.dims, ctx.key = inputs

    @staticmethod
    def backward(ctx, g):
        return _Back.apply(g, ctx.dims, ctx.key), None, None

    @staticmethod
    def jvp(ctx, t, *_):
        return _Constrain.apply(t, ctx.dims, ctx.key)

    @staticmethod
    def vmap(info, in_dims, x, dims, key):
        parts = dims.split(";")
        parts.insert(in_dims[0], KEEP)
        return _Constrain.apply(x, ";".join(parts), key), in_dims[0]


class _Back(torch.autograd.Function):
    """Its transpose."""

    @staticmethod
    def forward(g, dims, key):
        return constrain_t_raw(g, dims, key)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.dims, ctx.key = inputs

    @staticmethod
    def backward(ctx, c):
        return _Constrain.apply(c, ctx.dims, ctx.key), None, None

    @staticmethod
    def jvp(ctx, t, *_):
        return _Back.apply(t, ctx.dims, ctx.key)

    @staticmethod
    def vmap(info, in_dims, g, dims, key):
        return _Back.apply(g, dims, key), in_dims[0]


def constrain(x: torch.Tensor, spec: Any) -> torch.Tensor:
    """``x``, moved so that it lies over the mesh as ``spec`` says. The value does not change; the gradient moves back.

    The one way in which rows move: a dim that is split is gathered where the spec has ``None``, a whole one is cut, and
    a pending sum is scattered (instead of reduced everywhere) where the spec splits the result over the same axes. With
    a model axis this makes sequence-parallel norms: ``fs.constrain(h @ w_out, (..., "tp"))`` leaves every rank of
    ``tp`` a part of the sequence, ``fs.constrain(h, (..., None))`` brings it back.

    Args:
        x: any tensor in a sharded function; elsewhere it is returned as it is.
        spec: a ``P``, or a tuple of such entries in which ``...`` leaves that dim as it lies. Missing entries are None.

    Raises:
        ShardingError: more entries than dims, an axis that the mesh does not have or that is named twice, a dim that
            its axes do not divide, routed rows; with the source line.
    """
    entries = list(spec) if isinstance(spec, P | tuple) else None
    if entries is None or not isinstance(x, torch.Tensor):
        raise ShardingError(
            f"`fs.constrain` takes a tensor and a spec such as P('data', 'tp') or (..., 'tp'), got {spec!r}."
        )
    if len(entries) > x.ndim:
        raise ShardingError(f"`fs.constrain`: {spec!r} has {len(entries)} entries, but the tensor has {x.ndim} dims.")
    dims = ";".join(map(_entry, entries + [None] * (x.ndim - len(entries))))
    if compat.current_tracer() is None or x.ndim == 0:
        return x
    (x,) = oplib.operands(x)
    return _Constrain.apply(x, dims, f"at{len(compat.current_tracer().graph.nodes)}")


def _entry(entry: Any) -> str:
    if entry is ...:
        return KEEP
    axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    if not all(isinstance(a, str) and a for a in axes):
        raise ShardingError(f"`fs.constrain`: the entry {entry!r} is no axis, tuple of axes, None or `...`.")
    return ",".join(axes)


def rule(p: Partition, node, args, kwargs):
    """To the given layout: gathers, cuts, and reduce-scatters of pending sums."""
    value, text, key = args
    parts = text.split(";") if text else []
    have = value.dims if isinstance(value, Placed) else ((),) * len(parts)
    if any(map(is_routed, have)):
        p.fail("routed rows lie where their experts are: constrain what `combine` gives")
    dims = tuple(h if t == KEEP else tuple(filter(None, t.split(","))) for h, t in zip(have, parts, strict=True))
    _check(p, dims)
    if isinstance(value, Const | Lazy):
        return p.relayout(value, dims)
    x = p.placed(value)
    p.local_shape(x.shape, dims)
    p.found_at[key] = x.dims
    return Placed(p.rest(x, dims).node, x.shape, dims)


def transpose_rule(p: Partition, node, args, kwargs):
    """Back to where the operand lay: the transpose of a scatter is a gather."""
    g, _, key = args
    dims = p.found_at.get(key)
    if isinstance(g, Const | Lazy) or dims is None or len(dims) != len(node.meta["val"].shape):
        return g
    x = p.placed(g)
    return Placed(p.rest(x, dims).node, x.shape, dims)


def _check(p: Partition, dims) -> None:
    named = [a for axes in dims for a in axes]
    for axis in named:
        if axis not in p.mesh.shape:
            p.fail(f"the spec names the axis {axis!r}, which the mesh does not have ({', '.join(p.mesh.axis_names)})")
        if named.count(axis) > 1:
            p.fail(f"the spec names the axis {axis!r} twice")
        if axis in p.node.meta.get("custom", {}).get("manual", ()):
            p.fail(f"the axis {axis!r} belongs to the `shard_map` around it: its ranks hold what they hold")
