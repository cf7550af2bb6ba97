"""Cross-entropy of a linear head, in chunks of rows: the logits of the whole batch never exist in float32.

Legend: T rows, D features, V classes. Per row: loss = logsumexp(x @ head) - (x @ head)[label]; a row whose label is
``ignore_index`` has loss 0 and no gradient. The backward pass recomputes a chunk's logits, or reads those that the
forward pass kept in the dtype of ``x``.
"""

from __future__ import annotations

import torch

from fsharding import oplib
from fsharding.errors import ShardingError
from fsharding.moe import fast
from fsharding.oplib import wide_dtype
from fsharding.program.labels import label_rule

ELEMENTS = 2**28  # of one chunk's logits
KEPT = 2**31  # of one chunk's gradient where all logits are kept anyway; as far as 32-bit offsets reach


def _chunks(rows: int, classes: int, kept: bool = False):
    """Equal parts of the rows."""
    count = -(-rows * classes // (KEPT if kept else ELEMENTS))
    step = max(1, -(-rows // max(count, 1)))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def _loss(x, head, labels, ignore, keep):
    rows, classes = x.shape[0], head.shape[1]
    loss, lse = (x.new_empty(rows, dtype=wide_dtype(x.dtype)) for _ in range(2))
    logits = x.new_empty(rows if keep else 0, classes)
    for part in _chunks(rows, classes):
        z = torch.mm(x[part], head, out=logits[part]) if keep else x[part] @ head
        loss[part], lse[part] = _row_loss(z, labels[part], ignore)
    return loss, lse, logits


def _row_loss(z, labels, ignore):
    if z.is_cuda and z.dtype != torch.float64 and fast.present():
        return fast.kernel("cross_entropy", "row_loss_launch")(z, labels, ignore)
    z = z.to(wide_dtype(z.dtype))
    lse = torch.logsumexp(z, 1)
    valid = labels != ignore
    picked = z.gather(1, torch.where(valid, labels, 0)[:, None]).squeeze(1)
    return torch.where(valid, lse - picked, 0.0), lse


def _gradients(g, x, head, labels, lse, logits, ignore):
    """dx [T, D] and dhead [D, V]; sums over chunks in the wide dtype."""
    chunks = _chunks(x.shape[0], head.shape[1], bool(logits.shape[0]))
    dx, dhead = torch.empty_like(x), None
    for part in chunks:
        z = logits[part] if logits.shape[0] else x[part] @ head
        dz = _row_gradient(z, g[part], labels[part], lse[part], ignore, fresh=not logits.shape[0])
        torch.mm(dz, head.T, out=dx[part])
        if len(chunks) == 1:
            return dx, x.T @ dz
        dhead = _add_product(dhead, x[part].T, dz)
    return dx, torch.zeros_like(head) if dhead is None else dhead.to(head.dtype)


def _row_gradient(z, g, labels, lse, ignore, fresh):
    """(softmax(z) - onehot(label)) · g in the dtype of z; ``fresh`` logits are overwritten."""
    if z.is_cuda and z.dtype != torch.float64 and fast.present():
        launch = fast.kernel("cross_entropy", "row_gradient_launch")
        return launch(z, g, labels, lse, ignore, out=z if fresh else torch.empty_like(z))
    valid = labels != ignore
    scale = torch.where(valid, g, 0.0).to(wide_dtype(z.dtype))[:, None]
    dz = torch.exp(z.to(wide_dtype(z.dtype)) - lse[:, None]) * scale
    dz.scatter_add_(1, torch.where(valid, labels, 0)[:, None], -scale)
    return dz.to(z.dtype)


def _add_product(total, a, b):
    wide = wide_dtype(a.dtype)
    if a.is_cuda and a.dtype != wide:
        if total is None:
            return torch.mm(a, b, out_dtype=wide)
        return torch.ops.aten.addmm.dtype_out(total, a, b, wide, out=total)  # in place: else the sum is copied first
    return a.to(wide) @ b.to(wide) if total is None else total.addmm_(a.to(wide), b.to(wide))


loss_raw = oplib.raw_op(
    "linear_cross_entropy(Tensor x, Tensor head, Tensor labels, int ignore, bool keep) -> (Tensor, Tensor, Tensor)",
    _loss,
    lambda x, head, labels, ignore, keep: (
        x.new_empty(x.shape[0], dtype=wide_dtype(x.dtype)),
        x.new_empty(x.shape[0], dtype=wide_dtype(x.dtype)),
        x.new_empty(x.shape[0] if keep else 0, head.shape[1]),
    ),
)
gradients_raw = oplib.raw_op(
    "linear_cross_entropy_backward(Tensor g, Tensor x, Tensor head, Tensor labels, Tensor lse, Tensor logits, "
    "int ignore) -> (Tensor, Tensor)",
    _gradients,
    lambda g, x, head, labels, lse, logits, ignore: (torch.empty_like(x), torch.empty_like(head)),
)


def _kept(x, head, labels, ignore, keep):
    return "t [d], [d] [v], t -> t, t, t [v]" if keep else "t [d], [d] [v], t -> t, t, [z] [v]"


def _kept_backward(g, x, head, labels, lse, logits, ignore):
    last = "t [v]" if logits.shape[0] == x.shape[0] else "[z] [v]"
    return f"t, t [d], [d] [v], t, t, {last} -> t [d], [d] [v]"


def _product(x, head) -> int:
    return 2 * x.shape[0] * head.shape[0] * head.shape[1]


def _bytes(x, head, kept: bool, summed: bool) -> int:
    """One chunk's logits or their gradient; if ``summed``, also the head's in the wide dtype, to which chunks add."""
    parts = _chunks(x.shape[0], head.shape[1], kept)
    chunk = parts[0].stop * head.shape[1] * x.itemsize if parts else 0
    return chunk + (head.numel() * wide_dtype(head.dtype).itemsize if summed and len(parts) > 1 else 0)


FLOPS = {
    loss_raw: lambda x, head, *rest: _product(x, head),
    gradients_raw: lambda g, x, head, labels, lse, logits, *rest: _product(x, head) * (2 if logits.shape[0] else 3),
}
WORKSPACE = {
    loss_raw: lambda x, head, labels, ignore, keep: 0 if keep else _bytes(x, head, False, False),
    gradients_raw: lambda g, x, head, labels, lse, logits, *rest: _bytes(x, head, bool(logits.shape[0]), True),
}

RULES = {loss_raw: label_rule(_kept), gradients_raw: label_rule(_kept_backward)}


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(x, head, labels, ignore, keep):
        return loss_raw(x, head, labels, ignore, keep)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, head, labels, ctx.ignore, _ = inputs
        _, lse, logits = output
        ctx.mark_non_differentiable(lse, logits)
        ctx.save_for_backward(x, head, labels, lse, logits)

    @staticmethod
    def backward(ctx, g, _lse, _logits):
        x, head, labels, lse, logits = ctx.saved_tensors
        dx, dhead = _Gradients.apply(g, x, head, labels, lse, logits, ctx.ignore)
        return dx, dhead, None, None, None

    @staticmethod
    def vmap(info, in_dims, x, head, labels, ignore, keep):
        raise ShardingError(
            "`fs.nn.cross_entropy` has no vmap rule: its rows are a batch already. Use `F.cross_entropy`."
        )

    @staticmethod
    def jvp(ctx, *tangents):
        raise ShardingError("`fs.nn.cross_entropy` has no forward mode. Use `F.cross_entropy` under `jvp`.")


class _Gradients(torch.autograd.Function):
    """The gradient itself: differentiating it again is refused, not wrong."""

    @staticmethod
    def forward(g, x, head, labels, lse, logits, ignore):
        return gradients_raw(g, x, head, labels, lse, logits, ignore)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise ShardingError("`fs.nn.cross_entropy` has no second derivative. Use `F.cross_entropy` for it.")

    vmap = _LinearCrossEntropy.vmap


def cross_entropy(
    x: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    keep_logits: bool = False,
) -> torch.Tensor:
    """``F.cross_entropy(x @ head, labels)`` without logits of the whole batch in float32.

    Args:
        x: features, floating [..., D].
        head: [D, V] in the dtype of ``x``.
        labels: integers [...]; rows with ``ignore_index`` do not count.
        reduction: "mean" over the rows that count, "sum", or "none" (loss of each row, 0 where ignored).
        keep_logits: keep the logits, in the dtype of ``x``, for the backward pass: a quarter less work for V · 2 bytes
            a row in bfloat16. Otherwise they are computed again, chunk by chunk.

    Returns: float32 (float64 for float64), 0-d or of the labels' shape. A mean over no row is NaN, as in PyTorch.

    Raises:
        ShardingError: shapes or dtypes that do not fit; an unknown reduction; a second derivative, ``vmap`` or ``jvp``.
    """
    if x.ndim < 1 or head.ndim != 2 or x.shape[-1] != head.shape[0] or x.dtype != head.dtype:
        raise ShardingError(
            f"`fs.nn.cross_entropy` takes x [..., D] and head [D, V] of one dtype, got {x.dtype} {tuple(x.shape)} and "
            f"{head.dtype} {tuple(head.shape)}."
        )
    if labels.shape != x.shape[:-1] or labels.is_floating_point():
        raise ShardingError(
            f"`fs.nn.cross_entropy` takes one integer label a row: labels {tuple(x.shape[:-1])}, got {labels.dtype} "
            f"{tuple(labels.shape)}."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ShardingError(f"unknown reduction {reduction!r}: one of 'mean', 'sum', 'none'.")
    x, head, labels = oplib.operands(x, head, labels)
    flat = labels.reshape(-1)
    loss = _LinearCrossEntropy.apply(x.reshape(-1, x.shape[-1]), head, flat, ignore_index, keep_logits)[0]
    if reduction == "none":
        return loss.reshape(labels.shape)
    return loss.sum() / (flat != ignore_index).sum() if reduction == "mean" else loss.sum()
