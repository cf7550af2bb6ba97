"""Ops under partition: each of these functions is right on every split, by a rule or by fallback. Never another number.

``f(w, x, y)``: w [6, 8] a stored parameter, x [8, 6] and y [8] rows. The value and the gradients of ``sum(f² · c)`` for
all of w and x are compared with one device.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from programs import TOLERANCE, simulate, worst

import fsharding as fs
from fsharding import P

L = (torch.arange(8) * 5) % 6  # labels
M = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1], dtype=torch.bool)


def ignored(y):
    return torch.where(M, y, -100)


RIGHT = {
    # losses: every reduction, weights, ignored labels, smoothing
    **{f"mse_{r}": lambda w, x, y, r=r: F.mse_loss(x @ w, x @ w.flip(1), reduction=r) for r in ("mean", "sum", "none")},
    **{
        f"smooth_l1_{r}": lambda w, x, y, r=r: F.smooth_l1_loss(x @ w, torch.ones(8, 8), reduction=r)
        for r in ("mean", "sum")
    },
    "huber": lambda w, x, y: F.huber_loss(x @ w, torch.zeros(8, 8)),
    "l1": lambda w, x, y: F.l1_loss(x @ w, torch.zeros(8, 8)),
    "bce_logits": lambda w, x, y: F.binary_cross_entropy_with_logits(x @ w, torch.full((8, 8), 0.3)),
    "kl": lambda w, x, y: F.kl_div(F.log_softmax(x @ w, -1), torch.full((8, 8), 0.125), reduction="batchmean"),
    **{f"ce_{r}": lambda w, x, y, r=r: F.cross_entropy(x @ w, y, reduction=r) for r in ("mean", "sum", "none")},
    **{
        f"ce_ignored_{r}": lambda w, x, y, r=r: F.cross_entropy(x @ w, ignored(y), reduction=r)
        for r in ("mean", "sum", "none")
    },
    "ce_weight": lambda w, x, y: F.cross_entropy(x @ w, ignored(y), weight=torch.arange(1.0, 9.0)),
    "ce_smooth": lambda w, x, y: F.cross_entropy(x @ w, ignored(y), label_smoothing=0.1),
    "ce_weight_smooth": lambda w, x, y: F.cross_entropy(x @ w, y, weight=torch.arange(1.0, 9.0), label_smoothing=0.1),
    "ce_probabilities": lambda w, x, y: F.cross_entropy(x @ w, torch.softmax(x @ w.flip(0), -1)),
    "nll": lambda w, x, y: F.nll_loss(F.log_softmax(x @ w, -1), ignored(y)),
    # statistics along and across the split dim
    "mean_all": lambda w, x, y: (x @ w).mean(),
    "mean_rows": lambda w, x, y: (x @ w).mean(0),
    "mean_features": lambda w, x, y: (x @ w).mean(-1, keepdim=True),
    "sum_rows": lambda w, x, y: (x @ w).sum(0, keepdim=True) * 2,
    "norm_all": lambda w, x, y: (x @ w).norm(),
    "norm_rows": lambda w, x, y: torch.linalg.vector_norm(x @ w, dim=0),
    "norm_features": lambda w, x, y: torch.linalg.vector_norm(x @ w, dim=1),
    "var_by_hand": lambda w, x, y: ((x @ w) - (x @ w).mean(0)).square().mean(0),
    "amax_rows": lambda w, x, y: (x @ w).detach().amax(0) + (x @ w).sum(0),
    "any_rows": lambda w, x, y: ((x @ w) > 1).any(0).float() + (x @ w).sum(0),
    "logsumexp": lambda w, x, y: torch.logsumexp(x @ w, -1),
    "normalised": lambda w, x, y: (x @ w) / (x @ w).sum(),
    "batch_statistics": lambda w, x, y: ((x @ w) - (x @ w).mean(0)) * torch.rsqrt((x @ w).square().mean(0) + 1),
    # indexing, slicing, reshapes
    "embedding": lambda w, x, y: F.embedding(y % 6, w) * 2,
    "index": lambda w, x, y: w[y % 6] + 1,
    "index_columns": lambda w, x, y: (x @ w)[:, torch.tensor([3, 3, 0])],
    "gather": lambda w, x, y: (x @ w).gather(1, y[:, None]),
    "take_along": lambda w, x, y: torch.take_along_dim(x @ w, y[:, None], 1),
    "one_hot": lambda w, x, y: F.one_hot(y, 8) * (x @ w),
    "slice_features": lambda w, x, y: (x @ w)[:, 2:7:2],
    "chunk": lambda w, x, y: torch.mul(*(x @ w).chunk(2, -1)),
    "split_weight": lambda w, x, y: sum(x @ part for part in w.split([2, 2, 4], 1)[:2]),
    "reshape_heads": lambda w, x, y: (x @ w).view(8, 2, 4).transpose(1, 2).reshape(8, 8),
    "flatten_rows": lambda w, x, y: (x @ w).view(8, 2, 4).reshape(16, 4).view(8, 8),
    "transposed_weight": lambda w, x, y: x @ w @ w.T,
    "stack": lambda w, x, y: torch.stack([x @ w, (x @ w).sin()], 1).flatten(1),
    "cat": lambda w, x, y: torch.cat([x @ w, x, torch.ones(8, 1)], -1),
    "pad": lambda w, x, y: F.pad(x @ w, (1, 2)),
    "flip": lambda w, x, y: (x @ w).flip(-1),
    "roll": lambda w, x, y: (x @ w).roll(1, -1),
    "where": lambda w, x, y: torch.where(M[:, None], x @ w, torch.zeros(8, 8)),
    "masked_fill": lambda w, x, y: (x @ w).masked_fill(~M[:, None], -1.0),
    "tril": lambda w, x, y: (x @ w).view(8, 2, 4).tril(),
    # order
    "sort": lambda w, x, y: (x @ w).sort(-1).values,
    "topk": lambda w, x, y: (x @ w).topk(3, -1).values,
    "argmax": lambda w, x, y: (x @ w) * (x @ w).argmax(-1, keepdim=True),
    "max_dim": lambda w, x, y: (x @ w).max(-1).values,
    "cumsum": lambda w, x, y: (x @ w).cumsum(-1),
    # products
    "einsum": lambda w, x, y: torch.einsum("bi,ij,kj->bk", x, w, w),
    "bmm": lambda w, x, y: torch.bmm((x @ w).view(8, 2, 4), (x @ w).view(8, 4, 2)),
    "outer": lambda w, x, y: (x @ w)[:, :, None] * x[:, None],
    "gram": lambda w, x, y: x.T @ (x @ w),
    "linear": lambda w, x, y: F.linear(x, w.T, torch.arange(8.0)),
    "linear_bias": lambda w, x, y: F.linear(x, w.T, w.sum(0)),
    "addmm": lambda w, x, y: torch.addmm(w.sum(0), x, w, alpha=0.5, beta=2.0),
    "matvec": lambda w, x, y: x @ w[:, 0],
    "trace_of_products": lambda w, x, y: ((x @ w) * (x @ w)).sum(-1),
    # activations, normalisation
    "silu": lambda w, x, y: F.silu(x @ w),
    "gelu": lambda w, x, y: F.gelu(x @ w),
    "gelu_tanh": lambda w, x, y: F.gelu(x @ w, approximate="tanh"),
    "softplus": lambda w, x, y: F.softplus(x @ w),
    "leaky": lambda w, x, y: F.leaky_relu(x @ w),
    "clamp": lambda w, x, y: (x @ w).clamp(-1, 1),
    "softmax": lambda w, x, y: torch.softmax(x @ w, -1),
    "log_softmax": lambda w, x, y: F.log_softmax(x @ w, -1),
    "layer_norm": lambda w, x, y: F.layer_norm(x @ w, (8,), w[0], w[1]),
    "rms_norm": lambda w, x, y: F.rms_norm(x @ w, (8,), w[0]),
    "normalize": lambda w, x, y: F.normalize(x @ w, dim=-1),
    "cosine": lambda w, x, y: F.cosine_similarity(x @ w, x @ w.flip(1), dim=-1),
    "glu": lambda w, x, y: F.glu(x @ w),
    # in place
    "inplace": lambda w, x, y: (x @ w).mul_(2).add_(1).relu_(),
    "assign": lambda w, x, y: assigned(x @ w),
    # parameters only
    "penalty": lambda w, x, y: (x @ w).sum(0) + 0.1 * w.square().sum(),
    "weight_norm": lambda w, x, y: x @ (w / w.norm(dim=0, keepdim=True)),
    "weight_mean": lambda w, x, y: (x @ w) * w.mean() + w.abs().mean(0),
    "two_uses": lambda w, x, y: torch.tanh(x @ w) @ w.T @ w,
    "cast": lambda w, x, y: (x.double() @ w.double()).float(),
    "constant": lambda w, x, y: x @ w + torch.linspace(0, 1, 8),
    # transforms
    "inner_grad": lambda w, x, y: fs.grad(lambda z: torch.tanh(z @ w).sum())(x),
    "func_grad": lambda w, x, y: torch.func.grad(lambda v: (x @ v).tanh().sum())(w),
    "grad_of_grad": lambda w, x, y: torch.func.grad(
        lambda v: torch.func.grad(lambda u: (x @ u).tanh().sum())(v).square().sum()
    )(w),
    "jvp": lambda w, x, y: torch.func.jvp(lambda v: (x @ v).tanh(), (w,), (torch.ones(6, 8),))[1],
    "vmap_columns": lambda w, x, y: torch.func.vmap(lambda c: torch.tanh(x @ c), in_dims=1, out_dims=1)(w),
    "vmap_of_grad": lambda w, x, y: torch.func.vmap(
        torch.func.grad(lambda c: torch.tanh(x @ c).sum()), in_dims=1, out_dims=1
    )(w),
    "gradient_penalty": lambda w, x, y: fs.grad(lambda u: fs.grad(lambda v: (x @ v).square().mean())(u).square().sum())(
        w
    ),
    "max_all": lambda w, x, y: (x @ w).detach().max() * (x @ w),
    "hessian_vector": lambda w, x, y: torch.func.jvp(
        torch.func.grad(lambda v: (x @ v).tanh().sum()), (w,), (torch.ones(6, 8),)
    )[1],
}


def assigned(z):
    z = z.clone()
    z[:, 1:3] = 0.5
    z[:, 0] = z[:, 4] * 2
    return z


FALLBACK = {
    "sort_rows": lambda w, x, y: (x @ w).sort(0).values,
    "cumsum_rows": lambda w, x, y: (x @ w).cumsum(0),
    "slice_rows": lambda w, x, y: (x @ w)[:4],
    "flip_rows": lambda w, x, y: (x @ w).flip(0),
    "softmax_rows": lambda w, x, y: torch.softmax(x @ w, 0),
    "std_rows": lambda w, x, y: (x @ w).std(0),
    "linalg": lambda w, x, y: torch.linalg.inv(x[:, :, None] * x[:, None] + 9 * torch.eye(6)),
    "conv": lambda w, x, y: F.conv1d((x @ w)[:, None], w[:2, None, :3]),
    "median": lambda w, x, y: (x @ w).median(0).values,
    "odd_reshape": lambda w, x, y: (x @ w).reshape(32, 2)[:30].reshape(4, 15),
    "interleaving": lambda w, x, y: (x @ w).T.reshape(-1),
    "argmax_rows": lambda w, x, y: (x @ w) * (x @ w).argmax(0),
}
MESHES = [
    ({"a": 1}, P("a"), P("a")),
    ({"efsdp": 2}, P("efsdp"), P("efsdp")),
    ({"a": 2, "b": 2}, P(("a", "b")), P("b", "a")),
    ({"a": 4, "b": 2}, P(("b", "a")), P(None, ("a", "b"))),
]


def objective(f):
    def run(w, x, y):
        out = f(w, x, y).double()
        return (out.sin() * 0.3 + out.square() * 0.1).sum()

    return fs.value_and_grad(run, argnums=(0, 1))


def data():
    g = torch.Generator().manual_seed(0)
    return torch.randn(6, 8, generator=g), torch.randn(8, 6, generator=g), L


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_right_on_every_split(name):
    args, f = data(), RIGHT[name]
    want = (f(*args), objective(f)(*args))
    for shape, rows, spec in MESHES:
        mesh = fs.make_mesh(shape, fake=True)
        for fn, expected in ((f, want[0]), (objective(f), want[1])):
            got, _ = simulate(fs.shard(fn, mesh), args, (spec, rows, rows))
            assert worst(got, expected) <= TOLERANCE, shape


@pytest.mark.parametrize("name", sorted(FALLBACK))
def test_without_a_rule_right_by_fallback_and_never_silent(name):
    args, f = data(), FALLBACK[name]
    for shape, rows, spec in MESHES[1:]:
        mesh = fs.make_mesh(shape, fake=True)
        split = any(rows)
        with (
            pytest.warns(UserWarning, match=r"test_conformance\.py:\d+: `\w.*` has no rule") if split else nullcontext()
        ):
            got, low = simulate(fs.shard(f, mesh), args, (spec, rows, rows))
        assert worst(got, f(*args)) <= TOLERANCE, shape
        records = [c for c in low.collectives() if c.kind == "fallback"]
        assert records and all("test_conformance.py" in c.source and c.bytes for c in records)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got, _ = simulate(fs.shard(objective(f), mesh), args, (spec, rows, rows))
        assert worst(got, objective(f)(*args)) <= TOLERANCE, shape
        with pytest.raises(fs.ShardingError, match=r"test_conformance\.py:\d+"):
            simulate(fs.shard(f, mesh, strict=True), args, (spec, rows, rows))


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_values_without_rows(name):
    """The same on a batch that every rank holds: right as well, with a warning that all ranks compute everything."""
    args, f = data(), RIGHT[name]
    mesh = fs.make_mesh({"efsdp": 2}, fake=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, _ = simulate(fs.shard(f, mesh), args, (P("efsdp"), P(), P()))
    assert worst(got, f(*args)) <= TOLERANCE
