"""AdamW on one tensor: p, g, m, v are read once, p, m and v written once (28 bytes an element in float32).

Loshchilov & Hutter, "Decoupled weight decay regularization", 2019. The rate, the bias corrections and the factor of the
gradient are read from device memory, so that a step needs no host and a captured graph may be replayed.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def adamw_kernel(
    p, g, m, v, minus_lr, correct1, correct2, scale, numel,
    b1: tl.constexpr, b2: tl.constexpr, eps: tl.constexpr, decay: tl.constexpr,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK consecutive elements; all arithmetic in float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    grad = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        grad = grad * tl.load(scale).to(tl.float32)
    first = tl.load(m + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(v + at, mask=mask, other=0.0).to(tl.float32)
    param = tl.load(p + at, mask=mask, other=0.0).to(tl.float32)
    first = b1 * first + (1.0 - b1) * grad
    second = b2 * second + (1.0 - b2) * grad * grad
    direction = (first / tl.load(correct1)) / (tl.sqrt(second / tl.load(correct2)) + eps)
    direction += decay * param
    param += tl.load(minus_lr) * direction
    tl.store(m + at, first.to(m.dtype.element_ty), mask=mask)
    tl.store(v + at, second.to(v.dtype.element_ty), mask=mask)
    tl.store(p + at, param.to(p.dtype.element_ty), mask=mask)


def serves(*tensors: torch.Tensor) -> bool:
    """Contiguous leaves of equal size, none in float64."""
    sizes = {x.numel() for x in tensors}
    return len(sizes) == 1 and all(x.is_contiguous() and x.dtype != torch.float64 for x in tensors)


def adamw_launch(p, g, m, v, scalars, scale, b1, b2, eps, decay):
    """In place on p, m, v. ``scalars``: (-rate, 1 - b1^t, 1 - b2^t), 0-d float32; ``scale``: 0-d or None."""
    assert serves(p, g, m, v), "leaves must be contiguous and of one size"
    if p.numel() == 0:
        return
    minus_lr, correct1, correct2 = scalars
    adamw_kernel[(triton.cdiv(p.numel(), BLOCK),)](
        p, g, m, v, minus_lr, correct1, correct2, minus_lr if scale is None else scale, p.numel(),
        b1=b1, b2=b2, eps=eps, decay=decay, SCALED=scale is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
