"""The public functions on the CPU: values and gradients against plain autograd, transforms, guards, edge cases."""

import importlib

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import kernels
from kernels import experts, glu, grouped, routing, rows, table, wgrad
from kernels.tuned import TUNED

combine = importlib.import_module("kernels.combine")  # the package hands out the function of the same name
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def double(*shape):
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def some_routing(tokens=9, k=2, num=4, drop=True):
    """Distinct random experts; expert num-1 stays empty; one slot is dropped."""
    ids = torch.stack([torch.randperm(num - 1)[:k] for _ in range(tokens)])
    if drop:
        ids[2, k - 1] = -1
    return ids, kernels.route(ids, num)


def dense_layer(x, w_in, w_out, weights, ids, activation):
    """Every expert on every token, then the chosen ones: the oracle."""
    gate, up = torch.einsum("th,ehi->tei", x, w_in).chunk(2, -1)
    act = {"swiglu": torch.nn.functional.silu, "geglu": torch.nn.functional.gelu, "glu": lambda z: z}[activation]
    y = torch.einsum("tei,eih->teh", act(gate) * up, w_out)
    chosen = (ids[..., None] == torch.arange(w_in.shape[0])).to(x.dtype)
    return torch.einsum("teh,tke,tk->th", y, chosen, weights)


def test_docstring_examples():
    r = kernels.route(torch.tensor([[1, 0], [1, 1]]), 3)
    assert r.offsets.tolist() == [1, 4, 4] and r.perm.tolist() == [1, 0, 2, 3]
    assert r.inverse.tolist() == [[1, 0], [2, 3]] and r.rows.tolist() == [0, 0, 1, 1]
    assert r.group_sizes.tolist() == [1, 3, 0]
    blocks, order = kernels.schedule(torch.tensor([130, 130, 140], dtype=torch.int32), 150)
    assert blocks[:4].tolist() == [[3, 140, 0, 0], [0, 0, 128, 0], [0, 128, 130, 0], [2, 130, 140, 0]]
    assert order.tolist() == [0, 2, 1]
    y = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    assert kernels.combine(y, torch.full((2, 2), 0.5), r).tolist() == [[1.5], [3.5]]
    x, w = torch.tensor([[1.0], [1.0], [2.0]]), torch.tensor([[[3.0]], [[5.0]]])
    groups = kernels.from_offsets(torch.tensor([1, 3], dtype=torch.int32), 3)
    assert kernels.grouped_mm(x, w, groups).tolist() == [[3.0], [5.0], [10.0]]
    one = kernels.route(torch.tensor([[0]]), 1)
    args = (torch.ones(1, 1), torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0]]]), one, torch.ones(1, 1))
    assert kernels.expert_mlp(*args, "glu").tolist() == [[6.0]]


@pytest.mark.parametrize("activation", glu.ACTIVATIONS)
def test_layer_against_the_dense_oracle(activation):
    ids, r = some_routing()
    leaves = double(9, 6), double(4, 6, 10), double(4, 5, 6), double(9, 2)
    x, w_in, w_out, weights = leaves
    out, want = kernels.expert_mlp(x, w_in, w_out, r, weights, activation), dense_layer(*leaves, ids, activation)
    torch.testing.assert_close(out, want)
    g = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, leaves, g), torch.autograd.grad(want, leaves, g), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(kernels.expert_mlp(x, w_in, w_out, r, weights, activation), want)


@pytest.mark.parametrize("which", range(4))
def test_layer_gradient_of_one_leaf_only(which):
    ids, r = some_routing()
    leaves = [double(9, 6), double(4, 6, 10), double(4, 5, 6), double(9, 2)]
    leaves = [t if i == which else t.detach() for i, t in enumerate(leaves)]
    out = kernels.expert_mlp(leaves[0], leaves[1], leaves[2], r, leaves[3])
    want = dense_layer(*leaves, ids, "swiglu")
    a, b = torch.autograd.grad(out.sum(), leaves[which])[0], torch.autograd.grad(want.sum(), leaves[which])[0]
    torch.testing.assert_close(a, b)


def test_layer_keeps_little():
    """Between forward and backward: x, the pre-activation, weights, integers; not the rows, nor the activation."""
    ids, r = some_routing(tokens=32, drop=False)
    x, w_in, w_out, weights = double(32, 16), double(4, 16, 8), double(4, 4, 16), double(32, 2)
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kernels.expert_mlp(x, w_in, w_out, r, weights)
    floating = sorted(tuple(t.shape) for t in kept.values() if t.is_floating_point())
    assert floating == sorted([(32, 16), (4, 16, 8), (4, 4, 16), (32, 2), (64, 8)])


def test_products_differentiate_twice():
    _, r = some_routing()
    check = torch.autograd.gradgradcheck
    assert check(lambda x, w: kernels.grouped_mm(x, w, r), (double(18, 3), double(4, 3, 5)))
    assert check(lambda x, w: kernels.gather_mm(x, w, r), (double(9, 3), double(4, 3, 5)))
    assert check(lambda y, w: kernels.combine(y, w, r), (double(18, 3), double(9, 2)))
    assert check(lambda y: kernels.combine(y, None, r), (double(18, 3),))
    assert check(lambda x: kernels.gather(x, r), (double(9, 3),))


def test_bias_and_scale():
    _, r = some_routing()
    x, w, bias, scale = double(18, 3), double(4, 3, 5), double(4, 5), double(18)
    expert = torch.bucketize(torch.arange(18), r.offsets, right=True)
    live = (expert < 4).double()[:, None]
    at = expert.clamp(max=3)
    want = (torch.einsum("rk,rkn->rn", x, w[at]) + bias[at]) * scale[:, None] * live
    got = kernels.grouped_mm(x, w, r, bias=bias, scale=scale)
    torch.testing.assert_close(got, want)
    g = torch.randn_like(got)
    a = torch.autograd.grad(got, (x, w, bias, scale), g)
    for p, q in zip(a, torch.autograd.grad(want, (x, w, bias, scale), g), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)


def test_gather_is_the_unfused_path():
    _, r = some_routing()
    x, w = double(9, 3), double(4, 3, 5)
    fused, plain = kernels.gather_mm(x, w, r), kernels.grouped_mm(kernels.gather(x, r), w, r)
    torch.testing.assert_close(fused, plain)
    g = torch.randn_like(fused)
    for a, b in zip(torch.autograd.grad(fused, (x, w), g), torch.autograd.grad(plain, (x, w), g), strict=True):
        torch.testing.assert_close(a, b)


def test_transforms():
    """torch.func with and without recorded backward, make_fx real and symbolic, torch.compile."""
    ids, _ = some_routing()
    args = ids, *(t.detach() for t in (double(9, 6), double(4, 6, 10), double(4, 5, 6), double(9, 2)))

    def loss(ids, x, w_in, w_out, weights):
        return kernels.expert_mlp(x, w_in, w_out, kernels.route(ids, 4), weights).sin().sum()

    leaves = [t.clone().requires_grad_() for t in args[1:]]
    want = torch.autograd.grad(loss(ids, *leaves), leaves)
    step = torch.func.grad(loss, argnums=(1, 2, 3, 4))
    _, pull = torch.func.vjp(lambda *t: loss(ids, *t), *args[1:])
    with torch.no_grad():
        pulled = pull(torch.ones((), dtype=torch.double))
    traced = [make_fx(step, tracing_mode=mode)(*args) for mode in ("real", "fake", "symbolic")]
    for got in (step(*args), pulled, *(t(*args) for t in traced)):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    names = {str(n.target) for n in traced[0].graph.nodes}
    assert "fskernels.expert_mlp.default" in names and "fskernels.expert_mlp_backward.default" in names
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(ids, *leaves), leaves), want, strict=True):
        torch.testing.assert_close(a, b)


def test_refusals():
    _, r = some_routing()
    x, w_in, w_out, weights = double(9, 6), double(4, 6, 10), double(4, 5, 6), double(9, 2)
    with pytest.raises(RuntimeError, match="raw op without a gradient"):
        rows.rows_op(double(18, 6), w_in, r.offsets, r.blocks)
    with pytest.raises(RuntimeError, match="raw op without a gradient"):
        raw = lambda x: rows.rows_op(x, w_in.detach(), r.offsets, r.blocks).sum()  # noqa: E731
        torch.func.grad(raw)(torch.randn(18, 6).double())
    first = torch.autograd.grad(kernels.expert_mlp(x, w_in, w_out, r, weights).sum(), x, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match="no vmap rule"):
        torch.func.vmap(lambda x: kernels.expert_mlp(x, w_in, w_out, r, weights))(torch.stack([x, x]))
    with pytest.raises(NotImplementedError, match="no vmap rule"):
        torch.func.vmap(lambda x: kernels.grouped_mm(x, w_in, r))(torch.randn(2, 18, 6).double())
    with pytest.raises(ValueError, match="`activation` must be one of"):
        kernels.expert_mlp(x, w_in, w_out, r, weights, "relu")
    with pytest.raises(ValueError, match="need \\[T, H\\]"):
        kernels.expert_mlp(x, w_in, w_in, r, weights)
    with pytest.raises(ValueError, match="integers"):
        kernels.route(torch.randn(3, 2), 4)
    with pytest.raises(ValueError, match="build it with `schedule"):
        kernels.grouped_mm(double(400, 6), w_in, r)
    with pytest.raises(ValueError, match="dtype of w"):
        kernels.grouped_mm(torch.randn(18, 6), w_in, r)


def test_opcheck_every_raw_op():
    _, r = some_routing()
    o, b, order, index = r.offsets, r.blocks, r.order, r.rows
    x, token, w = torch.randn(18, 6), torch.randn(9, 6), torch.randn(4, 6, 10)
    h, w_out, scale, weights = torch.randn(18, 10), torch.randn(4, 5, 6), torch.rand(18), torch.rand(9, 2)
    parts = (o, r.perm, r.inverse, index, b, order)
    cases = [
        (routing.sort_op, (torch.randint(0, 4, (9, 2)), 4)),
        (routing.schedule_op, (o, 18)),
        (rows.rows_op, (x, w, o, b)),
        (rows.rows_op, (token, w, o, b, index, torch.randn(4, 10), scale)),
        (rows.rows_op, (h, w, o, b, None, None, None, True)),
        (wgrad.wgrad_op, (x, h, o, order)),
        (wgrad.wgrad_op, (token, h, o, order, index, None)),
        (glu.glu_op, (token, w, o, b, index, "swiglu", True)),
        (glu.glu_op, (x, w, o, b, None, "geglu", False)),
        (glu.glu_backward_op, (token, w_out, h, scale, o, b, index, "swiglu")),
        (combine.combine_op, (x, weights, r.inverse)),
        (combine.combine_op, (x, None, r.inverse)),
        (combine.combine_transpose_op, (token, x, weights, r.inverse)),
        (combine.gather_op, (token, index)),
        (experts.expert_mlp_op, (token, w, w_out, weights, *parts, "swiglu", True)),
        (experts.expert_mlp_backward_op,
         (token, token, w, w_out, weights, h, *parts, "swiglu", (True, True, False, True))),
    ]  # fmt: skip
    for op, args in cases:
        torch.library.opcheck(op, args, test_utils=CHECKS)
    names = ["combine", "combine_transpose", "expert_mlp", "expert_mlp_backward", "gather", "grouped", "grouped_glu",
             "grouped_glu_backward", "grouped_wgrad", "route", "schedule"]  # fmt: skip
    assert sorted({op.name().split("::")[1] for op, _ in cases}) == names


def test_no_rows_stays_in_the_graph():
    for offsets, count in (([0, 0, 0], 0), ([0, 0, 0], 7)):
        r = kernels.from_offsets(torch.tensor(offsets, dtype=torch.int32), count)
        x, w = double(count, 4), double(3, 4, 5)
        y = kernels.grouped_mm(x, w, r)
        dx, dw = torch.autograd.grad(y.sum(), (x, w))
        assert y.shape == (count, 5) and (y == 0).all() and (dx == 0).all() and (dw == 0).all()
    r = kernels.route(torch.zeros(0, 2, dtype=torch.long), 3)
    leaves = double(0, 4), double(3, 4, 6), double(3, 3, 4), double(0, 2)
    out = kernels.expert_mlp(leaves[0], leaves[1], leaves[2], r, leaves[3])
    grads = torch.autograd.grad(out.sum(), leaves)
    assert out.shape == (0, 4) and (grads[1] == 0).all() and (grads[2] == 0).all()


def test_tail_rows_never_leak():
    """NaN past the last group reaches neither output nor gradients."""
    r = kernels.from_offsets(torch.tensor([2, 2, 5], dtype=torch.int32), 8)
    x, w = torch.randn(8, 4), torch.randn(3, 4, 5)
    x[5:] = float("nan")
    x, w = x.requires_grad_(), w.requires_grad_()
    y = kernels.grouped_mm(x, w, r)
    dx, dw = torch.autograd.grad(y, (x, w), torch.ones(1, 1).expand(8, 5))
    assert (y[5:] == 0).all() and (dx[5:] == 0).all() and torch.isfinite(dw).all() and (dw[1] == 0).all()


def test_gradients_of_every_layout():
    """`.sum()`, `.mean()`, expanded, transposed and sliced gradients equal the plain product's."""
    r = kernels.from_offsets(torch.tensor([3, 8], dtype=torch.int32), 8)
    x, w = double(8, 4), double(2, 4, 6)
    plain = lambda: torch.cat([x[:3] @ w[0], x[3:] @ w[1]])  # noqa: E731
    heads = (torch.sum, torch.mean, lambda y: (y.T * torch.arange(8.0)).sum(), lambda y: y[:, ::2].sum(),
             lambda y: y.sum(0).max())  # fmt: skip
    for head in heads:
        got = torch.autograd.grad(head(kernels.grouped_mm(x, w, r)), (x, w))
        for a, b in zip(got, torch.autograd.grad(head(plain()), (x, w)), strict=True):
            torch.testing.assert_close(a, b)


def test_fused_weight_through_a_transpose():
    """[E, 2F, D] via transpose and chunk, against two separate products."""
    r = kernels.from_offsets(torch.tensor([3, 8], dtype=torch.int32), 8)
    x, w = double(8, 4), double(2, 6, 4)
    gate, up = kernels.grouped_mm(x, w.transpose(1, 2), r).chunk(2, -1)
    got = torch.autograd.grad((gate * up).sum(), (x, w))
    one, two = (kernels.grouped_mm(x, half.transpose(1, 2), r) for half in w.chunk(2, 1))
    for a, b in zip(got, torch.autograd.grad((one * two).sum(), (x, w)), strict=True):
        torch.testing.assert_close(a, b)


def test_gate_weights_reach_the_weight_gradient():
    """Two experts for one token, weights 0.9 and 0.1: their gradients stand 9 to 1."""
    r = kernels.route(torch.tensor([[0, 1]]), 2)
    w_in, w_out = torch.ones(2, 3, 4), torch.ones(2, 2, 3, requires_grad=True)
    out = kernels.expert_mlp(torch.ones(1, 3), w_in, w_out, r, torch.tensor([[0.9, 0.1]]))
    dw = torch.autograd.grad(out.sum(), w_out)[0]
    torch.testing.assert_close(dw[0], 9 * dw[1])


def test_repeated_experts_add_up():
    r = kernels.route(torch.tensor([[1, 1], [0, 2]]), 3)
    x, w_in, w_out = torch.randn(2, 3), torch.randn(3, 3, 4), torch.randn(3, 2, 3)
    out = kernels.expert_mlp(x, w_in, w_out, r, torch.tensor([[0.25, 0.75], [1.0, 0.0]]))
    once = kernels.route(torch.tensor([[1], [0]]), 3)
    torch.testing.assert_close(out, kernels.expert_mlp(x, w_in, w_out, once, torch.ones(2, 1)))


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_equal_experts_are_one_dense_layer(k):
    """In bf16 too, and the error of the combine's transpose does not grow with k."""
    tokens, hidden, inner, num = 16, 32, 24, 8
    x = torch.randn(tokens, hidden).bfloat16()
    w_in = torch.randn(1, hidden, 2 * inner).bfloat16().mul(hidden**-0.5).expand(num, -1, -1)
    w_out = torch.randn(1, inner, hidden).bfloat16().mul(inner**-0.5).expand(num, -1, -1)
    ids = torch.stack([torch.randperm(num)[:k] for _ in range(tokens)])
    weights = torch.full((tokens, k), 1 / k)
    out = kernels.expert_mlp(x, w_in, w_out, kernels.route(ids, num), weights)
    gate, up = (x.float() @ w_in[0].float()).bfloat16().float().chunk(2, -1)
    want = (torch.nn.functional.silu(gate) * up).bfloat16().float() @ w_out[0].float()
    torch.testing.assert_close(out.float(), want.bfloat16().float(), rtol=1e-2, atol=1e-3)
    r = kernels.route(ids, num)
    y, g = torch.randn(tokens * k, hidden), torch.randn(tokens, hidden)
    dy, dw = combine.combine_transpose_op(g.bfloat16(), y.bfloat16(), weights, r.inverse)
    high = combine.combine_transpose_reference(g, y, weights, r.inverse)
    for got, exact in zip((dy, dw), high, strict=True):
        assert (got.float() - exact).norm() / exact.norm() < 5e-3


def test_random_counts():
    """Values and weight gradients for many random group sizes, zeros included."""
    w = torch.randn(5, 3, 2, dtype=torch.double)
    for _ in range(200):
        sizes = torch.randint(0, 5, (5,)) * (torch.rand(5) < 0.6)
        count = int(sizes.sum()) + int(torch.randint(0, 3, ()))
        r = kernels.from_offsets(sizes.cumsum(0).to(torch.int32), count)
        x, g = torch.randn(count, 3, dtype=torch.double), torch.randn(count, 2, dtype=torch.double)
        expert = torch.repeat_interleave(torch.arange(5), sizes)
        n = len(expert)
        want = torch.zeros(count, 2, dtype=torch.double)
        want[:n] = torch.einsum("rk,rkn->rn", x[:n], w[expert])
        torch.testing.assert_close(kernels.grouped_mm(x, w, r), want)
        dw = torch.zeros(5, 3, 2, dtype=torch.double).index_add_(0, expert, x[:n, :, None] * g[:n, None, :])
        torch.testing.assert_close(wgrad.wgrad_op(x, g, r.offsets, r.order), dw)


def test_table():
    """Keys hold buckets, never row counts; every entry names fields of a configuration."""
    assert {table.bucket(n, 8) for n in torch.randint(0, 10**6, (1000,)).tolist()} <= {0, 64, 512, 4096}
    for (op, n, k, num, size), found in TUNED.items():
        assert op in table.DEFAULT and min(n, k, num) > 0 and size in (0, 64, 512, 4096)
        config = table.choose(op, n, k, num, size * num)
        assert config == table.DEFAULT[op]._replace(**found)
    assert table.choose("forward", 7, 7, 7, 7) == table.DEFAULT["forward"]
    assert issubclass(grouped.Rows, torch.autograd.Function)
