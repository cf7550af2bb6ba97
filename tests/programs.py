"""Functions and inputs that several tests share: a dense and a MoE language model, small and awkwardly sized."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding import P
from fsharding import tree as trees
from fsharding.program import lockstep

D, H, V, E, K, T = 16, 24, 37, 8, 2, 6  # model, expert hidden, vocabulary (uneven), experts, top-k, tokens a sequence
TOLERANCE = 1e-5  # relative, fp32: what every layout owes


def expert_leaf(path: str) -> bool:
    return path.rsplit(".", 1)[-1] in ("w_in", "w_out", "b_in")


def init(layers=2, moe=True, seed=0, heads=True):
    g = torch.Generator().manual_seed(seed)
    n = lambda *shape, s=0.3: torch.randn(*shape, generator=g) * s
    layer = dict(norm=torch.ones(D), qkv=n(D, 3 * D), out=n(D, D))

    def one():
        p = {k: v.clone() if k == "norm" else n(*v.shape) for k, v in layer.items()}
        if moe:
            return {**p, "router": n(D, E, s=2.0), "w_in": n(E, D, 2 * H), "b_in": n(E, 2 * H), "w_out": n(E, H, D)}
        return {**p, "up": n(D, 2 * H), "down": n(H, D), "bias": n(D)}

    return {"embed": n(V, D), "head": n(D, V), "gain": torch.tensor(1.5), "layers": [one() for _ in range(layers)]}


def batch(rows=8, seed=1, masked=True):
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, V, (rows, T), generator=g) for _ in "xy")
    if masked:  # the first rows have few valid labels, one has none: ranks carry unequal weight
        y[0] = -100
        y[1, 1:] = -100
    return {"x": x, "y": y}


def attention(p, x):
    b, t, _ = x.shape
    q, k, v = (z.view(b, t, 4, D // 4).transpose(1, 2) for z in (x @ p["qkv"]).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(b, t, D) @ p["out"]


def moe(p, x, bias=True):
    shape, x = x.shape, x.reshape(-1, D)
    scores = torch.softmax(x @ p["router"], -1)
    w, ids = torch.topk(scores, K)
    r = fs.moe.route(ids, E)
    h = fs.ragged_dot(fs.moe.dispatch(x, r), p["w_in"], r.group_sizes) + fs.moe.expand(p["b_in"], r)
    gate, up = h.chunk(2, -1)
    y = fs.ragged_dot(F.silu(gate) * up, p["w_out"], r.group_sizes)
    fraction = r.group_sizes.float() / (ids.shape[0] * K)
    balance = E * (fraction * scores.mean(0)).sum()
    return fs.moe.combine(y, w / w.sum(-1, keepdim=True), r).view(shape), balance


def mlp(p, x):
    gate, up = (x @ p["up"]).chunk(2, -1)
    return (F.silu(gate) * up) @ p["down"] + p["bias"]


def logits(p, x):
    h, balance = F.embedding(x, p["embed"]), 0.0
    for layer in p["layers"]:
        h = h + attention(layer, F.rms_norm(h, (D,), layer["norm"]))
        if "router" in layer:
            y, extra = moe(layer, F.rms_norm(h, (D,)))
            h, balance = h + y, balance + extra
        else:
            h = h + mlp(layer, F.rms_norm(h, (D,)))
    return (h * p["gain"]) @ p["head"], balance


def loss(params, b):
    z, balance = logits(params, b["x"])
    return F.cross_entropy(z.reshape(-1, V), b["y"].reshape(-1)) + 0.01 * balance


def summed_loss(params, b):
    """For ``fs.accumulate``: the sum over valid tokens, and their number."""
    z, _ = logits(params, b["x"])
    y = b["y"].reshape(-1)
    return F.cross_entropy(z.reshape(-1, V), y, reduction="sum"), (y != -100).sum()


def trainer(optimizer, loss_fn=loss):
    def step(params, state, b):
        value, grads = fs.value_and_grad(loss_fn)(params, b)
        norm = fs.optim.global_norm(grads)
        updates, state = optimizer.update(grads, state, params)
        return fs.optim.apply_updates(params, updates), state, {"loss": value, "norm": norm, "grads": grads}

    return step


# ---- layouts ---------------------------------------------------------------------------------------------------------
AXES = ("replicate", "efsdp", "ep")


def factorisations(n: int) -> list[dict[str, int]]:
    """All meshes of n ranks over (replicate, efsdp, ep), axes of size 1 included."""
    return [
        dict(zip(AXES, f, strict=True)) for f in itertools.product(range(1, n + 1), repeat=3) if f[0] * f[1] * f[2] == n
    ]


def specs(params, layout: str):
    """Written out, not taken from ``fs.layouts``: the suite must not lean on the code it tests."""
    experts = {"dp2ep": P("ep", "efsdp"), "fsdp": P(None, ("replicate", "efsdp", "ep")), "legacy_ep": P("ep", None)}
    dense = {
        "dp2ep": ("efsdp", "ep"),
        "fsdp": ("replicate", "efsdp", "ep"),
        "hsdp": ("efsdp", "ep"),
        "legacy_ep": ("efsdp",),
    }
    experts["hsdp"] = P(None, ("efsdp", "ep"))

    def one(path, x):
        if expert_leaf(path):
            return experts[layout]
        return P() if x.ndim == 0 else P(dense[layout])

    return trees.map_with_path(one, params)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(got, want):
    assert worst(fs.device_get(got), want) <= TOLERANCE


def refused(match, fn, *args):
    with pytest.raises(fs.ShardingError, match=match) as error:
        fn(*args)
    return str(error.value)


def worst(got, want) -> float:
    """The largest relative difference over all leaves (to each leaf's largest element)."""
    _, a, _ = trees.flatten_with_paths(got)
    _, b, _ = trees.flatten_with_paths(want)
    return max((relative(x, y) for x, y in zip(a, b, strict=True)), default=0.0)


def relative(x, y) -> float:
    x, y = torch.as_tensor(x).double(), torch.as_tensor(y).double()
    assert x.shape == y.shape, (x.shape, y.shape)
    if not y.numel():
        return 0.0
    scale = y.abs().max().item()
    return ((x - y).abs().max() / (scale or 1.0)).item()


def abstract(tree, spec):
    """A ``ShapeDtype`` tree with specs, for ``lower`` on a mesh without processes."""
    flat = trees.broadcast_prefix(spec, tree, "specs")
    _, leaves, treedef = trees.flatten_with_paths(tree)
    return trees.unflatten(
        treedef, [fs.ShapeDtype(tuple(x.shape), x.dtype, s) for x, s in zip(leaves, flat, strict=True)]
    )


def simulate(sharded, args, arg_specs, low=None):
    """Run a sharded function for all ranks in lockstep; global values in and out. ``low`` from an earlier call is
    reused."""
    low = low or sharded.lower(*(abstract(a, s) for a, s in zip(args, arg_specs, strict=True)))
    _, leaves, _ = trees.flatten_with_paths(list(args))
    out = iter(lockstep.evaluate(low, leaves))
    result = low.result
    count = len(result["paths"])
    leaves = [result["fixed"][i] if i in result["fixed"] else next(out) for i in range(count)]
    return trees.unflatten(result["treedef"], leaves), low
