"""Rows of logits: their log-sum-exp and loss in one read, their gradient in one read and one write.

Legend: T rows, V classes (read in blocks, any V). All arithmetic in float32.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def row_loss_kernel(z, labels, loss, lse, V, stride, IGNORE: tl.constexpr, BLOCK: tl.constexpr):
    """One row: a running maximum and a running sum (Milakov & Gimelshein, 2018)."""
    row = tl.program_id(0).to(tl.int64)
    start = z + row * stride
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, V, BLOCK):
        cols = at + tl.arange(0, BLOCK)
        x = tl.load(start + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, x)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.exp(x - safe)
        top = new
    most = tl.max(top, 0)
    total = tl.sum(tl.where(top == float("-inf"), 0.0, total * tl.exp(top - most)), 0)
    value = most + tl.log(total)
    label = tl.load(labels + row)
    counts = label != IGNORE
    picked = tl.load(start + tl.where(counts, label, 0)).to(tl.float32)
    tl.store(lse + row, value)
    tl.store(loss + row, tl.where(counts, value - picked, 0.0))


@triton.jit
def row_gradient_kernel(z, g, labels, lse, out, V, stride, out_stride, IGNORE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row: (softmax - onehot) · g."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    scale = tl.where(label != IGNORE, tl.load(g + row).to(tl.float32), 0.0)
    x = tl.load(z + row * stride + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.load(lse + row)) - tl.where(cols == label, 1.0, 0.0)
    tl.store(out + row * out_stride + cols, (p * scale).to(out.dtype.element_ty), mask=cols < V)


def rows_of(z: torch.Tensor) -> torch.Tensor:
    """z with rows of stride 1."""
    return z if z.stride(-1) == 1 else z.contiguous()


def row_loss_launch(z: torch.Tensor, labels: torch.Tensor, ignore: int) -> tuple[torch.Tensor, torch.Tensor]:
    """z [T, V] with rows of stride 1, labels [T] -> loss and log-sum-exp, float32 [T]. Labels must be below V."""
    z, labels = rows_of(z), labels.contiguous()
    loss, lse = (torch.empty(z.shape[0], dtype=torch.float32, device=z.device) for _ in range(2))
    if z.shape[0]:
        block = min(BLOCK, triton.next_power_of_2(z.shape[1]))
        row_loss_kernel[(z.shape[0],)](
            z, labels, loss, lse, z.shape[1], z.stride(0), IGNORE=ignore, BLOCK=block, num_warps=8
        )
    return loss, lse


def row_gradient_launch(z, g, labels, lse, ignore: int, out: torch.Tensor) -> torch.Tensor:
    """dz [T, V] of the loss with cotangent g [T], written to ``out``, which may be z itself.

    g may be one number that is expanded to all rows: the kernel reads an element a row, so it is laid out first.
    """
    assert out.stride(-1) == 1 and out.shape == z.shape
    z, g, labels, lse = rows_of(z), g.contiguous(), labels.contiguous(), lse.contiguous()
    if z.shape[0]:
        block = min(BLOCK, triton.next_power_of_2(z.shape[1]))
        grid = (z.shape[0], triton.cdiv(z.shape[1], block))
        row_gradient_kernel[grid](
            z, g, labels, lse, out, z.shape[1], z.stride(0), out.stride(0), IGNORE=ignore, BLOCK=block, num_warps=8
        )
    return out
