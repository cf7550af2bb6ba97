"""`fs.moe` on the GPU: the kernels behind the public ops against the references, syncs, graphs, repeatability."""

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kernel_checks import close, normal, poison

import fsharding as fs
from fsharding import P
from fsharding.moe import expert_ops, fast, grouped
from fsharding.moe.exchange import expert_order
from fsharding.program import lockstep
from fsharding.program.emit import FACTORIES

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


@pytest.fixture(params=["ours", "torch"])
def products(request, monkeypatch):
    """Whose kernels serve `fs.ragged_dot`, whatever is faster at these sizes."""
    monkeypatch.setattr(grouped, "WORTH", 0 if request.param == "ours" else float("inf"))


def step(layer, ids, leaves, g):
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = layer(ids, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


@pytest.mark.parametrize("layer", [fused, composed])
@pytest.mark.parametrize("routing", ["random", "one-hot", "one expert"])
def test_matches_fp32(layer, routing, products):
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


def test_group_sizes_of_more_rows_than_there_are(products):
    """Sizes cannot be read without a sync; rows that do not exist are neither read nor written."""
    x, w = normal(300, D), normal(4, D, H, scale=D**-0.5)
    sizes = torch.tensor([200, 50, 100_000, 7], dtype=torch.int32, device="cuda")
    cut = torch.tensor([200, 50, 50, 0], dtype=torch.int32, device="cuda")
    assert torch.equal(fs.ragged_dot(x, w, sizes), fs.ragged_dot(x, w, cut))


@pytest.mark.parametrize("layer", [fused, composed])
def test_no_host_sync_and_bitwise(layer, products):
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
def test_graph_with_changing_routing(layer, products):
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


def test_routes_are_the_references():
    """The kernels' sort gives what `argsort` gives on the CPU, for tokens and for rows that arrived from four ranks."""
    ids = torch.randint(0, E, (T, K))
    for a, b in zip(expert_ops.ops.route(ids.cuda(), E), expert_ops.ops.route(ids, E), strict=True):
        assert torch.equal(a.cpu(), b) and a.dtype == b.dtype
    received = torch.randint(0, 40, (4, 8), dtype=torch.int32)
    received[1], received[:, 3] = 0, 0
    rows = int(received.sum())
    for a, b in zip(expert_order(received.cuda(), rows), expert_order(received, rows), strict=True):
        assert torch.equal(a.cpu(), b) and a.dtype == b.dtype


@pytest.mark.parametrize("shape,experts", [({"efsdp": 2, "ep": 4}, "auto"), ({"efsdp": 4, "ep": 2}, None)])
def test_local_programs_of_all_ranks(shape, experts):
    """What eight ranks would run, in lockstep on one GPU, against one device."""
    g = torch.Generator().manual_seed(0)
    n = lambda *size, s=1.0: torch.randn(*size, generator=g) * s  # noqa: E731
    params = {"router": n(D, E, s=D**-0.5), "w_in": n(E, D, 2 * H, s=D**-0.5), "w_out": n(E, H, D, s=H**-0.5)}
    values = [t.bfloat16() for t in (params["router"], params["w_in"], params["w_out"], n(512, D), n(512, D))]

    def run(router, w_in, w_out, x, target):
        w, ids = torch.topk(torch.softmax((x @ router).float(), -1), K)
        y = fs.moe.mlp(x, w_in, w_out, fs.moe.route(ids, E), w)
        return (y * target).float().sum()

    step = fs.grad(run, argnums=(1, 2, 3))
    rows, rest = P(("efsdp", "ep")), P("ep", "efsdp") if experts else P(None, ("efsdp", "ep"))
    low = fs.shard(step, fs.make_mesh(shape, fake=True), experts=experts, in_specs=(P(), rest, rest, rows, rows),
                   stored_argnums=(0, 1, 2)).lower(*values)  # fmt: skip
    local = low.local
    for node in local.graph.nodes:
        if node.target in FACTORIES:
            node.update_kwarg("device", torch.device("cuda"))
    blocks = [[lockstep.cut(x, spec, local.mesh, rank).cuda() for x, spec in zip(values, local.inputs, strict=True)]
              for rank in range(local.mesh.size)]  # fmt: skip
    out = lockstep.run(local.graph, local.mesh, blocks)
    got = lockstep.join(local, [[x.cpu() for x in own] for own in out])
    one = step(*(v.cuda() for v in values))  # in fp32 another expert might be chosen
    for a, b in zip(got, one, strict=True):
        close(a.cuda(), b, tolerance=1e-4)


@pytest.mark.parametrize("dropped", [0.0, 0.5, 1.0])
def test_dropped_slots(dropped):
    """Rows of slots that name no expert are never written (NaN here), and count as slots of weight zero."""
    from fsharding.kernels import expert_mlp, route

    ids, (x, w_in, w_out, weights), g = inputs()
    gone = torch.rand(T, K, device="cuda") < dropped
    leaves = [t.detach().requires_grad_() for t in (x, w_in, w_out, weights)]
    poison()
    out = expert_mlp(*leaves[:3], route(torch.where(gone, E, ids), E), leaves[3])
    poison()
    got = [out.detach(), *torch.autograd.grad(out, leaves, g)]
    want = step(fused, ids, (x, w_in, w_out, torch.where(gone, 0, weights)), g)
    want[4] = torch.where(gone, 0, want[4])
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        if b.any():
            close(a, b)
        else:
            assert not a.any()
