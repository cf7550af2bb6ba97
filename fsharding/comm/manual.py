"""The primitive ops of the local view: between global values and blocks, and between the ranks of manual axes.

Each is one opaque node of the global program, linear, differentiable to any order and with a vmap rule. Collectives
work on dim 0, whose entries are the ranks of the group in mesh order; what users call (``collectives.py``) arranges
dims around them, so that derivatives and batching of the arrangement are PyTorch's own.

``group`` is an alias (``fs[i=4,j=2]/j``); ``dims`` a spec in normal form as text (``comm.shards.encode_dims``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from fsharding._compat import resolve_group
from fsharding.comm import groups
from fsharding.comm.shards import decode_dims, encode_dims
from fsharding.comm.varying import BORDER, TRANSFER, conform_to, types
from fsharding.errors import ShardingError
from fsharding.oplib import raw_op

# Never folded over constants while a function is traced: what they give differs between ranks.
_TAGS = (torch.Tag.nondeterministic_seeded,)


def _raw(schema: str, fake: Callable):
    name = schema.split("(")[0]

    def kernel(*args):
        raise ShardingError(f"`{name}` runs inside `fs.shard_map` only, as a part of a program that `fs` compiled.")

    return raw_op(schema, kernel, fake, tags=_TAGS)


def _axes(group: str) -> frozenset[str]:
    return frozenset(groups.parse(group)[1])


def _resized(x, dims, mesh, scale):
    sizes, _ = groups.parse(mesh)
    parts = [math.prod(sizes[a] for a in axes) for axes in decode_dims(dims)]
    return x.new_empty([scale(n, k) for n, k in zip(x.shape, parts, strict=True)])


to_local_raw = _raw(
    "to_local(Tensor x, str dims, str group) -> Tensor",
    lambda x, dims, group: _resized(x, dims, group, lambda n, k: n // k),
)
"""This rank's block of a global value. ``group`` names the manual axes; the others stay with the partition."""

to_global_raw = _raw(
    "to_global(Tensor y, str dims, str group) -> Tensor",
    lambda y, dims, group: _resized(y, dims, group, lambda n, k: n * k),
)
"""The global value whose blocks these are."""

vary_raw = _raw("vary(Tensor x, str group) -> Tensor", lambda x, group: torch.empty_like(x))
"""An identity that adds the axes of the group to the type; its transpose is a sum over them."""

promise_raw = _raw("promise(Tensor x, str group) -> Tensor", lambda x, group: torch.empty_like(x))
"""An identity that takes axes out of the type: somebody promises that the ranks hold the same."""

reduce_raw = _raw("reduce(Tensor x, str op, str group) -> Tensor", lambda x, op, group: torch.empty_like(x))
"""The sum, max or min over the group, on each of its ranks."""

gather_raw = _raw(
    "gather(Tensor x, str group) -> Tensor", lambda x, group: x.new_empty([groups.axes_size(group), *x.shape])
)
"""[...] -> [n, ...]: the values of all ranks."""

scatter_raw = _raw("scatter(Tensor x, str group) -> Tensor", lambda x, group: x.new_empty(x.shape[1:]))
"""[n, ...] -> [...]: entry r of the sum over the group, on rank r."""

exchange_raw = _raw("trade(Tensor x, str group) -> Tensor", lambda x, group: x.new_empty(x.shape))
"""[n, ...] -> [n, ...]: entry s on rank r is entry r of rank s."""

permute_raw = _raw(
    "permute(Tensor x, int[] targets, str group) -> Tensor", lambda x, targets, group: x.new_empty(x.shape)
)
"""Rank r's value goes to rank ``targets[r]`` (-1: to none); a rank that receives nothing holds zeros."""

TRANSFER.update({
    to_local_raw: lambda t, args: t.union(*decode_dims(args[1])),
    to_global_raw: lambda t, args: t - _axes(args[2]),
    vary_raw: lambda t, args: t | _axes(args[1]),
    promise_raw: lambda t, args: t - _axes(args[1]),
    reduce_raw: lambda t, args: t - _axes(args[2]),
    gather_raw: lambda t, args: t | _axes(args[1]),
    scatter_raw: lambda t, args: t | _axes(args[1]),
    exchange_raw: lambda t, args: t | _axes(args[1]),
    permute_raw: lambda t, args: t | _axes(args[2]),
})  # fmt: skip


def _into(node, outside, sure):
    axes = _axes(node.args[2])
    return None if axes & outside else axes | outside


def _out_of(node, inside, sure):
    axes = _axes(node.args[2])
    return inside - axes if axes <= inside or not sure else None


BORDER.update({to_local_raw: _into, to_global_raw: _out_of})


def _linear(raw, transpose: Callable, batch: tuple[int | None, int | None] = (None, None), respec=None) -> Callable:
    """A differentiable linear op.

    Args:
        raw: the raw op.
        transpose: ``f(cotangent, *args) -> cotangent``, of differentiable ops.
        batch: where a batch dim goes in the operand and comes out in the result; None where it stays.
        respec: how arguments read with a batch dim in front.
    """
    name = raw.name().split("::")[-1].split(".")[0]

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(x, *args):
            return raw(x, *args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.args, ctx.type = inputs[1:], types().of(output)

        @staticmethod
        def backward(ctx, g):
            g = conform_to(g, ctx.type, ctx.args[-1], f"a cotangent of `{name}`")
            return transpose(g, *ctx.args), *(None for _ in ctx.args)

        @staticmethod
        def jvp(ctx, t, *_):
            return Op.apply(t, *ctx.args)

        @staticmethod
        def vmap(info, in_dims, x, *args):
            where, out = batch
            if where is not None:
                x = x.movedim(in_dims[0], where)
            if respec is not None:
                args = respec(*args)
            return Op.apply(x, *args), in_dims[0] if out is None else out

    Op.__name__ = name
    return Op.apply


def _batched(dims, group):
    return encode_dims(((), *decode_dims(dims))), group


def _promised(g, group):
    """Each rank answers for its share of what all are promised to hold."""
    return vary(g, group) / groups.axes_size(group)


def _back(g, targets, group):
    sources = [-1] * len(targets)
    for source, target in enumerate(targets):
        if target >= 0:
            sources[target] = source
    return permute(g, sources, group)


to_local: Callable = _linear(to_local_raw, lambda g, *a: to_global(g, *a), (0, 0), _batched)
to_global: Callable = _linear(to_global_raw, lambda g, *a: to_local(g, *a), (0, 0), _batched)
vary: Callable = _linear(vary_raw, lambda g, group: total(g, "sum", group))
promise: Callable = _linear(promise_raw, _promised)
total: Callable = _linear(reduce_raw, lambda g, op, group: vary(g, group))
gather: Callable = _linear(gather_raw, lambda g, group: scatter(g, group), (0, 1))
scatter: Callable = _linear(scatter_raw, lambda g, group: gather(g, group), (1, 0))
exchange: Callable = _linear(exchange_raw, lambda g, group: exchange(g, group), (1, 1))
permute: Callable = _linear(permute_raw, _back)


class _Extreme(torch.autograd.Function):
    """``max`` or ``min`` over the group. JAX defines no derivative either: which rank holds it may be a tie."""

    @staticmethod
    def forward(x, op, group):
        return reduce_raw(x, op, group)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.op = inputs[1]

    @staticmethod
    def backward(ctx, g):
        _no_derivative(ctx.op)

    @staticmethod
    def jvp(ctx, t, *_):
        _no_derivative(ctx.op)

    @staticmethod
    def vmap(info, in_dims, x, op, group):
        return _Extreme.apply(x, op, group), in_dims[0]


def _no_derivative(op):
    raise ShardingError(
        f"`p{op}` has no derivative, as in JAX. Stop the gradient with `x.detach()`, or gather and reduce: "
        f"`fs.all_gather(x, axis).{'amax' if op == 'max' else 'amin'}(0)`."
    )


extreme: Callable = _Extreme.apply


# ---- in local programs -----------------------------------------------------------------------------------------------
def _send(x, targets, group):
    """Through an all-to-all whose pieces are all or nothing: one call on any backend, the same on every rank."""
    place = groups.place(group, groups.current_rank())
    n, size = len(targets), x.numel()
    out_sizes = [size if targets[place] == r else 0 for r in range(n)]
    in_sizes = [size if targets[r] == place else 0 for r in range(n)]
    got = x.new_zeros(size)
    dist.all_to_all_single(got[: sum(in_sizes)], x.reshape(-1)[: sum(out_sizes)], in_sizes, out_sizes,
                           group=resolve_group(group))  # fmt: skip
    return got.view(x.shape)


send = raw_op("send(Tensor x, int[] targets, str group) -> Tensor", _send, lambda x, *_: torch.empty_like(x))
"""``permute`` between processes."""
