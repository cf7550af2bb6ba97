"""The conformance table: functions that must equal one device on every layout, and how each of them gets there.

A case is a function of ``w``, a stored parameter, ``x``, 24 floating rows, and ``y``, 24 integer rows below 8. The
functions stand in ``cases_*.py``, by what they are given (``KINDS``). Each is expected to be partitioned by rules
alone where the batch is split over data axes, but for those in ``FALLBACK`` (right, recorded, warned about, an error
under ``strict``) and ``REFUSED`` (an error that names the op and the line).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cases_algebra as algebra
import cases_indexing as indexing
import cases_losses as losses
import cases_nn as nn
import torch

ROWS = 24
KINDS = {  # what a case takes, the sizes of w and x, the dim of w that a model axis cuts
    "product": (lambda f: lambda w, x, y: f(x @ w, y), (6, 8), (ROWS, 6), 1),
    "parameter": (lambda f: f, (6, 8), (ROWS, 6), 1),
    "matrices": (lambda f: lambda w, x, y: f(x, w, y), (4, 4), (ROWS, 4, 4), 1),
    "images": (lambda f: lambda w, x, y: f(x, w, y), (4, 4, 3, 3), (ROWS, 4, 6, 6), 0),
    "sequences": (lambda f: lambda w, x, y: f(x, w, y), (8, 24), (ROWS, 5, 8), 1),
}
GROUPS = {
    "losses": ("product", losses.LOSSES),
    "statistics": ("product", losses.STATISTICS),
    "indexing": ("product", indexing.INDEXING),
    "shapes": ("product", indexing.SHAPES),
    "order": ("product", indexing.ORDERED),
    "in place": ("product", indexing.IN_PLACE),
    "products": ("parameter", algebra.PRODUCTS),
    "elementwise": ("parameter", algebra.POINTWISE),
    "transforms": ("parameter", algebra.TRANSFORMS),
    "linear algebra": ("matrices", algebra.ALGEBRA),
    "images": ("images", nn.IMAGES),
    "sequences": ("sequences", nn.SEQUENCES),
}
# Right, but every rank gathers an operand: the rows meet each other, move along their dim, or are counted one by one.
FALLBACK = set(
    """
    contrastive contrastive_normalised prod_rows median_rows mode_rows quantile_rows kthvalue_rows cumsum_rows
    cumprod_rows cummax_rows cummin_rows logcumsumexp_rows diff_rows trapezoid_rows softmax_rows
    log_softmax_rows softmin_rows gradient_rows prod_all median_all argmax_all cov_of_rows histc
    index_rows index_rows_by_rows index_select_rows gather_rows take take_along_rows embedding_of_rows
    embedding_bag masked_scatter index_copy_rows index_fill_rows index_put_rows index_reduce put scatter_rows
    scatter_reduce_rows select_row slice_rows slice_last_rows stride_rows shifted_rows narrow_rows diagonal diag
    slice_scatter_rows unravel_index
    flat_transposed odd_reshape cat_rows vstack chunk_rows split_rows flip_rows
    roll_rows roll_flat repeat_rows unfold_rows pad_rows block_diag view_dtype
    sort_rows argsort_rows topk_rows rank_rows compare_rows equal_rows dedupe
    assign_row assign_rows assign_strided_rows assign_corner foreach
    matmul_rows_of_rows outer_of_rows gram_of_rows cdist_of_rows pdist einsum_gram_of_rows frexp fft_rows
    conv2d_of_rows_as_channels conv_tbc max_unpool2d attention_across_rows multi_head_attention
    """.split()
)
# By rule where the axes divide the dims into which the rows are reshaped, else a fallback.
SOMETIMES = {"split_rows_outer", "split_rows_dim", "einops_micro", "einsum_ellipsis", "unbind_rows"}
_SIZE = "the size of the result depends on the data"
REFUSED = {  # (why, the way out)
    "bincount": (_SIZE, "`F.one_hot(y, classes).sum(0)`"),
    "unique": (_SIZE, "`F.one_hot(y, classes).any(0)`, or before the call"),
    "masked_select": (_SIZE, "`torch.where(mask, x, 0)`"),
    "nonzero": (_SIZE, "`torch.where`, or `x.topk(k)` of a fixed number"),
    "combinations": (_SIZE, "`x[i], x[j]` with the index pairs made before the call"),
    "lstsq": (_SIZE, "`torch.linalg.solve(a.mT @ a, a.mT @ b)`, or `torch.linalg.qr`"),
    "ctc": ("its lengths are read on the host", "compute the loss on unsharded log-probabilities, outside"),
    "fake_quantize": (
        "PyTorch cannot tell the shape of its result",
        "`x + (torch.round(x / s).clamp(a, b) * s - x).detach()`",
    ),
    "dropout2d": ("torch's generator draws other numbers on other meshes", "`fs.random.dropout`"),
    "attention_dropout": (
        "torch's generator draws other numbers on other meshes",
        "write it out with `fs.random.dropout`",
    ),
    "gumbel": ("torch's generator draws other numbers on other meshes", "`fs.random.uniform`"),
}
ROUGH_IN_BF16 = {  # one device's own bf16 result says little: compared in fp32 only
    **dict.fromkeys("max_pool1d max_pool2d_overlapping adaptive_max_pool1d".split(), "near ties"),
    **dict.fromkeys("grad grad_and_value hessian_of_bias cholesky_inverse det cond".split(), "cancellation"),
    **dict.fromkeys(
        "grid_sample_of_rows total_variation torch_digamma nanmean_rows".split(), "steep, or next to a step"
    ),
    "matrix_exp": "PyTorch's bf16 kernel is off",
}

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
MISSING: set[str] = set()  # what this version of PyTorch cannot do on one device
if VERSION < (2, 13):
    MISSING |= {"aminmax_features", "aminmax_rows"}  # no derivative
if VERSION >= (2, 14):
    del REFUSED["combinations"]
    FALLBACK.add("combinations")


@dataclass(frozen=True)
class Case:
    """``run(w, x, y)``, its kind (see ``KINDS``) and what is expected: "rule", "fallback", "either" or "refused"."""

    name: str
    group: str
    kind: str
    run: Callable
    expected: str

    def inputs(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same numbers in every dtype: all of them are exact in bfloat16."""
        _, w, x, _ = KINDS[self.kind]
        g = torch.Generator().manual_seed(1)
        w, x = (torch.randn(*n, generator=g).bfloat16().to(dtype) for n in (w, x))
        return w, x, (torch.arange(ROWS) * 5 + 3) % 8


def _expected(name: str) -> str:
    sets = {"refused": REFUSED, "fallback": FALLBACK, "either": SOMETIMES}
    return next((kind for kind, names in sets.items() if name in names), "rule")


CASES: dict[str, Case] = {}
for _group, (_kind, _functions) in GROUPS.items():
    for _name, _f in _functions.items():
        assert _name not in CASES, f"two cases are called {_name}"
        if _name not in MISSING:
            CASES[_name] = Case(_name, _group, _kind, KINDS[_kind][0](_f), _expected(_name))
