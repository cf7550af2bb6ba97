"""Qwen3-MoE: the model's own properties, then logits, losses and every gradient against transformers."""

from __future__ import annotations

import dataclasses

import optree
import pytest
import torch
from helpers import run_ranks

import fsharding as fs
from fsharding.errors import ShardingError
from fsharding.models import qwen3_moe as model
from fsharding.models.qwen3_moe import IGNORE, Config

BASE = Config(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=24,
    intermediate_size=40,
    num_experts=6,
    num_experts_per_tok=2,
    rope_theta=10000.0,
    router_aux_loss_coef=0.02,
)
CONFIGS = {
    "gqa, normalised top-k": {},
    "top-k as it is": dict(norm_topk_prob=False, num_experts_per_tok=3),
    "tied embeddings": dict(tie_word_embeddings=True),
    "dense layers mixed in": dict(decoder_sparse_step=2, mlp_only_layers=(0,)),
    "biases, all heads": dict(attention_bias=True, num_key_value_heads=4, head_dim=8),
    "one key head, top-1": dict(num_key_value_heads=1, num_experts_per_tok=1, norm_topk_prob=False, head_dim=10),
}


def random_params(cfg, seed=0):
    g = torch.Generator().manual_seed(seed)
    return optree.tree_map(lambda p: torch.randn(p.shape, generator=g) * 0.3, model.axes(cfg))


def random_batch(cfg, seed=1, rows=3, length=11):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(cfg.vocab_size, (rows, length), generator=g)
    labels = torch.cat((tokens[:, 1:], torch.full((rows, 1), IGNORE)), 1)
    labels[0, 2:5] = IGNORE
    return {"tokens": tokens, "labels": labels}


def value_and_grad(params, batch, cfg):
    leaves, spec = optree.tree_flatten(optree.tree_map(lambda x: x.clone().requires_grad_(), params))
    total, weight = model.loss(optree.tree_unflatten(spec, leaves), batch, cfg)
    grads = torch.autograd.grad(total / weight, leaves)
    return (total / weight).detach(), optree.tree_unflatten(spec, grads)


def assert_near(a, b, what, tolerance=1e-5):
    error = (a - b).norm() / b.norm().clamp(min=1e-12)
    assert error <= tolerance, f"{what}: relative error {error:.2e}"


# ---- without transformers --------------------------------------------------------------------------------------------
def test_shapes_and_statistics():
    batch = random_batch(BASE)
    logits, stats = model.forward(random_params(BASE), batch["tokens"], BASE)
    assert logits.shape == (3, 11, 61) and logits.dtype == torch.float32
    assert [c.sum().item() for c in stats["load"]] == [33 * 2] * 3
    assert stats["balance"].shape == ()


def test_future_tokens_do_not_change_past_logits():
    params, tokens = random_params(BASE), random_batch(BASE)["tokens"]
    before, _ = model.forward(params, tokens, BASE)
    tokens[:, 6:] = (tokens[:, 6:] + 1) % BASE.vocab_size
    after, _ = model.forward(params, tokens, BASE)
    torch.testing.assert_close(after[:, :6], before[:, :6], rtol=0, atol=1e-5)
    assert (after[:, 6:] - before[:, 6:]).abs().max() > 1e-2


def test_masked_labels_count_nowhere():
    params, batch = random_params(BASE), random_batch(BASE)
    cfg = dataclasses.replace(BASE, router_aux_loss_coef=0.0)
    total, weight = model.loss(params, batch, cfg)
    logits, _ = model.forward(params, batch["tokens"], cfg)
    labels = batch["labels"]
    rows = -torch.log_softmax(logits, -1)[labels != IGNORE].gather(1, labels[labels != IGNORE][:, None])
    torch.testing.assert_close(total, rows.sum())
    assert weight.item() == (labels != IGNORE).sum().item() == 3 * 10 - 3
    nothing = {**batch, "labels": torch.full_like(labels, IGNORE)}
    assert [x.item() for x in model.loss(params, nothing, BASE)] == [0.0, 0.0]


def test_micro_batches_add_up_without_the_balancing_term():
    params, batch = random_params(BASE), random_batch(BASE)
    cfg = dataclasses.replace(BASE, router_aux_loss_coef=0.0)
    whole = model.loss(params, batch, cfg)
    parts = [model.loss(params, {k: v[i : i + 1] for k, v in batch.items()}, cfg) for i in range(3)]
    for i in range(2):
        torch.testing.assert_close(sum(p[i] for p in parts), whole[i])


def test_zero_logits_cost_the_logarithm_of_the_vocabulary():
    params = random_params(BASE)
    params["head"] = torch.zeros_like(params["head"])
    total, weight = model.loss(params, random_batch(BASE), dataclasses.replace(BASE, router_aux_loss_coef=0.0))
    torch.testing.assert_close(total / weight, torch.tensor(61.0).log())


def test_balance_loss_of_known_routings():
    tokens, e, k = 12, BASE.num_experts, BASE.num_experts_per_tok
    even = (torch.full((e,), tokens * k / e), torch.full((e,), tokens / e))
    two = tuple(torch.stack([x, x]) for x in even)
    assert model.balance_loss([two], tokens, BASE).item() == pytest.approx(k)
    one = tuple(x[None] for x in even)
    assert model.balance_loss([one, two], tokens, BASE).item() == pytest.approx(k)
    hot = (torch.tensor([12.0, 12, 0, 0, 0, 0]), torch.tensor([12.0, 0, 0, 0, 0, 0]))
    assert model.balance_loss([tuple(x[None] for x in hot)], tokens, BASE).item() == pytest.approx(e)
    assert model.balance_loss([], tokens, BASE).item() == 0.0


def test_padding_does_not_enter_the_statistics():
    params, tokens = random_params(BASE), random_batch(BASE)["tokens"]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 8:] = False
    other = torch.where(mask, tokens, (tokens + 7) % BASE.vocab_size)
    (a, sa), (b, sb) = (model.forward(params, t, BASE, mask) for t in (tokens, other))
    torch.testing.assert_close(a[mask], b[mask], rtol=0, atol=1e-5)
    torch.testing.assert_close(sa["balance"], sb["balance"])
    assert [c.sum().item() for c in sa["load"]] == [24 * 2] * 3
    alone, stats = model.forward(params, tokens[:, :8], BASE)
    torch.testing.assert_close(sa["balance"], stats["balance"])


def test_gradients_reach_every_leaf_and_agree_with_func_grad():
    params, batch = random_params(BASE), random_batch(BASE)
    _, expected = value_and_grad(params, batch, BASE)
    leaves, spec = optree.tree_flatten(params)

    def mean(*x):
        total, weight = model.loss(optree.tree_unflatten(spec, x), batch, BASE)
        return total / weight

    got = torch.func.grad(mean, argnums=tuple(range(len(leaves))))(*leaves)
    for g, e in zip(got, optree.tree_leaves(expected), strict=True):
        assert e.abs().max() > 0
        torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-7)


def test_bfloat16_parameters_give_bfloat16_logits_and_a_float32_loss():
    params = optree.tree_map(torch.Tensor.bfloat16, random_params(BASE))
    batch = random_batch(BASE)
    logits, _ = model.forward(params, batch["tokens"], BASE)
    value, grads = value_and_grad(params, batch, BASE)
    exact, _ = value_and_grad(random_params(BASE), batch, BASE)
    assert logits.dtype == torch.bfloat16 and value.dtype == torch.float32
    assert_near(value, exact, "loss", 0.05)
    assert all(g.dtype == torch.bfloat16 and g.isfinite().all() for g in optree.tree_leaves(grads))


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "dp2ep", "legacy_ep"])
@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS)
def test_every_layout_places_every_leaf(layout, change):
    cfg = dataclasses.replace(BASE, **change)
    mesh = fs.make_mesh({"replicate": 2, "efsdp": 4, "ep": 2}, fake=True)
    specs = getattr(fs.layouts, layout)(mesh)(model.axes(cfg))
    if layout in ("dp2ep", "legacy_ep"):
        moe = next(layer["mlp"] for i, layer in enumerate(specs["layers"]) if cfg.is_moe(i))
        assert moe["w_in"][0] == moe["w_out"][0] == "ep"
        assert "ep" not in specs["layers"][-1]["attn"]["w_q"] or layout == "dp2ep"


@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("fused", [True, False])
def test_key_map_round_trip(change, fused):
    cfg = dataclasses.replace(BASE, **change)
    params = random_params(cfg)
    state = model.to_hf_state(params, cfg, fused)
    assert all(v.is_contiguous() for v in state.values())
    assert ("lm_head.weight" in state) != cfg.tie_word_embeddings
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0),
                    model.from_hf_state(state, cfg), params)


def test_key_map_errors():
    state = model.to_hf_state(random_params(BASE), BASE, fused=False)
    with pytest.raises(ShardingError, match=r"1 keys are missing \(model.layers.1.mlp.experts.3.up_proj.weight\), 0"):
        model.from_hf_state({k: v for k, v in state.items() if "1.mlp.experts.3.up" not in k}, BASE)
    with pytest.raises(ShardingError, match=r"1 are unexpected \(score.weight\)"):
        model.from_hf_state({**state, "score.weight": torch.zeros(1)}, BASE)
    with pytest.raises(ShardingError, match=r"norm has shape \(5,\); this config says \(32,\)"):
        model.from_hf_state({**state, "model.norm.weight": torch.zeros(5)}, BASE)
    tied = dataclasses.replace(BASE, tie_word_embeddings=True)
    with pytest.raises(ShardingError, match="lm_head.weight differs from the embedding"):
        model.from_hf_state(state, tied)
    same = {**state, "lm_head.weight": state["model.embed_tokens.weight"], "model.rotary_emb.inv_freq": torch.ones(2)}
    assert "head" not in model.from_hf_state(same, tied)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_key_value_heads=3), "must divide"),
        (dict(head_dim=7), "must be even"),
        (dict(num_experts_per_tok=7), "between 1 and"),
        (dict(mlp_only_layers=(1,), intermediate_size=0), "layer 1 is dense"),
    ],
)
def test_sizes_that_do_not_fit(change, message):
    with pytest.raises(ShardingError, match=message):
        dataclasses.replace(BASE, **change)


# ---- over ranks ------------------------------------------------------------------------------------------------------
def compare_with_one_device(rank, world, cases):
    """Worst relative errors of loss and gradients; the first rank has nothing but padding."""
    mesh, out = fs.make_mesh({"efsdp": 2, "ep": 2}), {}
    for name, layout in cases.items():
        cfg = dataclasses.replace(BASE, **CONFIGS[name])
        params, batch = random_params(cfg), random_batch(cfg, rows=2 * world)
        batch["mask"] = torch.ones_like(batch["tokens"], dtype=torch.bool)
        batch["mask"][:2], batch["mask"][3, 6:] = False, False
        batch["labels"][~batch["mask"]] = IGNORE

        def mean(p, b, cfg=cfg):
            total, weight = model.loss(p, b, cfg)
            return total / weight

        step = fs.value_and_grad(mean)
        value, grads = step(params, batch)
        placed = fs.device_put(params, mesh, getattr(fs.layouts, layout)(mesh)(model.axes(cfg)))
        mine = {k: v[2 * rank : 2 * rank + 2].contiguous() for k, v in batch.items()}
        sharded = fs.shard(step, mesh, experts=None if layout == "fsdp" else "auto")
        got = fs.device_get(sharded(placed, fs.from_local(mine, mesh, fs.P(mesh.data_axes))))
        errors = optree.tree_map(lambda a, b: ((a - b).norm() / b.norm().clamp(min=1e-12)).item(), got, (value, grads))
        out[name] = max(optree.tree_leaves(errors))
    return out


def test_every_config_on_four_ranks_with_a_rank_of_padding():
    cases = dict(zip(CONFIGS, ["dp2ep", "legacy_ep", "dp2ep", "fsdp", "dp2ep", "dp2ep"], strict=True))
    for errors in run_ranks(4, compare_with_one_device, cases, timeout=240):
        assert errors.keys() == cases.keys()
        assert max(errors.values()) <= 1e-5, errors


# ---- against transformers --------------------------------------------------------------------------------------------
def hf_model(cfg, attention="eager"):
    transformers = pytest.importorskip("transformers")
    names = {f.name for f in dataclasses.fields(cfg)} - {"mlp_only_layers"}
    given = {name: getattr(cfg, name) for name in names}
    hf_cfg = transformers.Qwen3MoeConfig(
        **given, mlp_only_layers=list(cfg.mlp_only_layers), output_router_logits=True, pad_token_id=None,
        attn_implementation=attention,
    )
    if hasattr(hf_cfg, "rope_parameters"):
        hf_cfg.rope_parameters = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    net = transformers.Qwen3MoeForCausalLM(hf_cfg).float()
    fused = any(key.endswith("gate_up_proj") for key in net.state_dict())
    state = model.to_hf_state(random_params(cfg), cfg, fused)
    missing = net.load_state_dict(state, strict=False).missing_keys
    assert not set(missing) - {"lm_head.weight"}
    net.tie_weights()
    return hf_cfg, net


@pytest.mark.hf
@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS)
def test_logits_losses_and_gradients_are_those_of_transformers(change):
    cfg = dataclasses.replace(BASE, **change)
    hf_cfg, net = hf_model(cfg)
    assert Config.from_hf(hf_cfg) == cfg
    state = {k: v.detach().clone() for k, v in net.state_dict().items()}
    params, batch = model.from_hf_state(state, cfg), random_batch(cfg)
    shifted = torch.cat((torch.full((3, 1), IGNORE), batch["labels"][:, :-1]), 1)  # transformers shifts by itself
    out = net(input_ids=batch["tokens"], labels=shifted)
    out.loss.backward()

    logits, stats = model.forward(params, batch["tokens"], cfg)
    assert_near(logits, out.logits, "logits")
    assert_near(stats["balance"], out.aux_loss, "aux loss")
    value, grads = value_and_grad(params, batch, cfg)
    assert_near(value, out.loss, "loss")
    theirs = {k: p.grad for k, p in net.named_parameters()}
    ours = model.to_hf_state(grads, cfg, fused=any(k.endswith("gate_up_proj") for k in theirs))
    assert ours.keys() == theirs.keys()
    for key, g in theirs.items():
        assert_near(ours[key], g, key)


@pytest.mark.hf
def test_a_padding_mask_is_that_of_transformers():
    hf_cfg, net = hf_model(BASE, "sdpa")
    params, batch = model.from_hf_state(net.state_dict(), BASE), random_batch(BASE)
    mask = torch.ones_like(batch["tokens"])
    mask[1, 7:] = 0
    out = net(input_ids=batch["tokens"], attention_mask=mask)
    logits, stats = model.forward(params, batch["tokens"], BASE, mask.bool())
    assert_near(logits[mask.bool()], out.logits[mask.bool()], "logits")
    assert_near(stats["balance"], out.aux_loss, "aux loss")


@pytest.mark.hf
def test_unsupported_configs_are_refused():
    hf_cfg, _ = hf_model(BASE)
    for name, value in (("use_sliding_window", True), ("attention_dropout", 0.1), ("hidden_act", "gelu")):
        old = getattr(hf_cfg, name)
        setattr(hf_cfg, name, value)
        with pytest.raises(ShardingError, match=name):
            Config.from_hf(hf_cfg)
        setattr(hf_cfg, name, old)
    hf_cfg.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    with pytest.raises(ShardingError, match="rope_type"):
        Config.from_hf(hf_cfg)
