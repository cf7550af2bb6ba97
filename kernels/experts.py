"""The fused expert MLP as one differentiable op: gather, up-product, activation, down-product, weighted gather-sum.

Forward keeps x, the pre-activation h [R, 2I], the routing weights and the integers of the routing. Neither the gathered
rows of x, nor the activation, nor the rows before the sum are kept. Backward recomputes the activation in the epilogue
of the product that needs h anyway; that epilogue also gives the gradient of the routing weights, since
<g, a @ w_out> = <g @ w_out.T, a>.

Legend: T tokens, k slots a token, R = T·k rows, H hidden, I expert hidden, E experts.
"""

import torch

from .combine import combine_op
from .glu import ACTIVATIONS, glu_backward_op, glu_op
from .registry import refuse_vmap
from .routing import Routing
from .rows import rows_op
from .wgrad import wgrad_op


def forward_pass(x, w_in, w_out, weights, routing: Routing, activation: str, keep: bool):
    """(out [T, H], h [R, 2I] or [0, 2I]) from the raw ops."""
    o, b = routing.offsets, routing.blocks
    h, a = glu_op(x, w_in, o, b, routing.rows, activation, keep)
    y = rows_op(a, w_out, o, b)
    return combine_op(y, weights, routing.inverse), h


def backward_pass(g, x, w_in, w_out, weights, h, routing: Routing, activation: str, needs):
    """Gradients of (x, w_in, w_out, weights); None where `needs` says so."""
    o, b, order, rows, inverse = routing.offsets, routing.blocks, routing.order, routing.rows, routing.inverse
    weights_high = weights.to(torch.promote_types(weights.dtype, torch.float32))
    scale = weights_high.reshape(-1).index_select(0, routing.perm)
    dh, a, dscale = glu_backward_op(g, w_out, h, scale, o, b, rows, activation)
    dx = dw_in = dw_out = dweights = None
    if needs[2]:
        dw_out = wgrad_op(a, g, o, order, None, rows)
    del a
    if needs[1]:
        dw_in = wgrad_op(x, dh, o, order, rows, None)
    if needs[0]:
        dx = combine_op(rows_op(dh, w_in, o, b, transposed=True), None, inverse)
    if needs[3]:
        dweights = dscale.index_select(0, inverse.reshape(-1)).reshape(weights.shape).to(weights.dtype)
    return dx, dw_in, dw_out, dweights


class ExpertMlp(torch.autograd.Function):
    """(x, w_in, w_out, weights) -> (out, h); h is an output only so that it can be saved."""

    vmap = refuse_vmap("expert_mlp")

    @staticmethod
    def forward(x, w_in, w_out, weights, activation, *routing):
        return forward_pass(x, w_in, w_out, weights, Routing(*routing), activation, True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w_in, w_out, weights, activation, *routing = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w_in, w_out, weights, output[1], *routing)
        ctx.activation = activation

    @staticmethod
    def backward(ctx, g, _):
        grads = (None,) * 4
        if g is not None:
            x, w_in, w_out, weights, h, *routing = ctx.saved_tensors
            needs = tuple(ctx.needs_input_grad[:4])
            flat = iter(ExpertMlpBackward.apply(g, x, w_in, w_out, weights, h, ctx.activation, needs, *routing))
            grads = tuple(next(flat) if need else None for need in needs)
        return (*grads, *(None,) * (len(ctx.needs_input_grad) - 4))


class ExpertMlpBackward(torch.autograd.Function):
    """The gradients that are needed, as one op that refuses to be differentiated again."""

    vmap = refuse_vmap("expert_mlp")

    @staticmethod
    def forward(g, x, w_in, w_out, weights, h, activation, needs, *routing):
        grads = backward_pass(g, x, w_in, w_out, weights, h, Routing(*routing), activation, needs)
        return tuple(d for d in grads if d is not None)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "`expert_mlp` cannot be differentiated twice: its backward keeps no activations. Build the layer from "
            "`gather_mm`, your activation, `grouped_mm` and `combine`, which can be."
        )


def expert_mlp(
    x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor, routing: Routing, weights: torch.Tensor,
    activation: str = "swiglu",
) -> torch.Tensor:  # fmt: skip
    """The expert layer of a mixture: out[t] = sum over j of weights[t, j]·(f(gate)·up) @ w_out[e], e = ids[t, j].

    x [T, H], w_in [E, H, 2I] resting as [gate | up], w_out [E, I, H] of one dtype; routing from `route(ids, E)`;
    weights [T, k] floating. Returns [T, H]. `activation`: "swiglu" (SiLU), "geglu" (exact GELU) or "glu" (no function).
    Slots whose id was out of range add nothing. Raises ValueError for shapes that do not fit, NotImplementedError under
    `vmap` and in a second differentiation.

    Example: one expert, H = I = 1, w_in = [[[0., 2.]]], w_out = [[[3.]]], x = [[1.]], weights = [[1.]], "geglu": gate 0
    gives f = 0, so [[0.]]; with "glu" and w_in = [[[1., 2.]]]: 1·2·3 = [[6.]].
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if w_in.shape[2] != 2 * w_out.shape[1] or x.shape[1] != w_out.shape[2] or weights.shape != routing.inverse.shape:
        raise ValueError(
            f"x {tuple(x.shape)}, w_in {tuple(w_in.shape)}, w_out {tuple(w_out.shape)}, "
            f"weights {tuple(weights.shape)}: need [T, H], [E, H, 2I], [E, I, H] and {tuple(routing.inverse.shape)}"
        )
    differentiable = torch.is_grad_enabled() and any(
        t.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (x, w_in, w_out, weights)
    )
    if not differentiable:  # nothing is kept, h is not even written
        return forward_pass(x, w_in, w_out, weights, routing, activation, False)[0]
    return ExpertMlp.apply(x, w_in, w_out, weights, activation, *routing)[0]
