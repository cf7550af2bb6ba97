"""The chunked cross-entropy of a linear head against the plain one: values, gradients, splits, chunks, memory."""

import pytest
import torch
import torch.nn.functional as F
from programs import TOLERANCE, simulate, worst

import fsharding as fs
from fsharding import P
from fsharding.program import cross_entropy as ce

D, V = 6, 11


def data(dtype=torch.float32, rows=(4, 6)):
    g = torch.Generator().manual_seed(0)
    x, head = torch.randn(*rows, D, generator=g, dtype=dtype), torch.randn(D, V, generator=g, dtype=dtype)
    labels = torch.randint(0, V, rows, generator=g)
    labels[0] = -100  # a rank without a label that counts
    labels[1, 0] = -100
    return head, x, labels


def ours(reduction, keep):
    return lambda head, x, y: fs.nn.cross_entropy(x, head, y, reduction=reduction, keep_logits=keep)


def plain(reduction):
    def f(head, x, y):
        out = F.cross_entropy((x @ head).reshape(-1, V), y.reshape(-1), reduction=reduction)
        return out.reshape(y.shape) if reduction == "none" else out

    return f


@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [ce.ELEMENTS, 5 * V, 1], ids=["one", "chunks", "rows"])
def test_values_and_gradients_on_every_split(reduction, keep, chunk, monkeypatch):
    monkeypatch.setattr(ce, "ELEMENTS", chunk)
    args = data()
    weigh = lambda f: lambda *a: (f(*a) * torch.arange(1.0, 7.0)).sum() if reduction == "none" else f(*a)  # noqa: E731
    want = fs.value_and_grad(weigh(plain(reduction)), argnums=(0, 1))(*args)
    fn = fs.value_and_grad(weigh(ours(reduction, keep)), argnums=(0, 1))
    assert worst(fn(*args), want) <= TOLERANCE
    for sizes, rows, spec in (({"a": 2}, P("a"), P(None, "a")), ({"a": 2, "b": 2}, P(("b", "a")), P("b", "a"))):
        got, low = simulate(fs.shard(fn, fs.make_mesh(sizes, fake=True), strict=True), args, (spec, rows, rows))
        assert worst(got, want) <= TOLERANCE
        assert not [c for c in low.collectives() if c.kind == "all_gather" and c.param is None], "rows were gathered"


def test_labels_and_weights_of_unequal_ranks_are_one_mean():
    head, x, y = data(torch.float64)
    y[:2] = -100  # two of four ranks count nothing
    got, _ = simulate(
        fs.shard(ours("mean", False), fs.make_mesh({"a": 4}, fake=True)), (head, x, y), (P(), P("a"), P("a"))
    )
    assert worst(got, plain("mean")(head, x, y)) <= 1e-12
    y[:] = -100
    assert ours("mean", False)(head, x, y).isnan() and ours("sum", False)(head, x, y) == 0


def test_logits_of_the_batch_live_only_if_asked_for():
    args = (
        fs.ShapeDtype((64, 4096)),
        fs.ShapeDtype((512, 64), spec=P("a")),
        fs.ShapeDtype((512,), torch.int64, P("a")),
    )
    mesh, logits = fs.make_mesh({"a": 2}, fake=True), 256 * 4096 * 4
    peak = {
        keep: fs.shard(fs.value_and_grad(ours("mean", keep)), mesh).lower(*args).memory_analysis()["peak"]
        for keep in (False, True)
    }
    assert peak[True] - peak[False] >= 0.7 * logits


def test_bfloat16_is_as_close_as_the_plain_one():
    head, x, y = data(torch.bfloat16)
    exact = plain("mean")(head.double(), x.double(), y)
    for keep in (False, True):
        assert abs(ours("mean", keep)(head, x, y).double() - exact) <= 2e-2 * exact.abs()
        assert ours("mean", keep)(head, x, y).dtype == torch.float32


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda h, x, y: fs.nn.cross_entropy(x, h.T, y), "one dtype"),
        (lambda h, x, y: fs.nn.cross_entropy(x, h.double(), y), "one dtype"),
        (lambda h, x, y: fs.nn.cross_entropy(x, h, y[0]), "one integer label a row"),
        (lambda h, x, y: fs.nn.cross_entropy(x, h, y.float()), "one integer label a row"),
        (lambda h, x, y: fs.nn.cross_entropy(x, h, y, reduction="median"), "unknown reduction"),
        (lambda h, x, y: torch.func.vmap(lambda a, b: fs.nn.cross_entropy(a, h, b))(x, y), "no vmap rule"),
        (
            lambda h, x, y: fs.grad(lambda v: fs.grad(lambda u: fs.nn.cross_entropy(x, u, y))(v).square().sum())(h),
            "second",
        ),
        (lambda h, x, y: torch.func.jvp(lambda u: fs.nn.cross_entropy(x, u, y), (h,), (h,)), "forward mode"),
    ],
)
def test_what_it_cannot_do_is_said(call, words):
    with pytest.raises(fs.ShardingError, match=words):
        call(*data())
