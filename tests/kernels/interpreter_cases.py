"""The Triton kernels in fp32 on the CPU under Triton's interpreter; `test_kernels_interpreter.py` runs this file.

The interpreter has to be chosen before the kernels are imported, so this file runs in a process of its own:
`TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter_cases.py`.
"""

import importlib

import pytest
import torch
import triton
import triton.language as tl

import kernels
from kernels import experts, glu, routing, rows, table, tiles, wgrad
from kernels.table import Config

combine = importlib.import_module("kernels.combine")  # the package hands out the function of the same name
CONFIG = Config(block_m=32, block_n=32, block_k=16, warps=4, stages=2, group=2, split=1)
CLOSE = dict(rtol=1e-4, atol=1e-4)
SIZES = [130, 0, 5, 31, 0]
ROWS = sum(SIZES) + 9  # nine rows belong to no group
DIMS = [1, 15, 16, 17, 31, 33, 100]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every buffer that a launcher allocates starts as NaN: what is never written shows."""
    torch.manual_seed(0)
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def fill(x):
        return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(-(2**30))

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda x, **k: fill(empty(x.shape, dtype=x.dtype)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: fill(new_empty(x, *a, **k)))
    monkeypatch.setattr(table, "WIDE", CONFIG)


def group(sizes, count):
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return kernels.Routing(offsets, None, None, None, *routing.schedule_reference(offsets, count))


def same(got, want):
    got, want = (got, want) if isinstance(got, tuple) else ((got,), (want,))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, **CLOSE)


@pytest.mark.parametrize("tokens,k,experts", [(1, 1, 1), (37, 3, 5), (130, 2, 33)])
def test_routing(tokens, k, experts):
    ids = torch.randint(-1, experts + 1, (tokens, k))
    got = routing.sort_launch(ids, experts)
    for g, w in zip(got, routing.sort_reference(ids, experts), strict=True):
        assert torch.equal(g, w)
    count = tokens * k
    for g, w in zip(routing.schedule_launch(got[0], count), routing.schedule_reference(got[0], count), strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize("sizes", [[0, 0], [300], [0, 257, 0], [128, 128], [1] * 40])
def test_schedule(sizes):
    offsets, count = torch.tensor(sizes).cumsum(0).to(torch.int32), sum(sizes) + 3
    for g, w in zip(routing.schedule_launch(offsets, count), routing.schedule_reference(offsets, count), strict=True):
        assert torch.equal(g, w)


def pairs():
    """Every dim once as K and once as N, each with another partner."""
    return list(zip(DIMS, DIMS[3:] + DIMS[:3], strict=True))


@pytest.mark.parametrize("k,n", pairs())
@pytest.mark.parametrize("transposed", [False, True])
def test_rows(k, n, transposed):
    r, w = group(SIZES, ROWS), torch.randn(len(SIZES), k, n)
    x = torch.randn(ROWS, n if transposed else k)
    got = rows.rows_launch(x, w, r.offsets, r.blocks, transposed=transposed, config=CONFIG, tma=1)
    same(got, rows.rows_reference(x, w, r.offsets, r.blocks, transposed=transposed))
    assert (got[sum(SIZES) :] == 0).all()


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("tma", [0, 1])
def test_rows_epilogue_and_gather(flatten, tma):
    r, w, x = group(SIZES, ROWS), torch.randn(len(SIZES), 48, 40), torch.randn(20, 48)
    index = torch.randint(0, 20, (ROWS,), dtype=torch.int32)
    bias, scale = torch.randn(len(SIZES), 40), torch.rand(ROWS)
    config = CONFIG._replace(flatten=flatten, split=0)
    got = rows.rows_launch(x, w, r.offsets, r.blocks, index, bias, scale, config=config, tma=tma)
    same(got, rows.rows_reference(x, w, r.offsets, r.blocks, index, bias, scale))
    config = CONFIG._replace(impl="copy")
    got = rows.rows_launch(x, w, r.offsets, r.blocks, index, config=config, tma=tma)
    same(got, rows.rows_reference(x, w, r.offsets, r.blocks, index))


@pytest.mark.parametrize("k,n", pairs())
def test_wgrad(k, n):
    r, x, g = group(SIZES, ROWS), torch.randn(ROWS, k), torch.randn(ROWS, n)
    x[sum(SIZES) :], g[sum(SIZES) :] = float("nan"), float("nan")
    got = wgrad.wgrad_launch(x, g, r.offsets, r.order, config=CONFIG, tma=1)
    same(got, wgrad.wgrad_reference(x, g, r.offsets, r.order))
    assert (got[1] == 0).all() and (got[4] == 0).all()


@pytest.mark.parametrize("sizes,k,n", [([0, 300, 0, 0], 20, 33), ([200, 60, 0, 31], 33, 20), ([16] * 5, 40, 33)])
def test_wgrad_in_parts(sizes, k, n):
    """Experts with many rows in parts, which are added up afterwards: some, all or none of them."""
    count = sum(sizes) + 3
    r, x, g = group(sizes, count), torch.randn(count, k), torch.randn(count, n)
    want = wgrad.wgrad_reference(x, g, r.offsets, r.order)
    for cuts in (1, 2, 5):
        config = CONFIG._replace(cuts=cuts)
        same(wgrad.wgrad_launch(x, g, r.offsets, r.order, config=config, tma=1), want)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_scattered(flatten, transposed):
    """Results written in another order, rows past the groups as zeros at their places."""
    r, w = group(SIZES, ROWS), torch.randn(len(SIZES), 48, 40)
    target = torch.randperm(ROWS).to(torch.int32)
    x, config = torch.randn(ROWS, 40 if transposed else 48), CONFIG._replace(flatten=flatten)
    args = (x, w, r.offsets, r.blocks, None, None, None, transposed, target)
    same(rows.rows_launch(*args, config=config, tma=1), rows.rows_reference(*args))


@pytest.mark.parametrize("activation", glu.ACTIVATIONS)
def test_layer_on_arrived_rows(activation, monkeypatch):
    """The layer on rows in any order, as they come from other ranks, equals the references step by step."""
    for module in (glu, rows, tiles, wgrad):  # the interpreter refuses descriptors whose bounds wrap around
        monkeypatch.setattr(module, "tma_ready", lambda *tensors: False)
    order = torch.randperm(ROWS - 9).to(torch.int32)
    r = group(SIZES, ROWS - 9)
    x, w_in, w_out = torch.randn(ROWS - 9, 24), torch.randn(5, 24, 36) * 0.2, torch.randn(5, 18, 24) * 0.2
    g, scale = torch.randn(ROWS - 9, 24), torch.rand(ROWS - 9)
    y, h = experts.rows_forward_launch(x, w_in, w_out, r.offsets, order, r.blocks, r.order, activation, True)
    want_h, a = glu.glu_reference(x, w_in, r.offsets, r.blocks, order, activation)
    same(h, want_h)
    at = (r.offsets, r.blocks)
    same(y, rows.rows_reference(a, w_out, *at, target=order))
    grads = experts.rows_backward_launch(
        g, x, w_in, w_out, scale, h, r.offsets, order, r.blocks, r.order, activation, (True,) * 4
    )
    dh, a, dscale = glu.glu_backward_reference(g, w_out, want_h, scale, *at, order, activation)
    same(grads, (
        rows.rows_reference(dh, w_in, *at, transposed=True, target=order),
        wgrad.wgrad_reference(x, dh, r.offsets, r.order, order),
        wgrad.wgrad_reference(a, g, r.offsets, r.order, None, order),
        dscale,
    ))  # fmt: skip


@pytest.mark.parametrize("dropped", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("activation", glu.ACTIVATIONS)
def test_layer_with_dropped_slots(activation, dropped, monkeypatch):
    """Slots whose id is no expert's add nothing to tokens or gradients; their rows are never written, and NaN here."""
    for module in (glu, rows, tiles, wgrad):
        monkeypatch.setattr(module, "tma_ready", lambda *tensors: False)
    ids = torch.where(torch.rand(70, 3) < dropped, 5, torch.randint(0, 5, (70, 3)))
    offsets, perm, inverse, index = routing.sort_reference(ids, 5)
    r = kernels.Routing(offsets, perm, inverse, index, *routing.schedule_reference(offsets, 210))
    x, w_in, w_out = torch.randn(70, 24), torch.randn(5, 24, 36) * 0.2, torch.randn(5, 18, 24) * 0.2
    g, weights = torch.randn(70, 24), torch.rand(70, 3)
    out, h = experts.forward_launch(x, w_in, w_out, weights, *r, activation, True)
    want, full = experts.forward_reference(x, w_in, w_out, weights, *r, activation, True)
    same(out, want)
    used = int(offsets[-1])
    same(h[:used], full[:used])
    grads = experts.backward_launch(g, x, w_in, w_out, weights, h, *r, activation, (True,) * 4)
    same(grads, experts.backward_reference(g, x, w_in, w_out, weights, full, *r, activation, (True,) * 4))


@pytest.mark.parametrize("impl", ["triton", "copy"])
def test_wgrad_gather(impl):
    r, index = group(SIZES, ROWS), torch.randint(0, 20, (ROWS,), dtype=torch.int32)
    x, g, config = torch.randn(20, 33), torch.randn(20, 40), CONFIG._replace(impl=impl, split=0)
    for x_index, g_index in ((index, None), (None, index), (index, index.flip(0))):
        a, b = x if x_index is not None else torch.randn(ROWS, 33), g if g_index is not None else torch.randn(ROWS, 40)
        got = wgrad.wgrad_launch(a, b, r.offsets, r.order, x_index, g_index, config=config, tma=1)
        same(got, wgrad.wgrad_reference(a, b, r.offsets, r.order, x_index, g_index))


@pytest.mark.parametrize("sizes", [[0, 0, 0], [0, 200, 0], [1, 0, 199]])
def test_one_hot_and_empty(sizes):
    count = sum(sizes)
    r, w, x, g = group(sizes, count), torch.randn(3, 24, 40), torch.randn(count, 24), torch.randn(count, 40)
    same(rows.rows_launch(x, w, r.offsets, r.blocks, config=CONFIG, tma=1),
         rows.rows_reference(x, w, r.offsets, r.blocks))  # fmt: skip
    same(wgrad.wgrad_launch(x, g, r.offsets, r.order, config=CONFIG, tma=1),
         wgrad.wgrad_reference(x, g, r.offsets, r.order))  # fmt: skip


@pytest.mark.parametrize("activation", glu.ACTIVATIONS)
@pytest.mark.parametrize("impl,hidden,inner", [("triton", 48, 40), ("triton", 17, 33), ("split", 33, 15)])
def test_glu(activation, impl, hidden, inner):
    r, index, config = group(SIZES, ROWS), torch.randint(0, 20, (ROWS,), dtype=torch.int32), CONFIG._replace(impl=impl)
    x, w = torch.randn(20, hidden), torch.randn(len(SIZES), hidden, 2 * inner) * hidden**-0.5
    want = glu.glu_reference(x, w, r.offsets, r.blocks, index, activation)
    same(glu.glu_launch(x, w, r.offsets, r.blocks, index, activation, config=config, tma=1), want)
    same(glu.glu_launch(x, w, r.offsets, r.blocks, index, activation, False, config=config, tma=1)[1], want[1])
    g, w_out, scale = torch.randn(20, hidden), torch.randn(len(SIZES), inner, hidden) * 0.3, torch.rand(ROWS)
    args = (g, w_out, want[0], scale, r.offsets, r.blocks, index, activation)
    same(glu.glu_backward_launch(*args, config=config, tma=1), glu.glu_backward_reference(*args))


@pytest.mark.parametrize("columns", [1, 40, 1030])
def test_combine(columns):
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(21)])
    inverse = routing.sort_reference(ids, 5)[2]
    y, weights, g = torch.randn(63, columns), torch.rand(21, 3), torch.randn(21, columns)
    same(combine.combine_launch(y, weights, inverse), combine.combine_reference(y, weights, inverse))
    same(combine.combine_launch(y, None, inverse), combine.combine_reference(y, None, inverse))
    same(combine.combine_transpose_launch(g, y, weights, inverse),
         combine.combine_transpose_reference(g, y, weights, inverse))  # fmt: skip


def test_strides():
    """Transposed weights, expanded gradients, sliced and transposed rows: read as they lie, or copied."""
    r, w = group(SIZES, ROWS), torch.randn(len(SIZES), 40, 24).mT
    for x in (torch.randn(24, ROWS).mT, torch.randn(ROWS, 30)[:, 3:27], torch.ones(1, 24).expand(ROWS, 24)):
        same(rows.rows_launch(x, w, r.offsets, r.blocks, config=CONFIG, tma=1),
             rows.rows_reference(x, w, r.offsets, r.blocks))  # fmt: skip
        g = torch.ones(1, 1).expand(ROWS, 40)
        same(wgrad.wgrad_launch(x, g, r.offsets, r.order, config=CONFIG, tma=1),
             wgrad.wgrad_reference(x, g, r.offsets, r.order))  # fmt: skip


@triton.jit
def far_kernel(address, first, stride, near, KIND: tl.constexpr, SIZE: tl.constexpr):
    """Reads or writes a SIZE² tile at expert (or row) `first` of a tensor whose stride passes 2**31 elements."""
    far = tl.load(address).to(tl.pointer_type(tl.float32))
    index, at = tl.load(first), tl.arange(0, SIZE)
    place = near + at[:, None] * SIZE + at[None, :]
    if KIND == "load_weight":
        tl.store(place, tiles.load_weight(far, index, 0, 0, stride, SIZE, SIZE, SIZE, SIZE, SIZE, False))
    elif KIND == "load_rows":
        valid = at < SIZE
        tl.store(place, tiles.load_rows(far, index + at, valid, 0, stride, SIZE, SIZE, False, True))
    elif KIND == "load_tile":
        tl.store(place, tiles.load_tile(far, index, index + SIZE, 0, stride, SIZE, SIZE, SIZE, False))
    elif KIND == "store_tile":
        tiles.store_tile(far, index, index + SIZE, 0, stride, SIZE, tl.load(place), False)
    elif KIND == "store_weight":
        wgrad.store_weight(far, index, 0, 0, stride, SIZE, SIZE, SIZE, tl.load(place), 0, tl.float32, False)


@pytest.mark.parametrize("kind", ["load_weight", "load_rows", "load_tile", "store_tile", "store_weight"])
def test_offsets_past_int32(kind):
    """index·stride passes 2**31 elements in every address expression; a 32-bit product would land elsewhere.

    The huge tensor does not exist: its base pointer lies so far back that only the wanted tile is real memory.
    """
    size, experts = 16, kind.endswith("weight")
    stride, index = (2**31 // 3, 4) if experts else (16, 2**31 // 16 + 5)
    real, near = torch.randn(size, size), torch.randn(size, size)
    address = torch.tensor([real.data_ptr() - index * stride * 4])
    want = (real if kind.startswith("load") else near).clone()
    far_kernel[(1,)](address, torch.tensor([index], dtype=torch.int32), stride, near, KIND=kind, SIZE=size)
    assert torch.equal(real, want) and torch.equal(near, want)


# ---- rows of logits, and the update ----------------------------------------------------------------------------------
@pytest.mark.parametrize("classes", [5, 4096, 9001])
@pytest.mark.parametrize("expanded", [False, True], ids=["each", "one number"])
def test_cross_entropy_rows(classes, expanded):
    """Also where the cotangent is one number that is expanded to all rows, and logits are a part of a wider buffer."""
    from kernels.cross_entropy import row_gradient_launch, row_loss_launch

    z = (torch.randn(7, classes + 3) * 3)[:, 1 : classes + 1]
    labels = torch.randint(0, classes, (7,))
    labels[2] = -100
    g = torch.full((), 0.3).expand(7) if expanded else torch.rand(7)
    loss, lse = row_loss_launch(z, labels, -100)
    leaf = z.clone().requires_grad_()
    want = torch.nn.functional.cross_entropy(leaf, labels, reduction="none")
    (want * g).sum().backward()
    same(loss, want.detach())
    same(lse, torch.logsumexp(z, 1))
    same(row_gradient_launch(z, g, labels, lse, -100, torch.empty(7, classes)), leaf.grad)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw(scaled, dtype):
    """Three steps against the formula; gradients may be narrower than what they update."""
    from kernels.adamw import adamw_launch

    p, m, v = torch.randn(5000), torch.zeros(5000), torch.zeros(5000)
    q, first, second = p.clone(), m.clone(), v.clone()
    for t in (1, 2, 3):
        g, scale = torch.randn(5000).to(dtype), torch.tensor(0.37)
        numbers = [torch.tensor(-1e-2), torch.tensor(1 - 0.9**t), torch.tensor(1 - 0.99**t)]
        adamw_launch(p, g, m, v, numbers, scale if scaled else None, 0.9, 0.99, 1e-8, 0.1)
        wide = g.float() * (scale if scaled else 1.0)
        first = 0.9 * first + 0.1 * wide
        second = 0.99 * second + 0.01 * wide * wide
        q = q - 1e-2 * ((first / numbers[1]) / ((second / numbers[2]).sqrt() + 1e-8) + 0.1 * q)
        same(p, q), same(m, first), same(v, second)
