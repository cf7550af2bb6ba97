"""Tensor parallelism in the global view: a model axis beside the data axes, equal to one device."""

import pytest
import torch
from programs import TOLERANCE, worst

import fsharding as fs
from fsharding import P
from fsharding import tree as trees
from fsharding.models import qwen3_moe

CONFIG = qwen3_moe.Config(
    vocab_size=37,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=12,
    num_experts=4,
    num_experts_per_tok=2,
    intermediate_size=24,
    mlp_only_layers=(0,),
    attention_bias=True,
)
MESHES = [
    {"efsdp": 2, "ep": 2, "tp": 2},
    {"replicate": 2, "efsdp": 1, "ep": 2, "tp": 2},
    {"efsdp": 4, "ep": 1, "tp": 2},
    {"tp": 2, "efsdp": 2, "ep": 2},
    {"efsdp": 1, "tp": 2, "ep": 4},
]


def parameters(mesh=None, specs=None):
    one = fs.make_mesh({"efsdp": 1}, fake=True)
    params = fs.device_get(fs.init(qwen3_moe.axes(CONFIG), one, seed=0))
    params = trees.map_with_path(lambda _, x: x * 5 if x.ndim > 1 else x + 0.1, params)
    return params if mesh is None else fs.device_put(params, mesh, specs)


def batch():
    g = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, 37, (8, 6), generator=g) for _ in "xy")
    labels[0] = labels[1, 1:] = qwen3_moe.IGNORE
    return {"tokens": tokens, "labels": labels}


def loss(params, b):
    total, weight = qwen3_moe.loss(params, b, CONFIG)
    return total / weight


def step_of(optimizer):
    def step(params, state, b):
        value, grads = fs.value_and_grad(loss)(params, b)
        updates, state = optimizer.update(grads, state, params)
        return fs.optim.apply_updates(params, updates), state, value

    return step


def some_slow(values, fast):
    return [v if i < fast else pytest.param(v, marks=pytest.mark.slow) for i, v in enumerate(values)]


@pytest.mark.parametrize("sizes", some_slow(MESHES, 2), ids=lambda m: "x".join(f"{k}{v}" for k, v in m.items()))
def test_loss_and_every_gradient(sizes):
    want = fs.value_and_grad(loss)(parameters(), batch())
    with fs.simulate(8):
        mesh = fs.make_mesh(sizes, model_axes=("tp",))
        base = fs.layouts.dp2ep(mesh)
        specs = fs.layouts.tensor_parallel(base)(qwen3_moe.axes(CONFIG))
        args = parameters(mesh, specs), fs.device_put(batch(), mesh, P(mesh.data_axes))
        f = fs.shard(fs.value_and_grad(loss), mesh, strict=True)  # nothing is gathered for want of a rule
        got = f(*args)
        assert worst(fs.device_get(got), want) <= TOLERANCE
        assert [fs.spec_of(g) for g in trees.flatten(got[1])[0]] == [fs.spec_of(x) for x in trees.flatten(args[0])[0]]
        low = f.lower(*args)
        over_tp = [(c.kind, c.phase) for c in low.collectives() if "tp" in c.axes]
        assert {kind for kind, _ in over_tp} == {"all_reduce"}, "no weight is gathered over tp"
        assert over_tp.count(("all_reduce", "forward")) == CONFIG.num_hidden_layers, "one sum a block of attention"
        plain = fs.shard(fs.value_and_grad(loss), mesh).lower(parameters(mesh, base(qwen3_moe.axes(CONFIG))), args[1])
        assert low.cost_analysis()["flops"] < plain.cost_analysis()["flops"]


@pytest.mark.parametrize("name", some_slow(["sgd", "adamw"], 1))
def test_a_trajectory(name):
    rule = fs.optim.sgd(0.1, momentum=0.9) if name == "sgd" else fs.optim.adamw(1e-2, eps=1e-4)
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), rule)
    double = lambda tree: trees.map_with_path(lambda _, x: x.double(), tree)
    alone = double(parameters())
    state, expected = optimizer.init(alone), []
    for _ in range(3):
        alone, state, value = step_of(optimizer)(alone, state, batch())
        expected.append(value)
    with fs.simulate(8):
        mesh = fs.make_mesh(MESHES[0], model_axes=("tp",))
        specs = fs.layouts.tensor_parallel(fs.layouts.dp2ep(mesh))(qwen3_moe.axes(CONFIG))
        params = fs.device_put(double(parameters()), mesh, specs)
        state = fs.shard(optimizer.init, mesh)(params)
        rows = fs.device_put(batch(), mesh, P(mesh.data_axes))
        step = fs.shard(step_of(optimizer), mesh, donate_argnums=(0, 1))
        for want in expected:
            params, state, value = step(params, state, rows)
            assert torch.allclose(value, want, rtol=1e-9)
        assert worst(fs.device_get(params), alone) <= 1e-9


def test_local_and_global_view_agree():
    """The same block by hand: columns, rows and one sum."""
    sizes, specs = [(6, 12), (12, 6), (8, 6)], (P(None, "tp"), P("tp"), P("data"))
    args = [torch.randn(*size, generator=torch.Generator().manual_seed(k)) for k, size in enumerate(sizes)]
    block = lambda w_in, w_out, x: torch.tanh(x @ w_in) @ w_out
    derived = lambda f: fs.value_and_grad(lambda *a: f(*a).sin().mean(), argnums=(0, 1, 2))
    want = derived(block)(*args)
    with fs.simulate(8):
        mesh = fs.make_mesh({"data": 2, "tp": 4}, model_axes=("tp",))
        placed = [fs.device_put(x, mesh, spec) for x, spec in zip(args, specs, strict=True)]
        by_hand = fs.shard_map(lambda *a: fs.psum(block(*a), "tp"), mesh, specs, P("data"))
        for f in (block, by_hand):
            assert worst(fs.device_get(fs.shard(derived(f), mesh)(*placed)), want) <= TOLERANCE
