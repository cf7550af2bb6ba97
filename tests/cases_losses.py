"""Losses, statistics and scans: what is summed or scanned along and across the split rows.

Every function takes ``(z, y)``: z [24, 8] floating rows, y [24] integer rows below 8. See ``conformance_cases.py``.
"""

import warnings

import torch
import torch.nn.functional as F

REDUCTIONS = ("mean", "sum", "none")
SOFT = torch.full((24, 8), 0.3)  # closed-over targets: constants of the program
SIGN = torch.where(torch.arange(24) % 3 == 0, 1.0, -1.0)
WEIGHT = torch.arange(1.0, 9.0) / 8
LEVELS = torch.linspace(-2, 2, 24 * 8).view(24, 8)  # differs from row to row
KEPT = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1] * 3, dtype=torch.bool)
KEPT[:8] = False  # the first rank of three has no label at all


def ignored(y):
    return torch.where(KEPT, y, -100)


def of(z):
    """A target that depends on the rows, but not through the gradient."""
    return torch.sin(z.detach() * 3)


def every(name, f):
    return {f"{name}_{r}": lambda z, y, r=r: f(z, y, r) for r in REDUCTIONS}


def kl_div(p, q, reduction):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that "mean" is no mean over rows
        return F.kl_div(p, q, reduction=reduction)


LOSSES = {
    **every("mse", lambda z, y, r: F.mse_loss(z, of(z), reduction=r)),
    **every("l1", lambda z, y, r: F.l1_loss(z, LEVELS, reduction=r)),
    **every("smooth_l1", lambda z, y, r: F.smooth_l1_loss(z, of(z), beta=0.5, reduction=r)),
    **every("huber", lambda z, y, r: F.huber_loss(z, LEVELS.to(z), delta=0.7, reduction=r)),
    **every("bce", lambda z, y, r: F.binary_cross_entropy(z.sigmoid(), SOFT.to(z), reduction=r)),
    **every("bce_logits", lambda z, y, r: F.binary_cross_entropy_with_logits(z, SOFT, reduction=r)),
    "bce_weight": lambda z, y: F.binary_cross_entropy(z.sigmoid(), SOFT.to(z), weight=WEIGHT.to(z)),
    "bce_logits_weight": lambda z, y: F.binary_cross_entropy_with_logits(z, SOFT, weight=SOFT + 1),
    "bce_logits_pos_weight": lambda z, y: F.binary_cross_entropy_with_logits(z, SOFT, pos_weight=WEIGHT),
    **every("kl", lambda z, y, r: kl_div(F.log_softmax(z, -1), F.softmax(of(z), -1), r)),
    "kl_batchmean": lambda z, y: F.kl_div(F.log_softmax(z, -1), SOFT / 2.4, reduction="batchmean"),
    "kl_log_target": lambda z, y: F.kl_div(F.log_softmax(z, -1), SOFT.log(), reduction="sum", log_target=True),
    **every("nll", lambda z, y, r: F.nll_loss(F.log_softmax(z, -1), y, reduction=r)),
    "nll_ignored": lambda z, y: F.nll_loss(F.log_softmax(z, -1), ignored(y)),
    "nll_weight": lambda z, y: F.nll_loss(F.log_softmax(z, -1), ignored(y), weight=WEIGHT.to(z)),
    "nll_2d": lambda z, y: F.nll_loss(F.log_softmax(z.view(24, 4, 2), 1), (y[:, None] + KEPT[:2]) % 4),
    **every("ce", lambda z, y, r: F.cross_entropy(z, y, reduction=r)),
    **every("ce_ignored", lambda z, y, r: F.cross_entropy(z, ignored(y), reduction=r)),
    "ce_ignore_index": lambda z, y: F.cross_entropy(z, y, ignore_index=3),
    **every("ce_weight", lambda z, y, r: F.cross_entropy(z, ignored(y), weight=WEIGHT.to(z), reduction=r)),
    **every("ce_smooth", lambda z, y, r: F.cross_entropy(z, ignored(y), label_smoothing=0.1, reduction=r)),
    "ce_weight_smooth": lambda z, y: F.cross_entropy(z, ignored(y), weight=WEIGHT.to(z), label_smoothing=0.1),
    **every("ce_probabilities", lambda z, y, r: F.cross_entropy(z, torch.softmax(z.flip(1), -1), reduction=r)),
    "ce_probabilities_weight": lambda z, y: F.cross_entropy(z, SOFT / 2.4, weight=WEIGHT.to(z), label_smoothing=0.1),
    "ce_2d": lambda z, y: F.cross_entropy(z.view(24, 4, 2), (y[:, None] + KEPT[:2]) % 4),
    "ce_2d_none": lambda z, y: F.cross_entropy(z.view(24, 4, 2), (y[:, None] + KEPT[:2]) % 4, reduction="none"),
    "ce_one_row": lambda z, y: torch.func.vmap(F.cross_entropy)(z, y),
    **every("soft_margin", lambda z, y, r: F.soft_margin_loss(z, SIGN[:, None].expand(24, 8), reduction=r)),
    **every("hinge_embedding", lambda z, y, r: F.hinge_embedding_loss(z[:, 0], SIGN, reduction=r)),
    **every("margin_ranking", lambda z, y, r: F.margin_ranking_loss(z[:, 0], z[:, 1], SIGN, 0.2, reduction=r)),
    **every("cosine_embedding", lambda z, y, r: F.cosine_embedding_loss(z, z.flip(1), SIGN, 0.1, reduction=r)),
    **every("multi_margin", lambda z, y, r: F.multi_margin_loss(z, y, reduction=r)),
    "multi_margin_weight": lambda z, y: F.multi_margin_loss(z, y, p=2, weight=WEIGHT.to(z)),
    "multilabel_margin": lambda z, y: F.multilabel_margin_loss(z, torch.stack([y] + [y * 0 - 1] * 7, 1)),
    **every("multilabel_soft_margin", lambda z, y, r: F.multilabel_soft_margin_loss(z, (SOFT > z).to(z), reduction=r)),
    **every("triplet", lambda z, y, r: F.triplet_margin_loss(z, z.flip(1), z.roll(1, 1), reduction=r)),
    "triplet_swap": lambda z, y: F.triplet_margin_loss(z, z.flip(1), z.roll(1, 1), p=3, swap=True),
    "triplet_distance": lambda z, y: F.triplet_margin_with_distance_loss(z, z.flip(1), z.roll(1, 1)),
    **every("poisson_nll", lambda z, y, r: F.poisson_nll_loss(z, SOFT * 4, full=True, reduction=r)),
    **every("gaussian_nll", lambda z, y, r: F.gaussian_nll_loss(z, LEVELS, z.flip(1).square() + 0.1, reduction=r)),
    "ctc": lambda z, y: F.ctc_loss(
        z.view(24, 4, 2).transpose(0, 1).log_softmax(-1), (y[:, None] * 0 + 1), (4,) * 24, (1,) * 24, reduction="sum"
    ),
    "pairwise_distance": lambda z, y: F.pairwise_distance(z, z.flip(1), p=1.5),
    "cosine_similarity": lambda z, y: F.cosine_similarity(z, z.flip(1), dim=-1),
    "cosine_similarity_rows": lambda z, y: F.cosine_similarity(z, z.flip(1), dim=0),
    "contrastive": lambda z, y: F.cross_entropy(z @ z.T * 0.1, torch.arange(24)),
    "contrastive_normalised": lambda z, y: (F.normalize(z, dim=1) @ F.normalize(z.flip(1), dim=1).T).exp().mean(),
    "focal": lambda z, y: ((1 - z.sigmoid()).square() * F.softplus(-z)).mean(),
    "accuracy": lambda z, y: (z.argmax(-1) == y).float().mean() + z.mean(),
    "perplexity": lambda z, y: F.cross_entropy(z, y).exp(),
    "z_loss": lambda z, y: torch.logsumexp(z, -1).square().mean(),
}


def where(name, f, dims=(("features", -1), ("rows", 0))):
    return {f"{name}_{at}": lambda z, y, d=d: f(z, d) for at, d in dims}


ALL = (("features", -1), ("rows", 0), ("both", (0, 1)))

STATISTICS = {
    **where("sum", lambda z, d: z.sin().sum(d), ALL),
    **where("mean", lambda z, d: z.mean(d, keepdim=True), ALL),
    **where("var", lambda z, d: z.var(d), ALL),
    **where("std", lambda z, d: z.std(d, correction=0), ALL),
    **where("var_mean", lambda z, d: torch.stack(torch.var_mean(z, d)), ALL),
    **where("std_mean", lambda z, d: torch.stack(torch.std_mean(z, d)), ALL),
    **where("logsumexp", lambda z, d: torch.logsumexp(z, d), ALL),
    **where("amax", lambda z, d: z.amax(d), ALL),
    **where("amin", lambda z, d: z.amin(d, keepdim=True), ALL),
    **where("norm", lambda z, d: z.norm(dim=d), ALL),
    **where("norm_1", lambda z, d: torch.linalg.vector_norm(z, 1, dim=d), ALL),
    **where("norm_inf", lambda z, d: torch.linalg.vector_norm(z, torch.inf, dim=d), ALL),
    **where("norm_0", lambda z, d: torch.linalg.vector_norm(z, 0, dim=d) + z.sum(d)),
    **where("nansum", lambda z, d: z.nansum(d)),
    **where("nanmean", lambda z, d: torch.where(z > 2, torch.nan, z).nanmean(d)),
    **where("prod", lambda z, d: (z * 0.1 + 1).prod(d)),
    **where("any", lambda z, d: (z > 1.5).any(d).to(z) * z.sum(d)),
    **where("all", lambda z, d: (z > -1.5).all(d).to(z) * z.sum(d)),
    **where("count_nonzero", lambda z, d: z.relu().count_nonzero(d) * z.sum(d)),
    **where("max", lambda z, d: z.max(d).values),
    **where("min", lambda z, d: z.min(d).values),
    **where("aminmax", lambda z, d: torch.stack(torch.aminmax(z, dim=d))),
    **where("argmax", lambda z, d: z * z.argmax(d, keepdim=True)),
    **where("argmin", lambda z, d: z * z.argmin(d, keepdim=True)),
    **where("median", lambda z, d: z.median(d).values),
    **where("mode", lambda z, d: (z * 0.1).round().mode(d).values + z.sum(d)),
    **where("quantile", lambda z, d: z.float().quantile(0.3, d)),
    **where("kthvalue", lambda z, d: z.kthvalue(2, d).values),
    **where("cumsum", lambda z, d: z.cumsum(d)),
    **where("cumprod", lambda z, d: (z * 0.1 + 1).cumprod(d)),
    **where("cummax", lambda z, d: z.cummax(d).values),
    **where("cummin", lambda z, d: z.cummin(d).values),
    **where("logcumsumexp", lambda z, d: z.logcumsumexp(d)),
    **where("diff", lambda z, d: z.diff(dim=d)),
    **where("trapezoid", lambda z, d: torch.trapezoid(z, dim=d)),
    **where("softmax", lambda z, d: torch.softmax(z, d)),
    **where("log_softmax", lambda z, d: F.log_softmax(z, d)),
    **where("softmin", lambda z, d: F.softmin(z, d)),
    **where("normalize", lambda z, d: F.normalize(z, dim=d)),
    **where("standardise", lambda z, d: (z - z.mean(d, keepdim=True)) / z.std(d, keepdim=True)),
    **where("renorm", lambda z, d: z.renorm(2, d, 1.0)),
    **where("gradient", lambda z, d: torch.gradient(z, dim=d)[0]),
    "sum_all": lambda z, y: z.square().sum(),
    "mean_all": lambda z, y: z.sin().mean(),
    "var_all": lambda z, y: z.var(),
    "max_all": lambda z, y: z.max() * z,
    "min_all": lambda z, y: z.min() * z,
    "prod_all": lambda z, y: (z * 0.01 + 1).prod(),
    "norm_all": lambda z, y: z.norm(),
    "median_all": lambda z, y: z.median() * z,
    "argmax_all": lambda z, y: z.argmax() * z,
    "any_all": lambda z, y: (z > 5).any() * z,
    "mean_dtype": lambda z, y: z.mean(0, dtype=torch.float64).to(z),
    "dist": lambda z, y: torch.dist(z, z.flip(1)),
    "cov": lambda z, y: torch.cov(z.T),
    "cov_of_rows": lambda z, y: torch.cov(z)[:, :3],
    "corrcoef": lambda z, y: torch.corrcoef(z.T),
    "histc": lambda z, y: torch.histc(z.detach(), 8, -2, 2) + z.sum(0),
    "cumulative_trapezoid": lambda z, y: torch.cumulative_trapezoid(z, dim=-1),
    "normalised_by_all": lambda z, y: z / z.square().sum().sqrt(),
    "batch_statistics": lambda z, y: (z - z.mean(0)) * torch.rsqrt(z.var(0, correction=0) + 1),
    "weighted_mean": lambda z, y: (z * KEPT[:, None]).sum(0) / KEPT.sum(),
    "running_mean": lambda z, y: z.cumsum(1) / torch.arange(1, 9),
    "bincount": lambda z, y: torch.bincount(y, minlength=8) * z,
    "unique": lambda z, y: torch.unique(y).sum() * z,
}
