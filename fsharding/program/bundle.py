"""Casts of many leaves, and marks on many gradients, as one op each while a function is traced.

A model of 48 layers has 500 leaves: one op a leaf, its gradient and the levels of ``torch.func`` around them would be
a large part of a trace. :func:`unbundle` puts the single ops back afterwards, each right behind what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.fx as fx

from fsharding import _compat as compat
from fsharding import oplib
from fsharding.program.graphs import add_call, replace_uses

A = torch.ops.aten

like_raw = oplib.raw_op("like(Tensor g, Tensor x) -> Tensor", lambda g, x: g.clone(), lambda g, x: torch.empty_like(g))
"""The gradient ``g`` of ``x``, marked so that the partition lays it out as ``x`` rests."""


def fakes(like: Iterable[tuple[torch.Tensor, torch.dtype]]) -> list[torch.Tensor]:
    """Empty tensors of these shapes and dtypes, as results of a fake kernel."""
    like = list(like)
    if like and compat.is_fake(like[0][0]):
        return compat.fakes_alike(like[0][0].fake_mode, like)
    return [torch.empty_like(x, dtype=dtype) for x, dtype in like]


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


casts_raw = oplib.raw_op(
    "casts(Tensor[] xs, str[] dtypes) -> Tensor[]",
    lambda xs, dtypes: [x.to(_dtype(d), copy=True) for x, d in zip(xs, dtypes, strict=True)],
    lambda xs, dtypes: fakes((x, _dtype(d)) for x, d in zip(xs, dtypes, strict=True)),
)
likes_raw = oplib.raw_op(
    "likes(Tensor[] gs, Tensor[] xs) -> Tensor[]",
    lambda gs, xs: [g.clone() for g in gs],
    lambda gs, xs: fakes((g, g.dtype) for g in gs),
)


class _Casts(torch.autograd.Function):
    """Linear in every tensor: its derivatives of any order are casts again."""

    @staticmethod
    def forward(dtypes, *xs):
        return tuple(casts_raw(list(xs), list(dtypes)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.to, *xs = inputs
        ctx.back = [_name(x.dtype) for x in xs]
        ctx.outs = [(x.shape, x.dtype, x.device) for x in output]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *gs):
        return None, *_some(gs, ctx.back)

    @staticmethod
    def jvp(ctx, _, *ts):
        pairs = zip(_some(ts, ctx.to), ctx.outs, strict=True)
        return tuple(torch.zeros(shape, dtype=dtype, device=at) if t is None else t for t, (shape, dtype, at) in pairs)

    @staticmethod
    def vmap(info, in_dims, dtypes, *xs):
        return _Casts.apply(dtypes, *xs), in_dims[1:]


def _some(xs: Sequence, dtypes: Sequence[str]) -> list:
    """The cast of each tensor; None stays None."""
    there = [i for i, x in enumerate(xs) if x is not None]
    made = iter(_Casts.apply([dtypes[i] for i in there], *(xs[i] for i in there)) if there else ())
    return [None if x is None else next(made) for x in xs]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def casts(xs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Each tensor in its dtype; floating tensors and dtypes, inside of a trace."""
    other = [x if x.dtype != d else None for x, d in zip(xs, dtypes, strict=True)]
    return [x if y is None else y for x, y in zip(xs, _some(other, list(map(_name, dtypes))), strict=True)]


class _Likes(torch.autograd.Function):
    """Gradients ``gs`` of ``xs``, first all of the ones, then all of the others. An identity in ``gs``."""

    @staticmethod
    def forward(count, *tensors):
        return tuple(likes_raw(list(tensors[:count]), list(tensors[count:])))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.count = inputs[0]

    @staticmethod
    def backward(ctx, *gs):
        return None, *gs, *(None for _ in gs)

    @staticmethod
    def jvp(ctx, _, *ts):
        return tuple(t.clone() for t in ts[: ctx.count])

    @staticmethod
    def vmap(info, in_dims, count, *tensors):
        # A batch of gradients has no resting place of its own.
        return tuple(g.clone() for g in tensors[:count]), in_dims[1 : count + 1]


def likes(gs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``gs``, marked as the gradients of ``xs``."""
    return _Likes.apply(len(gs), *gs, *xs) if gs else ()


# ---- afterwards ------------------------------------------------------------------------------------------------------
def unbundle(graph: fx.Graph) -> None:
    """One op a tensor, each as soon as what it reads is there: a gradient's reduction need not wait for all others."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    for node in [n for n in graph.nodes if n.target in (casts_raw, likes_raw)]:
        first, second = node.args
        single = {}
        for item in node.users:
            i = item.args[1]
            if node.target is casts_raw:
                target, args, kwargs = A._to_copy.default, (first[i],), {"dtype": _dtype(second[i])}
            else:
                target, args, kwargs = like_raw, (first[i], second[i]), {}
            behind = max((a for a in args if a.op == "call_function"), key=place.__getitem__, default=None)
            with graph.inserting_before(node) if behind is None else graph.inserting_after(behind):
                made = add_call(graph, target, args, kwargs)
            place[made] = place[node if behind is None else behind]
            made.meta = {**item.meta, "custom": dict(node.meta.get("custom", {}))}
            single[item] = made
        replace_uses(single)
        for item in (*single, node):
            graph.erase_node(item)
