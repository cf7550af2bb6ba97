"""`fs.moe` on the GPU: the kernels behind the public ops against the references, syncs, graphs, repeatability."""

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kernel_checks import close, normal, poison

import fsharding as fs
from fsharding.moe import expert_ops, fast

T, K, E, D, H = 700, 4, 16, 256, 192


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    assert fast.present()
    poison()


def inputs(tokens=T):
    ids = torch.rand(tokens, E, device="cuda").topk(K).indices
    x, w_in, w_out = normal(tokens, D), normal(E, D, 2 * H, scale=D**-0.5), normal(E, H, D, scale=H**-0.5)
    return ids, (x, w_in, w_out, torch.rand(tokens, K, device="cuda")), normal(tokens, D)


def fused(ids, x, w_in, w_out, weights):
    return fs.moe.mlp(x, w_in, w_out, fs.moe.route(ids, E), weights)


def composed(ids, x, w_in, w_out, weights):
    r = fs.moe.route(ids, E)
    gate, up = fs.ragged_dot(fs.moe.dispatch(x, r), w_in, r.group_sizes).chunk(2, -1)
    return fs.moe.combine(fs.ragged_dot(F.silu(gate) * up, w_out, r.group_sizes), weights, r)


def step(layer, ids, leaves, g):
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = layer(ids, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


@pytest.mark.parametrize("layer", [fused, composed])
@pytest.mark.parametrize("routing", ["random", "one-hot", "one expert"])
def test_matches_fp32(layer, routing):
    ids, leaves, g = inputs()
    if routing != "random":
        ids = torch.arange(K, device="cuda").expand(T, K) * (routing == "one-hot")
    want = step(layer, ids.cpu(), [t.float().cpu() for t in leaves], g.float().cpu())
    for got, exact in zip(step(layer, ids, leaves, g), want, strict=True):
        close(got, exact.cuda(), tolerance=1e-4)


def test_no_tokens():
    ids, leaves, g = inputs()
    out, *grads = step(fused, ids[:0], (leaves[0][:0], *leaves[1:3], leaves[3][:0]), g[:0])
    assert out.shape == (0, D) and all((d == 0).all() for d in grads)


def test_fp32_on_cuda():
    ids, leaves, g = inputs(60)
    leaves, g = [t.float() for t in leaves], g.float()
    for a, b in zip(step(fused, ids, leaves, g), step(composed, ids, leaves, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_rows_in_any_order():
    """The experts' side of an exchange: gather and scatter by `rows` equal a permuted copy."""
    sizes = torch.tensor([300, 0, 1, 128, 129, 513, 0, 64], dtype=torch.int32, device="cuda")
    order = torch.randperm(int(sizes.sum()), device="cuda")
    schedule = expert_ops.tiles_raw(order, sizes, 1)
    x, g = normal(order.numel(), D), normal(order.numel(), D)
    w_in, w_out = normal(8, D, 2 * H, scale=D**-0.5), normal(8, H, D, scale=H**-0.5)
    scale = torch.rand(order.numel(), device="cuda")
    floats = [t.float() for t in (x, w_in, w_out)]
    y, h = expert_ops.mlp_rows_raw(x, w_in, w_out, sizes, *schedule, "swiglu", True, True)
    want, want_h = expert_ops.mlp_rows_raw(*floats, sizes, *schedule, "swiglu", True, True)
    close(y, want, tolerance=1e-4)
    close(h, want_h, tolerance=1e-4)
    only = expert_ops.mlp_rows_raw(x, w_in, w_out, sizes, *schedule, "swiglu", False, True)
    assert torch.equal(only[1], h) and only[0].shape == (0, D)
    needs = (True,) * 4
    got = expert_ops.mlp_rows_backward_raw(g, x, w_in, w_out, scale, h, sizes, *schedule, "swiglu", needs)
    want = expert_ops.mlp_rows_backward_raw(
        g.float(), *floats, scale, h.float(), sizes, *schedule, "swiglu", needs
    )
    for a, b in zip(got, want, strict=True):
        close(a, b, tolerance=1e-4)


def test_schedule_is_the_references():
    ids = torch.randint(0, E, (T, K))
    perm, _, sizes = expert_ops.ops.route(ids, E)
    got = expert_ops.tiles_raw(perm.cuda(), sizes.cuda(), K)
    for a, b in zip(got, expert_ops.tiles_raw(perm, sizes, K), strict=True):
        assert torch.equal(a.cpu(), b)


def test_group_sizes_of_more_rows_than_there_are():
    """Sizes cannot be read without a sync; rows that do not exist are neither read nor written."""
    x, w = normal(300, D), normal(4, D, H, scale=D**-0.5)
    sizes = torch.tensor([200, 50, 100_000, 7], dtype=torch.int32, device="cuda")
    cut = torch.tensor([200, 50, 50, 0], dtype=torch.int32, device="cuda")
    assert torch.equal(fs.ragged_dot(x, w, sizes), fs.ragged_dot(x, w, cut))


@pytest.mark.parametrize("layer", [fused, composed])
def test_no_host_sync_and_bitwise(layer):
    args = inputs()
    first = step(layer, *args)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [step(layer, *args) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert all(torch.equal(a, b) for run in again for a, b in zip(first, run, strict=True))


@pytest.mark.parametrize("layer", [fused, composed])
def test_graph_with_changing_routing(layer):
    ids, leaves, g = inputs()
    step(layer, ids, leaves, g)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(layer, ids, leaves, g)
    for new in (torch.zeros_like(ids), torch.randint_like(ids, E), torch.arange(K, device="cuda").expand(T, K)):
        ids.copy_(new)
        graph.replay()
        replayed = [o.clone() for o in out]
        assert all(torch.equal(a, b) for a, b in zip(replayed, step(layer, ids, leaves, g), strict=True))
