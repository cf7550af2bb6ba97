"""The fused expert MLP as one differentiable op: gather, up-product, activation, down-product, weighted gather-sum.

Forward keeps x, the pre-activation h [R, 2I], the routing weights and the integers of the routing. Neither the gathered
rows of x, nor the activation, nor the rows before the sum are kept. Backward recomputes the activation in the epilogue
of the product that needs h anyway; that epilogue also gives the gradient of the routing weights, since
<g, a @ w_out> = <g @ w_out.T, a>.

Legend: T tokens, k slots a token, R = T·k rows, H hidden, I expert hidden, E experts.
"""

import torch

from .combine import combine_launch, combine_reference, gather_launch
from .glu import (
    ACTIVATIONS,
    glu_backward_launch,
    glu_backward_reference,
    glu_launch,
    glu_reference,
)  # fmt: skip
from .registry import define, refuse_vmap
from .routing import Routing
from .rows import rows_launch, rows_reference
from .table import configure
from .wgrad import wgrad_launch, wgrad_reference


def forward_launch(x, w_in, w_out, weights, offsets, perm, inverse, rows, blocks, order, activation, keep):
    """(out [T, H], h [R, 2I], or [0, 2I] unless `keep`). Rows of dropped slots are neither computed, nor zeroed, nor
    read."""
    h, a = glu_launch(x, w_in, offsets, blocks, rows, activation, keep, tail=False)
    y = rows_launch(a, w_out, offsets, blocks, tail=False)
    return combine_launch(y, weights, inverse, offsets[-1:]), h


def backward_launch(
    g, x, w_in, w_out, weights, h, offsets, perm, inverse, rows, blocks, order, activation, needs
):  # fmt: skip
    """Gradients of (x, w_in, w_out, weights), empty where not needed."""
    scale = row_weights(weights, perm)
    dx, dw_in, dw_out, dscale = rows_backward_launch(
        g, x, w_in, w_out, scale, h, offsets, rows, blocks, order, activation, needs, scatter=False
    )  # fmt: skip
    dx = combine_launch(dx, None, inverse, offsets[-1:]) if needs[0] else dx
    return dx, dw_in, dw_out, slot_values(dscale, inverse, weights) if needs[3] else dscale


def rows_forward_launch(x, w_in, w_out, offsets, rows, blocks, order, activation, keep):
    """The layer on rows x [R, H] in any order: rows[r] is where row r of the expert order stands among them.

    Returns (y [R, H] in the order of x, unweighted; h [R, 2I] in expert order, or [0, 2I] unless `keep`). Neither side
    is permuted in memory: the up-product gathers its operand, the down-product scatters its result.
    """
    h, a = glu_launch(x, w_in, offsets, blocks, rows, activation, keep)
    return rows_launch(a, w_out, offsets, blocks, target=rows), h


def rows_backward_launch(
    g, x, w_in, w_out, scale, h, offsets, rows, blocks, order, activation, needs, scatter=True
):  # fmt: skip
    """Gradients of (x, w_in, w_out, scale), empty where not needed, where row r of the layer is scale[r]·y[r].

    g and x hold the rows that `rows` [R] reads, in any order; scale, h and d scale are in expert order. dx comes in
    expert order too, or with `scatter` (rows must then be a permutation) in the order of x.

    Where the table says so, g's rows are copied once for the two products that read them, and x's for one.
    """
    copy, none = copies(g, w_out, rows.shape[0]), x.new_empty(0)
    g, g_index = (gather_launch(g, rows, offsets[-1:]), None) if copy else (g, rows)
    dh, a, dscale = glu_backward_launch(g, w_out, h, scale, offsets, blocks, g_index, activation, tail=False)
    dx = dw_in = dw_out = none
    if needs[2]:
        dw_out = wgrad_launch(a, g, offsets, order, None, g_index)
    del a, g  # a layer's largest temporaries: gone before the next ones are made
    if needs[1]:  # before dx, so that a copy of x's rows and dx are not alive together
        dw_in = wgrad_launch(x, dh, offsets, order, rows, None)
    if needs[0]:
        dx = rows_launch(dh, w_in, offsets, blocks, transposed=True, target=rows if scatter else None, tail=scatter)
    return dx, dw_in, dw_out, dscale if needs[3] else none


def row_weights(weights, perm):
    """Routing weights [T, k] in row order [R], at least fp32."""
    high = weights.to(torch.promote_types(weights.dtype, torch.float32))
    return high.reshape(-1).index_select(0, perm)


def slot_values(values, inverse, like):
    """Row values [R] as [T, k] in the dtype of `like`."""
    return values.index_select(0, inverse.reshape(-1)).reshape(like.shape).to(like.dtype)


def copies(g, w_out, rows: int) -> bool:
    """Whether the table prefers copies of the rows, made once, over gathering them in the weight gradients."""
    experts, inner, width = w_out.shape
    return configure("wgrad_gather", g, width, inner, experts, rows).impl == "copy"


def forward_reference(x, w_in, w_out, weights, offsets, perm, inverse, rows, blocks, order, activation, keep):
    """Plain torch."""
    h, a = glu_reference(x, w_in, offsets, blocks, rows, activation, keep)
    return combine_reference(rows_reference(a, w_out, offsets, blocks), weights, inverse), h


def backward_reference(
    g, x, w_in, w_out, weights, h, offsets, perm, inverse, rows, blocks, order, activation, needs
):  # fmt: skip
    """Plain torch."""
    scale = row_weights(weights, perm)
    dh, a, dscale = glu_backward_reference(g, w_out, h, scale, offsets, blocks, rows, activation)
    by_row = rows_reference(dh, w_in, offsets, blocks, transposed=True)
    grads = (
        combine_reference(by_row, None, inverse),
        wgrad_reference(x, dh, offsets, order, rows, None),
        wgrad_reference(a, g, offsets, order, None, rows),
        slot_values(dscale, inverse, weights),
    )
    return tuple(grad if need else x.new_empty(0) for grad, need in zip(grads, needs, strict=True))


def forward_fake(x, w_in, w_out, weights, offsets, perm, inverse, rows, blocks, order, activation, keep):
    return x.new_empty(x.shape), x.new_empty((rows.shape[0] if keep else 0, w_in.shape[2]))


def backward_fake(g, x, w_in, w_out, weights, h, offsets, perm, inverse, rows, blocks, order, activation, needs):
    pairs = zip((x, w_in, w_out, weights), needs, strict=True)
    return tuple(t.new_empty(t.shape) if need else x.new_empty(0) for t, need in pairs)


ROUTING = "Tensor offsets, Tensor perm, Tensor inverse, Tensor rows, Tensor blocks, Tensor order"
expert_mlp_op = define(
    f"expert_mlp(Tensor x, Tensor w_in, Tensor w_out, Tensor weights, {ROUTING}, str activation, bool keep) "
    "-> (Tensor, Tensor)",
    cpu=forward_reference, cuda=forward_launch, fake=forward_fake,
)  # fmt: skip
expert_mlp_backward_op = define(
    f"expert_mlp_backward(Tensor g, Tensor x, Tensor w_in, Tensor w_out, Tensor weights, Tensor h, {ROUTING}, "
    "str activation, bool[4] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=backward_reference, cuda=backward_launch, fake=backward_fake,
)  # fmt: skip


class ExpertMlp(torch.autograd.Function):
    """(x, w_in, w_out, weights) -> (out, h); h is an output only so that it can be saved."""

    vmap = refuse_vmap("expert_mlp")

    @staticmethod
    def forward(x, w_in, w_out, weights, activation, offsets, perm, inverse, rows, blocks, order):
        # spelled out: torch.compile tells a context argument from the number of parameters
        routing = offsets, perm, inverse, rows, blocks, order
        return expert_mlp_op(x, w_in, w_out, weights, *routing, activation, True)

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
    def forward(g, x, w_in, w_out, weights, h, activation, needs, offsets, perm, inverse, rows, blocks, order):
        routing = offsets, perm, inverse, rows, blocks, order
        grads = expert_mlp_backward_op(g, x, w_in, w_out, weights, h, *routing, activation, needs)
        return tuple(grad for grad, need in zip(grads, needs, strict=True) if need)

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
        return expert_mlp_op(x, w_in, w_out, weights, *routing, activation, False)[0]
    return ExpertMlp.apply(x, w_in, w_out, weights, activation, *routing)[0]
