"""``mlp``: the expert MLP of a mixture as one differentiable op, which keeps little for its backward pass.

Legend: T tokens, k experts a token, R = T·k rows, E experts, D model dim, H expert hidden.

First derivatives are one fused op each way. Higher ones, and forward mode, are written out with the differentiable ops
of ``ops.py``, so that they hold to any order and under any partition:

    X = x[token of row], h = X @ w_in, a = f(gate)·up, out = Σ c·(a @ w_out)                    (c: routing weights)
    G = g[token of row], u = G @ w_out.T, dc = <u, a>, dh = J(h).T (c·u)
    dx = Σ dh @ w_in.T, dw_in = X.T @ dh, dw_out = (c·a).T @ G

A ``t`` before a name below is the change of a value along a tangent of (x, w_in, w_out, c). The gradients' change along
it is, the second derivative being symmetric, also what their transpose sends back to (x, w_in, w_out, c).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsharding import _compat as compat
from fsharding.errors import ShardingError
from fsharding.moe import expert_ops as raw
from fsharding.moe import ops
from fsharding.moe.expert_ops import ACTIVATIONS, gate
from fsharding.moe.routing import Routing
from fsharding.oplib import operands


class _Way(NamedTuple):
    """How rows go: what the ops take besides floating operands."""

    perm: torch.Tensor
    inverse: torch.Tensor
    group_sizes: torch.Tensor
    rows: torch.Tensor
    ends: torch.Tensor
    blocks: torch.Tensor
    largest: torch.Tensor


def _add(*terms):
    """The sum of the terms that are there; None if none is."""
    there = [t for t in terms if t is not None]
    return sum(there[1:], there[0]) if there else None


def _times(a, b):
    return None if a is None or b is None else a * b


class _Linear:
    """The layer and its change along a tangent ``t`` of (x, w_in, w_out, c), entries of which may be None."""

    def __init__(self, values, t, activation: str, way: _Way):
        self.way, (x, self.w_in, self.w_out, self.c) = way, values
        self.k, (tx, self.t_in, self.t_out, self.tc) = self.c.shape[1], t
        self.X, self.tX = self.dispatch(x), self.dispatch(tx)
        h = self.dot(self.X, self.w_in)
        th = _add(self.dot(self.tX, self.w_in), self.dot(self.X, self.t_in))
        z, self.up = h.chunk(2, -1)
        self.tz, self.tup = (None, None) if th is None else th.chunk(2, -1)
        self.f, self.f1, self.f2 = (gate(z, activation, order) for order in range(3))
        self.a = self.f * self.up
        self.ta = _add(_times(self.f1 * self.up, self.tz), _times(self.f, self.tup))

    def dispatch(self, x):
        return None if x is None else ops.dispatch(x, self.way.perm, self.way.inverse, self.k)

    def dot(self, x, w):
        return None if x is None or w is None else ops.ragged_dot(x, w, self.way.group_sizes)

    def dw(self, x, g):
        return None if x is None or g is None else ops.ragged_dw(x, g, self.way.group_sizes)

    def combine(self, y, c):
        return None if y is None or c is None else ops.combine(y, c, self.way.perm, self.way.inverse)

    def _tokens(self, like):  # one 1 a token: carries numbers between slots and rows
        return ops.wide(like).new_ones(self.c.shape[0], 1)

    def of_rows(self, c):
        """[T, k] -> [R, 1]"""
        if c is None:
            return None
        return ops.combine_t(self._tokens(self.X), c, self.way.perm, self.way.inverse).to(self.X.dtype)

    def of_slots(self, v):
        """[R, 1] -> [T, k]"""
        return None if v is None else ops.combine_w(self._tokens(v), v, self.way.perm, self.way.inverse, self.k)

    def out(self):
        """The change of the layer's result; None if nothing changes."""
        ty = _add(self.dot(self.ta, self.w_out), self.dot(self.a, self.t_out))
        return _add(self.combine(ty, self.c), self.combine(self.dot(self.a, self.w_out), self.tc))

    def gradients(self, g):
        """The changes of the gradients of (x, w_in, w_out, c) for a fixed cotangent ``g``; None where there is none."""
        g = self.dispatch(g)
        u, tu = self.dot(g, self.w_out.mT), self.dot(g, None if self.t_out is None else self.t_out.mT)
        s, ts = self.of_rows(self.c), self.of_rows(self.tc)
        tc = _add(_times(tu, self.a), _times(u, self.ta))
        da, tda = s * u, _add(_times(ts, u), _times(s, tu))
        tgate = _add(
            _times(tda, self.up * self.f1), _times(da * self.f1, self.tup), _times(da * self.up * self.f2, self.tz)
        )
        tup = _add(_times(tda, self.f), _times(da * self.f1, self.tz))
        zero = lambda v: torch.zeros_like(da) if v is None else v
        dh = torch.cat([da * self.up * self.f1, da * self.f], -1)
        tdh = None if tgate is None and tup is None else torch.cat([zero(tgate), zero(tup)], -1)
        tX = _add(self.dot(tdh, self.w_in.mT), self.dot(dh, None if self.t_in is None else self.t_in.mT))
        tx = None if tX is None else ops.dispatch_t(tX, self.way.perm, self.way.inverse, self.k)
        t_in = _add(self.dw(self.tX, dh), self.dw(self.X, tdh))
        t_out = self.dw(_add(_times(ts, self.a), _times(s, self.ta)), g)
        return tx, t_in, t_out, self.of_slots(None if tc is None else tc.sum(-1, keepdim=True))


def _loop(function):
    """A vmap rule that runs the op once per batch entry."""

    def vmap(info, in_dims, *args):
        # a tuple of flags has a tuple of Nones there
        split = lambda a, d: isinstance(a, torch.Tensor) and d is not None
        pick = lambda b: [a.select(d, b) if split(a, d) else a for a, d in zip(args, in_dims, strict=True)]
        results = [function().apply(*pick(b)) for b in range(info.batch_size)]
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])

    return staticmethod(vmap)


class _Mlp(torch.autograd.Function):
    """(x, w_in, w_out, weights) -> (out, h); h is a result only so that it can be kept."""

    vmap = _loop(lambda: _Mlp)

    @staticmethod
    def forward(x, w_in, w_out, weights, activation, perm, inverse, group_sizes, rows, ends, blocks, largest):
        # spelled out: torch.compile tells a context argument from the number of parameters
        way = perm, inverse, group_sizes, rows, ends, blocks, largest
        return raw.mlp_raw(x, w_in, w_out, weights, *way, activation, True, True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w_in, w_out, weights, ctx.activation, *way = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w_in, w_out, weights, output[1], *way)
        ctx.save_for_forward(x, w_in, w_out, weights, output[1], *way)

    @staticmethod
    def backward(ctx, g, _):
        grads = (None,) * 4
        if g is not None:
            x, w_in, w_out, weights, h, *way = ctx.saved_tensors
            needs = tuple(ctx.needs_input_grad[:4])
            made = iter(_MlpBackward.apply(g, x, w_in, w_out, weights, h, ctx.activation, needs, *way))
            grads = tuple(next(made) if need else None for need in needs)
        return (*grads, *(None,) * 8)

    @staticmethod
    def jvp(ctx, *tangents):
        *values, _, perm, inverse, group_sizes, rows, ends, blocks, largest = ctx.saved_tensors
        way = _Way(perm, inverse, group_sizes, rows, ends, blocks, largest)
        return _Linear(values, tangents[:4], ctx.activation, way).out(), None


class _MlpBackward(torch.autograd.Function):
    """(g, x, w_in, w_out, weights, and h of the forward) -> those gradients that ``needs`` names."""

    vmap = _loop(lambda: _MlpBackward)

    @staticmethod
    def forward(
        g, x, w_in, w_out, weights, h, activation, needs, perm, inverse, group_sizes, rows, ends, blocks, largest
    ):
        way = perm, inverse, group_sizes, rows, ends, blocks, largest
        grads = raw.mlp_backward_raw(g, x, w_in, w_out, weights, h, *way, activation, needs)
        return tuple(grad for grad, need in zip(grads, needs, strict=True) if need)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *floating, ctx.activation, ctx.needs = inputs[:8]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*floating, *inputs[8:])
        ctx.save_for_forward(*floating, *inputs[8:])

    @staticmethod
    def _linear(ctx, tangents):
        g, *values = ctx.saved_tensors[:5]
        return g, _Linear(values, tangents, ctx.activation, _Way(*ctx.saved_tensors[6:]))

    @staticmethod
    def backward(ctx, *cotangents):
        given = iter(cotangents)
        tangents = [next(given) if need else None for need in ctx.needs]
        if all(t is None for t in tangents):
            return (None,) * 15
        g, linear = _MlpBackward._linear(ctx, tangents)
        need = ctx.needs_input_grad
        grads = linear.gradients(g) if any(need[1:5]) else (None,) * 4
        dtypes = [v.dtype for v in ctx.saved_tensors[:5]]
        grads = [
            None if v is None or not n else v.to(d)
            for v, n, d in zip((linear.out() if need[0] else None, *grads), need, dtypes, strict=False)
        ]
        return (*grads, *(None,) * 10)  # h follows from x and w_in: what it would get is in theirs

    @staticmethod
    def jvp(ctx, *tangents):
        g, linear = _MlpBackward._linear(ctx, tangents[1:5])
        moved = linear.gradients(g) if any(t is not None for t in tangents[1:5]) else (None,) * 4
        direct = [None] * 4
        if tangents[0] is not None:
            values, way = ctx.saved_tensors[1:6], ctx.saved_tensors[6:]
            made = iter(_MlpBackward.apply(tangents[0], *values, ctx.activation, ctx.needs, *way))
            direct = [next(made) if need else None for need in ctx.needs]
        likes = ctx.saved_tensors[1:5]
        sums = [_add(a, b) for a, b in zip(direct, moved, strict=True)]
        return tuple(
            torch.zeros_like(like) if v is None else v.to(like.dtype)
            for v, need, like in zip(sums, ctx.needs, likes, strict=True)
            if need
        )


def mlp(
    x: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    activation: str = "swiglu",
) -> torch.Tensor:
    """The experts of a layer in one op: ``combine(ragged_dot(act(ragged_dot(dispatch(x), w_in)), w_out), weights)``.

    ``out[t] = Σ_j weights[t, j] · (f(gate) · up) @ w_out[e]`` with ``gate | up = x[t] @ w_in[e]`` and e the j-th choice
    of token t. For the backward pass only x, the products ``gate | up``, weights and integers are kept. On CUDA in
    bfloat16 it runs the Triton kernels of ``fsharding.kernels``, elsewhere plain PyTorch. Differentiable to any order,
    in forward mode too; ``vmap`` loops over its batch.

    Args:
        x: [T, D], the tokens.
        w_in: [E, D, 2H], resting as ``[gate | up]`` along the last dim, of ``x``'s dtype.
        w_out: [E, H, D], of ``x``'s dtype.
        routing: from :func:`route`, for these T tokens and E experts.
        weights: [T, k], floating.
        activation: "swiglu" (SiLU; Shazeer, "GLU variants improve transformer", 2020), "geglu" (exact GELU) or "glu"
            (no function).

    Returns:
        [T, D] in ``x``'s dtype.

    Raises:
        ShardingError: shapes or dtypes that do not fit, an unknown activation, or no routing.
    """
    if not isinstance(routing, Routing):
        raise ShardingError(f"`mlp` takes the routing that `fs.moe.route` returned, got {type(routing).__name__}.")
    if activation not in ACTIVATIONS:
        raise ShardingError(f"`mlp`: unknown activation {activation!r}; one of {', '.join(ACTIVATIONS)}.")
    x, w_in, w_out, weights, *way = operands(x, w_in, w_out, weights, *routing[:3])
    _check(x, w_in, w_out, weights, routing)
    way = (*way, *raw.tiles_raw(way[0], way[2], routing.top_k))
    if not any(map(_tracked, (x, w_in, w_out, weights))):  # nothing is kept, h is not even written
        return raw.mlp_raw(x, w_in, w_out, weights, *way, activation, True, False)[0]
    return _Mlp.apply(x, w_in, w_out, weights, activation, *way)[0]


def _tracked(x):
    return (torch.is_grad_enabled() and x.requires_grad) or compat.is_wrapped(x) or compat.has_tangent(x)


def _check(x, w_in, w_out, weights, routing):
    tokens = routing.perm.shape[0] // routing.top_k
    fits = (
        x.ndim == 2
        and w_in.ndim == w_out.ndim == 3
        and x.shape[0] == tokens
        and tuple(weights.shape) == (tokens, routing.top_k)
        and w_in.shape == (routing.num_experts, x.shape[1], 2 * w_out.shape[1])
        and w_out.shape == (routing.num_experts, w_out.shape[1], x.shape[1])
    )
    if not fits:
        raise ShardingError(
            f"`mlp` takes x [{tokens}, D], w_in [{routing.num_experts}, D, 2H], w_out [{routing.num_experts}, H, D] "
            f"and weights [{tokens}, {routing.top_k}] for this routing, got {tuple(x.shape)}, {tuple(w_in.shape)}, "
            f"{tuple(w_out.shape)} and {tuple(weights.shape)}."
        )
    if not (x.dtype == w_in.dtype == w_out.dtype and x.is_floating_point() and weights.is_floating_point()):
        raise ShardingError(
            "`mlp` takes x, w_in and w_out of one floating dtype and floating weights, got "
            f"{x.dtype}, {w_in.dtype}, {w_out.dtype} and {weights.dtype}."
        )
