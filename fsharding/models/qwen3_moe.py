"""Qwen3-MoE as pure functions over a tree of parameters, with its Hugging Face key map.

Legend: B batch, T positions (or B*T tokens where the batch is flat), D hidden size, V vocabulary, N query heads,
G key/value heads, H head dim, E experts, k experts a token, R = T*k routed rows, F expert hidden size, I dense hidden
size, L layers. Weights multiply from the right (``x @ w``), so they are [in, out]; gate and up projections are one
weight, ``[gate | up]`` along the last dim.

The architecture is that of the Qwen3 technical report (Qwen Team, 2025): pre-norm blocks, rotary positions (Su et al.,
2021), grouped-query attention with RMS-normalised queries and keys, SwiGLU experts chosen by a softmax router.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F

from fsharding.annotate.param import Param
from fsharding.errors import ShardingError
from fsharding.moe import mlp as expert_mlp
from fsharding.moe import route
from fsharding.program.cross_entropy import cross_entropy
from fsharding.program.scan import scan
from fsharding.tree import map_with_path

IGNORE = -100


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a model, under Hugging Face's names. Hashable, so that it may be a static argument.

    Raises ShardingError where sizes do not fit each other.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int = 0
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    router_aux_loss_coef: float = 1e-3
    initializer_range: float = 0.02

    def __post_init__(self):
        object.__setattr__(self, "mlp_only_layers", tuple(self.mlp_only_layers))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ShardingError(
                f"Config: num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ShardingError(f"Config: head_dim={self.head_dim} must be even; rotary positions turn pairs")
        if any(map(self.is_moe, range(self.num_hidden_layers))):
            if not 1 <= self.num_experts_per_tok <= self.num_experts:
                raise ShardingError(
                    f"Config: num_experts_per_tok={self.num_experts_per_tok} must be between 1 and "
                    f"num_experts={self.num_experts}"
                )
        dense = [i for i in range(self.num_hidden_layers) if not self.is_moe(i)]
        if dense and self.intermediate_size < 1:
            raise ShardingError(f"Config: layer {dense[0]} is dense; set intermediate_size")

    @classmethod
    def from_hf(cls, hf_config: Any) -> Config:
        """Read a ``transformers`` ``Qwen3MoeConfig`` of any version (or any object with its attributes).

        Raises ShardingError for what this model does not compute: sliding windows, scaled rotary positions, dropout,
        another activation.
        """
        rope = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
        theta = rope.get("rope_theta", getattr(hf_config, "rope_theta", None))
        refused = {
            "use_sliding_window": getattr(hf_config, "use_sliding_window", False),
            "rope_type": rope.get("rope_type", rope.get("type", "default")) != "default",
            "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
            "attention_dropout": getattr(hf_config, "attention_dropout", 0.0),
            "hidden_act": getattr(hf_config, "hidden_act", "silu") != "silu",
            "rope_theta": theta is None,
        }
        wrong = [name for name, bad in refused.items() if bad]
        if wrong:
            raise ShardingError(
                f"Config.from_hf: {', '.join(wrong)} of the given config is not supported here; this model has full "
                "attention, unscaled rotary positions with a rope_theta, no dropout and silu"
            )
        given = {f.name: getattr(hf_config, f.name) for f in dataclasses.fields(cls) if hasattr(hf_config, f.name)}
        heads, hidden = hf_config.num_attention_heads, hf_config.hidden_size
        given["head_dim"] = getattr(hf_config, "head_dim", None) or hidden // heads
        given["mlp_only_layers"] = tuple(given.get("mlp_only_layers") or ())
        return cls(**{**given, "rope_theta": float(theta)})

    def is_moe(self, layer: int) -> bool:
        """Whether this layer (from 0) has experts; the others have one dense MLP."""
        chosen = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return chosen and layer not in self.mlp_only_layers


# ---- parameters ------------------------------------------------------------------------------------------------------
def axes(cfg: Config, dtype: torch.dtype = torch.float32) -> dict:
    """The parameters, described: a tree of ``fs.Param`` with shapes, logical axes and initial values."""

    def matrix(names, *shape):
        return Param(shape, dtype, axes=names, init=("normal", cfg.initializer_range))

    def scale(name, size):
        return Param((size,), dtype, axes=(name,), init="ones")

    d, v = cfg.hidden_size, cfg.vocab_size
    tree = {
        "embed": matrix(("vocab", "embed"), v, d),
        "layers": [_layer_axes(cfg, i, matrix, scale, dtype) for i in range(cfg.num_hidden_layers)],
        "norm": scale("embed", d),
    }
    if not cfg.tie_word_embeddings:
        tree["head"] = matrix(("embed", "vocab"), d, v)
    return tree


def _layer_axes(cfg, i, matrix, scale, dtype):
    d, h = cfg.hidden_size, cfg.head_dim
    q, kv = cfg.num_attention_heads * h, cfg.num_key_value_heads * h
    attn = {
        "w_q": matrix(("embed", "heads"), d, q),
        "w_k": matrix(("embed", "kv_heads"), d, kv),
        "w_v": matrix(("embed", "kv_heads"), d, kv),
        "w_o": matrix(("heads", "embed"), q, d),
        "q_norm": scale("head_dim", h),
        "k_norm": scale("head_dim", h),
    }
    if cfg.attention_bias:
        for name, axis, size in (("q", "heads", q), ("k", "kv_heads", kv), ("v", "kv_heads", kv), ("o", "embed", d)):
            attn[f"b_{name}"] = Param((size,), dtype, axes=(axis,), init="zeros")
    if cfg.is_moe(i):
        e, f = cfg.num_experts, cfg.moe_intermediate_size
        mlp = {
            # the router's expert dim is not an expert dim of storage: every token needs all of its columns
            "router": matrix(("embed", None), d, e),
            "w_in": matrix(("expert", "embed", "mlp"), e, d, 2 * f),
            "w_out": matrix(("expert", "mlp", "embed"), e, f, d),
        }
    else:
        f = cfg.intermediate_size
        mlp = {"w_in": matrix(("embed", "mlp"), d, 2 * f), "w_out": matrix(("mlp", "embed"), f, d)}
    return {"attn_norm": scale("embed", d), "attn": attn, "mlp_norm": scale("embed", d), "mlp": mlp}


# ---- forward ---------------------------------------------------------------------------------------------------------
def forward(params: dict, tokens_BT: torch.Tensor, cfg: Config, mask_BT: torch.Tensor | None = None):
    """Logits of every next token, and the routers' statistics.

    Args:
        tokens_BT: integer ids.
        mask_BT: True for real tokens, False for padding, which must stand at the end of a row. Padding does not enter
            the statistics; being causal, attention keeps it from real tokens by itself.

    Returns:
        logits_BTV, in the parameters' dtype, and ``{"balance": 0-d float32, "load": [int or float [E], one a layer]}``:
        the balancing loss (see ``balance_loss``) and the number of choices of each expert.
    """
    x, stats = features(params, tokens_BT, cfg, mask_BT)
    return x @ head_of(params, cfg), stats


def head_of(params: dict, cfg: Config) -> torch.Tensor:
    """The output projection [D, V]: the embedding's transpose where the two are tied."""
    return params["embed"].T if cfg.tie_word_embeddings else params["head"]


def features(params: dict, tokens_BT: torch.Tensor, cfg: Config, mask_BT: torch.Tensor | None = None):
    """As :func:`forward`, with the normalised hidden states [B, T, D] that the head reads in place of the logits."""
    eps, (cos, sin) = cfg.rms_norm_eps, rotary(tokens_BT.shape[1], cfg, tokens_BT.device)
    x = F.embedding(tokens_BT, params["embed"])

    def block(x, layer):
        x = x + attention(layer["attn"], F.rms_norm(x, x.shape[-1:], layer["attn_norm"], eps), cos, sin, cfg)
        h = F.rms_norm(x, x.shape[-1:], layer["mlp_norm"], eps)
        if "router" not in layer["mlp"]:
            return x + swiglu(h @ layer["mlp"]["w_in"]) @ layer["mlp"]["w_out"], None
        y, counts, probs = moe(layer["mlp"], h.reshape(-1, h.shape[-1]), cfg, mask_BT)
        return x + y.reshape(x.shape), (counts, probs)

    stats = []
    for dense, run in itertools.groupby(params["layers"], lambda layer: "router" not in layer["mlp"]):
        x, found = scan(block, x, list(run))  # equal layers are traced once
        if not dense:
            stats.append(found)
    x = F.rms_norm(x, x.shape[-1:], params["norm"], eps)
    real = tokens_BT.numel() if mask_BT is None else mask_BT.sum()
    load = [counts for counts_LE, _ in stats for counts in counts_LE.unbind(0)]
    return x, {"balance": balance_loss(stats, real, cfg), "load": load}


def rotary(length: int, cfg: Config, device: torch.device):
    """cos and sin of the rotary angles, each float32 [T, H]; the frequency of pair i is theta^(-2i/H)."""
    power = torch.arange(0, cfg.head_dim, 2, dtype=torch.float32, device=device) / cfg.head_dim
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * (1.0 / cfg.rope_theta**power)
    angles_TH = torch.cat((angles, angles), -1)
    return angles_TH.cos(), angles_TH.sin()


def rotate(x_BNTH: torch.Tensor, cos_TH: torch.Tensor, sin_TH: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + H/2) of each head by the angle of their position."""
    a, b = x_BNTH.chunk(2, -1)
    return x_BNTH * cos_TH.to(x_BNTH.dtype) + torch.cat((-b, a), -1) * sin_TH.to(x_BNTH.dtype)


def attention(p: dict, x_BTD: torch.Tensor, cos_TH, sin_TH, cfg: Config) -> torch.Tensor:
    """Causal grouped-query attention with normalised queries and keys: [B, T, D] -> [B, T, D]."""

    def heads(name):
        y = x_BTD @ p[f"w_{name}"]
        y = y + p[f"b_{name}"] if cfg.attention_bias else y
        return y.unflatten(-1, (-1, cfg.head_dim))

    q_BTNH = F.rms_norm(heads("q"), (cfg.head_dim,), p["q_norm"], cfg.rms_norm_eps)
    k_BTGH = F.rms_norm(heads("k"), (cfg.head_dim,), p["k_norm"], cfg.rms_norm_eps)
    q, k = (rotate(z.transpose(1, 2), cos_TH, sin_TH) for z in (q_BTNH, k_BTGH))
    y_BNTH = F.scaled_dot_product_attention(q, k, heads("v").transpose(1, 2), is_causal=True, enable_gqa=True)
    out = y_BNTH.transpose(1, 2).flatten(2) @ p["w_o"]
    return out + p["b_o"] if cfg.attention_bias else out


def swiglu(h: torch.Tensor) -> torch.Tensor:
    """[..., 2F] as ``[gate | up]`` -> silu(gate) * up, [..., F] (Shazeer, "GLU variants improve transformer", 2020)."""
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def moe(p: dict, x_TD: torch.Tensor, cfg: Config, mask_BT: torch.Tensor | None = None):
    """The experts of one layer: [T, D] -> [T, D], the choices [E] and the summed router probabilities [E] of it.

    The router's softmax and top-k are float32 whatever the dtype of ``x``, so that rounding does not pick experts.
    """
    probs_TE = torch.softmax((x_TD @ p["router"]).float(), -1)
    weights_Tk, ids_Tk = torch.topk(probs_TE, cfg.num_experts_per_tok, -1)
    if cfg.norm_topk_prob:
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
    routing = route(ids_Tk, cfg.num_experts)
    y_TD = expert_mlp(x_TD, p["w_in"], p["w_out"], routing, weights_Tk)
    if mask_BT is None:
        return y_TD, routing.group_sizes, probs_TE.sum(0)
    real_T1 = mask_BT.reshape(-1, 1).to(probs_TE.dtype)
    chosen_TE = F.one_hot(ids_Tk, cfg.num_experts).sum(1)
    return y_TD, (chosen_TE * real_T1).sum(0), (probs_TE * real_T1).sum(0)


def balance_loss(stats: list, tokens: int | torch.Tensor, cfg: Config) -> torch.Tensor:
    """The load-balancing loss over all layers together, 0-d float32.

    ``stats`` are pairs of choices and summed probabilities, each [L, E] for L layers.

    ``E * sum_e f_e P_e`` with f_e the choices of expert e per token and P_e its mean probability, both over the tokens
    of all routed layers (Fedus et al., "Switch Transformers", 2021, equations 4 to 6, for k choices as in Mixtral's and
    transformers' code). Perfect balance scores k, all tokens on the same k experts up to E. It is a product of two
    means over the tokens of the call, so the value of a batch is not the mean of its micro-batches' values.
    """
    if not stats:
        return torch.zeros(())
    layers = sum(c.shape[0] for c, _ in stats)
    total = layers * (max(tokens, 1) if isinstance(tokens, int) else tokens.float().clamp(min=1.0))
    counts = sum(c.float().sum(0) for c, _ in stats)
    probs = sum(p.sum(0) for _, p in stats)
    return cfg.num_experts * ((counts / total) * (probs / total)).sum()


def loss(params: dict, batch: dict, cfg: Config, keep_logits: bool = False):
    """``(loss_sum, weight)`` of a batch, both 0-d float32: ``loss_sum / weight`` is the loss, for ``fs.accumulate``.

    ``batch`` has ``tokens`` [B, T], ``labels`` [B, T] (the token that follows each, ``IGNORE`` where none counts) and
    optionally ``mask`` [B, T] as in ``forward``. With weight the number of labels that count::

        loss_sum = sum of cross-entropies + weight * router_aux_loss_coef * balance

    The logits of the batch never exist at once (``fs.nn.cross_entropy``), unless ``keep_logits`` trades that memory, in
    the parameters' dtype, for a quarter less work in the head.

    Over ranks this is exact, being one program over the whole batch. Over micro-batches the cross-entropy is exact
    and the balancing term is the mean, weighted by labels, of the micro-batches' own balancing losses.
    """
    x_BTD, stats = features(params, batch["tokens"], cfg, batch.get("mask"))
    labels = batch["labels"]
    entropy = cross_entropy(
        x_BTD, head_of(params, cfg), labels, reduction="sum", ignore_index=IGNORE, keep_logits=keep_logits
    )
    weight = (labels != IGNORE).sum().float()
    if not cfg.router_aux_loss_coef:
        return entropy, weight
    return entropy + weight * (cfg.router_aux_loss_coef * stats["balance"]), weight


# ---- Hugging Face keys -----------------------------------------------------------------------------------------------
def from_hf_state(state_dict: dict, cfg: Config) -> dict:
    """Parameters from a Hugging Face state dict; layouts are converted, values and dtypes kept.

    Experts may be fused (``mlp.experts.gate_up_proj`` [E, 2F, D], ``down_proj`` [E, D, F]) or one module each
    (``mlp.experts.{e}.gate_proj.weight``, ...). Raises ShardingError that lists missing and unexpected keys, and for a
    leaf of another shape than ``axes(cfg)`` says.
    """
    # some versions saved the rotary buffers, some the tied head
    state = {k: v for k, v in state_dict.items() if not k.endswith("rotary_emb.inv_freq")}
    head = state.pop("lm_head.weight", None) if cfg.tie_word_embeddings else None
    table = [(*row, f"{row[2]}.0.down_proj.weight" not in state) for row in _table(cfg)]
    needed = {name for _, kind, key, fused in table for name in _keys(kind, key, cfg, fused)}
    missing, unexpected = sorted(needed - set(state)), sorted(set(state) - needed)
    if missing or unexpected:
        raise ShardingError(
            f"from_hf_state: {len(missing)} keys are missing ({_some(missing)}), {len(unexpected)} are unexpected "
            f"({_some(unexpected)}); is this the state dict of a Qwen3MoeForCausalLM of these sizes?"
        )
    if head is not None and not torch.equal(head, state["model.embed_tokens.weight"]):
        raise ShardingError("from_hf_state: lm_head.weight differs from the embedding, but tie_word_embeddings is set")
    params: dict = {"layers": [{"attn": {}, "mlp": {}} for _ in range(cfg.num_hidden_layers)]}
    for path, kind, key, fused in table:
        _node(params, path[:-1])[path[-1]] = _join(kind, [state[k] for k in _keys(kind, key, cfg, fused)], fused)
    return map_with_path(_same_shape, axes(cfg), params)


def to_hf_state(params: dict, cfg: Config, fused: bool = True) -> dict:
    """The Hugging Face state dict of these parameters: new contiguous tensors, experts fused or one module each.

    Tied models have no ``lm_head.weight``. Raises ShardingError for a tree of another structure or other shapes.
    """
    map_with_path(_same_shape, axes(cfg), params)
    out = {}
    for path, kind, key in _table(cfg):
        pieces = _split(kind, _node(params, path), fused)
        out.update(zip(_keys(kind, key, cfg, fused), pieces, strict=True))
    return {key: value.clone(memory_format=torch.contiguous_format) for key, value in out.items()}


def _table(cfg):
    """(path of our leaf, how it is stored there, key or prefix there), in the order of the layers."""
    yield ("embed",), "same", "model.embed_tokens.weight"
    for i in range(cfg.num_hidden_layers):
        at, there = ("layers", i), f"model.layers.{i}"
        yield (*at, "attn_norm"), "same", f"{there}.input_layernorm.weight"
        yield (*at, "mlp_norm"), "same", f"{there}.post_attention_layernorm.weight"
        for name in "qkvo":
            yield (*at, "attn", f"w_{name}"), "transposed", f"{there}.self_attn.{name}_proj.weight"
            if cfg.attention_bias:
                yield (*at, "attn", f"b_{name}"), "same", f"{there}.self_attn.{name}_proj.bias"
        for name in "qk":
            yield (*at, "attn", f"{name}_norm"), "same", f"{there}.self_attn.{name}_norm.weight"
        if cfg.is_moe(i):
            yield (*at, "mlp", "router"), "transposed", f"{there}.mlp.gate.weight"
            yield (*at, "mlp", "w_in"), "experts_in", f"{there}.mlp.experts"
            yield (*at, "mlp", "w_out"), "experts_out", f"{there}.mlp.experts"
        else:
            yield (*at, "mlp", "w_in"), "gate_up", f"{there}.mlp"
            yield (*at, "mlp", "w_out"), "transposed", f"{there}.mlp.down_proj.weight"
    yield ("norm",), "same", "model.norm.weight"
    if not cfg.tie_word_embeddings:
        yield ("head",), "transposed", "lm_head.weight"


def _keys(kind, key, cfg, fused):
    """The keys there whose tensors make up one leaf of ours."""
    if kind in ("same", "transposed"):
        return [key]
    if kind == "gate_up":
        return [f"{key}.gate_proj.weight", f"{key}.up_proj.weight"]
    if fused:
        return [f"{key}.gate_up_proj" if kind == "experts_in" else f"{key}.down_proj"]
    names = ("gate", "up") if kind == "experts_in" else ("down",)
    return [f"{key}.{e}.{name}_proj.weight" for e in range(cfg.num_experts) for name in names]


def _join(kind, tensors, fused):
    """One leaf of ours from the tensors of ``_keys``."""
    if kind == "gate_up":
        return torch.cat(tensors).mT.contiguous()
    if kind == "experts_in" and not fused:
        return torch.stack([torch.cat(tensors[i : i + 2]).mT for i in range(0, len(tensors), 2)])
    if kind == "experts_out" and not fused:
        return torch.stack([t.mT for t in tensors])
    return tensors[0] if kind == "same" else tensors[0].mT.contiguous()


def _split(kind, leaf, fused):
    """The inverse of ``_join``."""
    if kind == "gate_up":
        return leaf.mT.chunk(2)
    if kind == "experts_in" and not fused:
        return [half for one in leaf.unbind() for half in one.mT.chunk(2)]
    if kind == "experts_out" and not fused:
        return [one.mT for one in leaf.unbind()]
    return [leaf if kind == "same" else leaf.mT]


def _node(tree, path):
    for entry in path:
        tree = tree[entry]
    return tree


def _same_shape(path, param, leaf):
    if tuple(leaf.shape) != tuple(param.shape):
        raise ShardingError(f"{path} has shape {tuple(leaf.shape)}; this config says {tuple(param.shape)}")
    return leaf


def _some(names):
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") or "none"
