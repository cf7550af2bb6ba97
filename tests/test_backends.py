"""The ``inductor`` back end against the program as it is: layouts, recomputation, scan; and the limits of capture."""

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from programs import TOLERANCE, D, V, attention, batch, init, moe, specs, worst

import fsharding as fs
from fsharding import P
from fsharding import tree as trees
from fsharding.program import capture, lockstep, regions


def model(policy, use_scan):
    def layer(h, p):
        h = h + attention(p, F.rms_norm(h, (D,), p["norm"]))
        y, balance = moe(p, F.rms_norm(h, (D,)))
        return h + y, balance

    body = fs.remat(layer, policy) if policy else layer

    def loss(params, b):
        h = F.embedding(b["x"], params["embed"])
        if use_scan:
            h, balance = fs.scan(body, h, params["layers"])
            balance = balance.sum()
        else:
            balance = 0.0
            for p in params["layers"]:
                h, extra = body(h, p)
                balance = balance + extra
        return fs.nn.cross_entropy(h * params["gain"], params["head"], b["y"]) + 0.01 * balance

    return loss


def with_regions(low):
    """The local graph with every run of ops replaced by one compiled call, for all ranks in lockstep."""
    graph, copies = fx.Graph(), {}
    graph.output(graph.graph_copy(low.local.graph, copies))
    return graph, regions.compile_regions(graph)


def evaluated(low, graph, args):
    flat = [*trees.flatten_with_paths(list(args))[1], *low.program.constants]
    mesh = low.local.mesh
    blocks = [
        [lockstep.cut(torch.as_tensor(x), spec, mesh, rank) for x, spec in zip(flat, low.local.inputs, strict=True)]
        for rank in range(mesh.size)
    ]
    return lockstep.join(low.local, lockstep.run(graph, mesh, blocks))


@pytest.mark.slow
@pytest.mark.parametrize("layout, shape", [("dp2ep", (1, 2, 2)), ("hsdp", (2, 2, 1))], ids=str)
def test_compiled_regions_agree_with_the_program_as_it_is(layout, shape):
    params, b = init(layers=2), batch()
    mesh = fs.make_mesh(dict(zip(("replicate", "efsdp", "ep"), shape, strict=True)), fake=True)
    where = (specs(params, layout), P(("replicate", "efsdp", "ep")))
    for policy in (None, fs.policies.nothing):
        for use_scan in (False, True):
            sharded = fs.shard(fs.value_and_grad(model(policy, use_scan)), mesh, in_specs=where, experts="auto")
            low = sharded.lower(params, b)
            plain = evaluated(low, low.local.graph, (params, b))
            graph, count = with_regions(low)
            assert count > 3
            assert worst(evaluated(low, graph, (params, b)), plain) <= TOLERANCE


def test_regions_hold_no_collective_no_kernel_of_ours_and_no_routed_rows():
    params = init(layers=2)
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2}, fake=True)
    where = (specs(params, "dp2ep"), P(("efsdp", "ep")))
    low = fs.shard(fs.value_and_grad(model(None, False)), mesh, in_specs=where).lower(params, batch())
    graph, count = with_regions(low)
    calls = [n for n in graph.nodes if isinstance(n.target, regions.Region)]
    assert len(calls) == count
    for node in calls:
        assert all(name.startswith(("aten.", "<built-in function getitem>")) for name in node.meta["custom"]["region"])
    before = [n.target for n in low.local.graph.nodes if not str(n.target).startswith("aten")]
    after = [n.target for n in graph.nodes if not isinstance(n.target, regions.Region)]
    for target in set(before):
        if "getitem" not in str(target):
            assert before.count(target) == after.count(target), target  # all collectives and kernels, in place


def test_a_layer_is_compiled_once():
    params = init(layers=6, moe=False)
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 1}, fake=True)

    def loss(p, b):
        h = F.embedding(b["x"], p["embed"])
        for q in p["layers"]:
            h = h + torch.tanh(F.rms_norm(h, (D,), q["norm"]) @ q["up"]) @ q["down"].repeat(2, 1)
        return F.cross_entropy((h @ p["head"]).reshape(-1, V), b["y"].reshape(-1))

    where = (specs(params, "fsdp"), P("efsdp"))
    low = fs.shard(fs.value_and_grad(loss), mesh, in_specs=where).lower(params, batch())
    graph, count = with_regions(low)
    texts = [n.target.text for n in graph.nodes if isinstance(n.target, regions.Region)]
    assert len(texts) == count and len(set(texts)) <= count - 6, (count, len(set(texts)))


def test_a_captured_step_needs_a_gpu_and_no_look_of_the_host():
    params = init(layers=1)
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2}, fake=True)
    where = (specs(params, "dp2ep"), P(("efsdp", "ep")))
    low = fs.shard(model(None, False), mesh, in_specs=where).lower(params, batch())
    with pytest.raises(fs.ShardingError, match="needs a GPU"):
        capture.refuse_host_sync(low.local.graph, torch.device("cpu"))
    with pytest.raises(fs.ShardingError, match=r"programs\.py:\d+: `host_sizes.*split sizes"):
        capture.refuse_host_sync(low.local.graph, torch.device("cuda"))
    local = fs.shard(model(None, False), mesh, in_specs=(specs(params, "fsdp"), where[1]), experts=None)
    capture.refuse_host_sync(local.lower(params, batch()).local.graph, torch.device("cuda"))


def test_on_one_device_in_process():
    mesh = fs.make_mesh({"d": 1})
    w, x = torch.randn(6, 6), torch.randn(4, 6)

    def step(w, x):
        return fs.value_and_grad(lambda w, x: (torch.tanh(x @ w).square() + 1).log().mean())(w, x)

    want = step(w, x)
    sharded = fs.shard(step, mesh, backend="inductor")
    for _ in range(2):
        assert worst(fs.device_get(sharded(w, x)), want) <= TOLERANCE
    with pytest.raises(fs.ShardingError, match="needs a GPU"):
        fs.shard(step, mesh, backend="cudagraph")(w, x)
