"""Kernels on the GPU: each configuration in bf16, poisoned memory, repeatability, syncs, graphs, big strides."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kernel_checks import close, groups, normal, on_cpu, poison, rows_oracle, wgrad_oracle

import kernels
from kernels.combine import combine_launch, combine_reference, combine_transpose_launch, combine_transpose_reference
from kernels.glu import ACTIVATIONS, glu_backward_launch, glu_backward_reference, glu_launch, glu_reference
from kernels.routing import sort_launch, sort_reference
from kernels.rows import rows_launch
from kernels.table import DEFAULT, WIDE
from kernels.tuned import TUNED
from kernels.wgrad import wgrad_launch

SIZES = [300, 0, 1, 128, 129, 513, 0, 64]
ROWS = sum(SIZES) + 70  # a tail that belongs to no group


def configurations(op):
    """The default and all tuned configurations of `op`, once each."""
    base = DEFAULT[op]
    return sorted({base, *(base._replace(**c) for key, c in TUNED.items() if key[0] == op)})


def of(*ops):
    return [pytest.param(op, c, id=f"{op}-{i}") for op in ops for i, c in enumerate(configurations(op))]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    poison()


@pytest.mark.parametrize("op,config", of("forward", "dgrad", "gather"))
@pytest.mark.parametrize("k,n", [(256, 512), (2880, 320), (72, 200), (100, 33)])
def test_rows(op, config, k, n):
    r, transposed = groups(SIZES, ROWS), op == "dgrad"
    w = normal(len(SIZES), *((n, k) if transposed else (k, n)), scale=k**-0.5)
    index = torch.randint(0, 200, (ROWS,), dtype=torch.int32, device="cuda") if op == "gather" else None
    x = normal(200 if op == "gather" else ROWS, k)
    run = lambda: rows_launch(x, w, r.offsets, r.blocks, index, transposed=transposed, config=config)  # noqa: E731
    y = run()
    close(y, rows_oracle(x, w, r.offsets, r.blocks, index, transposed=transposed), r.offsets)
    poison()
    assert torch.equal(y, run())


@pytest.mark.parametrize("op,config", of("wgrad"))
@pytest.mark.parametrize("k,n", [(256, 512), (320, 2880), (72, 200), (100, 33)])
def test_wgrad(op, config, k, n):
    r, x, g = groups(SIZES, ROWS), normal(ROWS, k), normal(ROWS, n)
    x[sum(SIZES) :], g[sum(SIZES) :] = float("nan"), float("nan")  # what lies past the groups must not be read
    dw = wgrad_launch(x, g, r.offsets, r.order, config=config)
    want = wgrad_oracle(x, g, r.offsets, r.order)
    for e in range(len(SIZES)):
        close(dw[e], want[e], None)
    poison()
    assert torch.equal(dw, wgrad_launch(x, g, r.offsets, r.order, config=config))


@pytest.mark.parametrize("op,config", of("wgrad"))
@pytest.mark.parametrize("sizes", [[0, 5000, 0, 0], [4000, 700, 0, 31], [100] * 16], ids=["one-hot", "skewed", "even"])
@pytest.mark.parametrize("k,n", [(256, 512), (100, 33)])
def test_wgrad_in_parts(op, config, sizes, k, n):
    """Experts with many rows in parts: the same numbers every time."""
    r, x, g = groups(sizes, sum(sizes)), normal(sum(sizes), k), normal(sum(sizes), n)
    want = wgrad_oracle(x, g, r.offsets, r.order)
    for cuts in (2, 7):
        split = config._replace(cuts=cuts)
        dw = wgrad_launch(x, g, r.offsets, r.order, config=split)
        for e in range(len(sizes)):
            close(dw[e], want[e], None)
        poison()
        assert torch.equal(dw, wgrad_launch(x, g, r.offsets, r.order, config=split))


@pytest.mark.parametrize("op,config", of("forward", "dgrad"))
@pytest.mark.parametrize("k,n", [(256, 512), (72, 200), (100, 33)])
def test_rows_scattered(op, config, k, n):
    """Each row of the result written to a place of its own; rows past the groups are zeros at theirs."""
    r, transposed = groups(SIZES, ROWS), op == "dgrad"
    w = normal(len(SIZES), *((n, k) if transposed else (k, n)), scale=k**-0.5)
    x, target = normal(ROWS, k), torch.randperm(ROWS, device="cuda").to(torch.int32)
    run = lambda t: rows_launch(x, w, r.offsets, r.blocks, transposed=transposed, target=t, config=config)  # noqa: E731
    want = run(None)
    poison()
    assert torch.equal(run(target)[target.long()], want)


@pytest.mark.parametrize("op,config", of("wgrad_gather"))
@pytest.mark.parametrize("side", ["x", "g", "both"])
def test_wgrad_gather(op, config, side):
    r, index = groups(SIZES, ROWS), torch.randint(0, 200, (ROWS,), dtype=torch.int32, device="cuda")
    x_index, g_index = index if side != "g" else None, index.flip(0) if side != "x" else None
    for k, n in ((256, 512), (320, 160), (100, 33)):
        x, g = normal(ROWS if x_index is None else 200, k), normal(ROWS if g_index is None else 200, n)
        dw = wgrad_launch(x, g, r.offsets, r.order, x_index, g_index, config=config)
        want = wgrad_oracle(x, g, r.offsets, r.order, x_index, g_index)
        for e in range(len(SIZES)):
            close(dw[e], want[e], None)


@pytest.mark.parametrize("op,config", of("glu", "glu_only"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu(op, config, activation):
    r, index = groups(SIZES, ROWS), torch.randint(0, 200, (ROWS,), dtype=torch.int32, device="cuda")
    for hidden, inner in ((256, 384), (320, 200), (72, 36)):
        x, w = normal(200, hidden), normal(len(SIZES), hidden, 2 * inner, scale=hidden**-0.5)
        h, a = glu_launch(x, w, r.offsets, r.blocks, index, activation, config=config)
        want_h, want_a = on_cpu(glu_reference)(x, w, r.offsets, r.blocks, index, activation)
        close(h, want_h, r.offsets)
        close(a, want_a, r.offsets, 2e-5)
        poison()
        again = glu_launch(x, w, r.offsets, r.blocks, index, activation, False, config=config)[1]
        assert torch.equal(a, again)


@pytest.mark.parametrize("op,config", of("glu_backward"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu_backward(op, config, activation):
    r, index = groups(SIZES, ROWS), torch.randint(0, 200, (ROWS,), dtype=torch.int32, device="cuda")
    for hidden, inner in ((256, 384), (320, 200), (72, 36)):
        g, w = normal(200, hidden), normal(len(SIZES), inner, hidden, scale=hidden**-0.5)
        h, scale = normal(ROWS, 2 * inner), torch.rand(ROWS, device="cuda")
        got = glu_backward_launch(g, w, h, scale, r.offsets, r.blocks, index, activation, config=config)
        want = on_cpu(glu_backward_reference)(g, w, h, scale, r.offsets, r.blocks, index, activation)
        for p, q in zip(got[:2], want[:2], strict=True):
            close(p, q, r.offsets)
        close(got[2], want[2])  # sums that cancel: judged together, not row by row
        poison()
        again = glu_backward_launch(g, w, h, scale, r.offsets, r.blocks, index, activation, config=config)
        assert all(torch.equal(p, q) for p, q in zip(got, again, strict=True))


@pytest.mark.parametrize("experts,tokens,k", [(1, 5, 1), (8, 1000, 2), (128, 4096, 8), (257, 300, 8)])
def test_routing(experts, tokens, k):
    ids = torch.randint(-1, experts + 1, (tokens, k), device="cuda")
    for got, want in zip(sort_launch(ids, experts), sort_reference(ids.cpu(), experts), strict=True):
        assert torch.equal(got.cpu(), want)
    offsets = sort_reference(ids.cpu(), experts)[0]
    want = kernels.schedule(offsets, tokens * k)
    got = kernels.schedule(offsets.cuda(), tokens * k)
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("columns", [40, 1000, 7168])
def test_combine(columns):
    r = kernels.route(torch.randint(0, 8, (300, 4), device="cuda"), 8)
    y, weights, g = normal(1200, columns), torch.rand(300, 4, device="cuda"), normal(300, columns)
    out = combine_launch(y, weights, r.inverse)
    close(out, on_cpu(combine_reference)(y, weights, r.inverse))
    assert all(torch.equal(out, combine_launch(y, weights, r.inverse)) for _ in range(40))
    poison()
    for got, want in zip(combine_transpose_launch(g, y, weights, r.inverse),
                         on_cpu(combine_transpose_reference)(g, y, weights, r.inverse), strict=True):  # fmt: skip
        close(got, want)


def test_edges():
    """No rows, one expert with everything, transposed weights, expanded gradients, fp32 and fp16."""
    w = normal(4, 64, 96, scale=0.125)
    r = groups([0, 0, 0, 0], 0)
    assert kernels.grouped_mm(normal(0, 64), w, r).shape == (0, 96)
    assert (wgrad_launch(normal(0, 64), normal(0, 96), r.offsets, r.order) == 0).all()
    r = groups([0, 0, 700, 0], 700)
    x = normal(700, 64).requires_grad_()
    w.requires_grad_()
    for weights in (w, w.mT.contiguous().mT):
        y = kernels.grouped_mm(x, weights, r)
        close(y, rows_oracle(x, weights, r.offsets, r.blocks), r.offsets)
        dx, dw = torch.autograd.grad(y.float().sum(), (x, w))
        ones = torch.ones_like(y)
        close(dx, rows_oracle(ones, w, r.offsets, r.blocks, transposed=True), r.offsets)
        close(dw, wgrad_oracle(x, ones, r.offsets, r.order))
    for dtype in (torch.float16, torch.float32):
        y = rows_launch(x.to(dtype), w.to(dtype), r.offsets, r.blocks)
        close(y, rows_oracle(x.to(dtype), w.to(dtype), r.offsets, r.blocks), r.offsets)
    assert WIDE.block_n == 64


def test_library_implementation():
    """`torch._grouped_mm` behind the same contract: tails and experts without rows are zero."""
    r, x, g, w = groups(SIZES, ROWS), normal(ROWS, 256), normal(ROWS, 512), normal(len(SIZES), 256, 512, scale=0.06)
    library = DEFAULT["forward"]._replace(impl="torch")
    close(rows_launch(x, w, r.offsets, r.blocks, config=library), rows_oracle(x, w, r.offsets, r.blocks), r.offsets)
    dx = rows_launch(g, w, r.offsets, r.blocks, transposed=True, config=library)
    close(dx, rows_oracle(g, w, r.offsets, r.blocks, transposed=True), r.offsets)
    dw = wgrad_launch(x, g, r.offsets, r.order, config=library)
    close(dw, wgrad_oracle(x, g, r.offsets, r.order))
    assert (dw[1] == 0).all() and (dw[6] == 0).all()


def layer(tokens=700, hidden=256, inner=192, experts=16, k=4):
    x, w_in = normal(tokens, hidden), normal(experts, hidden, 2 * inner, scale=hidden**-0.5)
    w_out, g = normal(experts, inner, hidden, scale=inner**-0.5), normal(tokens, hidden)
    ids = torch.rand(tokens, experts, device="cuda").topk(k).indices
    return x, w_in, w_out, torch.rand(tokens, k, device="cuda"), g, ids


def step(x, w_in, w_out, weights, g, ids):
    """Forward and gradients of the fused layer."""
    leaves = [t.detach().requires_grad_() for t in (x, w_in, w_out, weights)]
    out = kernels.expert_mlp(leaves[0], leaves[1], leaves[2], kernels.route(ids, w_in.shape[0]), leaves[3])
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def plain(x, w_in, w_out, weights, g, ids):
    """The same from the references, in fp32."""
    high = [t.detach().float().cpu() for t in (x, w_in, w_out, weights)]
    return step(*high, g.float().cpu(), ids.cpu())


def test_layer_matches_fp32():
    args = layer()
    for got, want in zip(step(*args), plain(*args), strict=True):
        close(got, want.cuda(), tolerance=1e-4)  # three roundings to bf16 on the way


def test_layer_without_tokens():
    args = layer()
    empty = step(args[0][:0], args[1], args[2], args[3][:0], args[4][:0], args[5][:0])
    assert empty[0].shape == (0, 256) and all((grad == 0).all() for grad in empty)


def test_layer_under_inductor():
    args = layer()
    ids = args[5]

    def loss(x, w_in, w_out, weights):
        return (kernels.expert_mlp(2 * x, w_in, w_out, kernels.route(ids, w_in.shape[0]), weights).float() ** 2).mean()

    leaves = [t.detach().requires_grad_() for t in args[:4]]
    want = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    for a, b in zip(got, want, strict=True):
        close(a, b, tolerance=1e-4)


def test_layer_repeats_without_host_sync():
    args = layer()
    first = step(*args)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            assert len(again := step(*args)) == 5
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_layer_in_a_graph_with_changing_routing():
    args = list(layer())
    step(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*args)
    experts = args[1].shape[0]
    for ids in (torch.zeros_like(args[5]), torch.randint_like(args[5], experts), torch.full_like(args[5], -1)):
        args[5].copy_(ids)
        graph.replay()
        replayed = [o.clone() for o in out]
        assert all(torch.equal(a, b) for a, b in zip(replayed, step(*args), strict=True))


def test_random_counts():
    """Many random group sizes, zeros included, against one dense product per group."""
    w = normal(16, 128, 128, scale=0.09)
    for trial in range(60):
        sizes = (torch.rand(16) ** 4 * 300 * (torch.rand(16) < 0.7)).int().tolist()
        rows = sum(sizes) + trial % 3
        r, x, g = groups(sizes, rows), normal(rows, 128), normal(rows, 128)
        close(rows_launch(x, w, r.offsets, r.blocks), rows_oracle(x, w, r.offsets, r.blocks), r.offsets)
        close(wgrad_launch(x, g, r.offsets, r.order), wgrad_oracle(x, g, r.offsets, r.order))


def test_past_two_to_the_31():
    """expert·K·N and row·stride both pass 2**31 elements."""
    experts, k, n = 34, 8192, 8192
    r = groups([0] * 32 + [200, 130], 330)
    x, g, w = normal(330, k), normal(330, n), torch.empty(experts, k, n, dtype=torch.bfloat16, device="cuda")
    w[32:] = normal(2, k, n, scale=k**-0.5)
    small = groups([200, 130], 330)
    close(rows_launch(x, w, r.offsets, r.blocks), rows_oracle(x, w[32:], small.offsets, small.blocks))
    dx = rows_launch(g, w, r.offsets, r.blocks, transposed=True)
    close(dx, rows_oracle(g, w[32:], small.offsets, small.blocks, transposed=True))
    dw = wgrad_launch(x, g, r.offsets, r.order)
    close(dw[32:], wgrad_oracle(x, g, small.offsets, small.order))
    assert (dw[:32] == 0).all()
    del w, dw
    rows = 300_000
    tall, w2 = torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda"), normal(2, k, 64, scale=k**-0.5)
    tall[-150:] = normal(150, k)
    r2 = groups([rows - 100, 100], rows)
    y = rows_launch(tall, w2, r2.offsets, r2.blocks)
    close(y[-100:].float(), tall[-100:].float() @ w2[1].float())
    close(y[-150:-100].float(), tall[-150:-100].float() @ w2[0].float())
    close(wgrad_launch(y, tall, r2.offsets, r2.order)[1], y[-100:].float().mT @ tall[-100:].float())
    wide = rows_launch(y, w2.mT.contiguous(), r2.offsets, r2.blocks)
    close(wide[-100:].float(), y[-100:].float() @ w2[1].float().mT)
