"""Tensor parallelism in the local view: a transformer's feed-forward cut over a model axis, rows over a data axis.

    python examples/tensor_parallel.py                              # 8 simulated ranks: 2 x 4
    torchrun --nproc-per-node 4 examples/tensor_parallel.py         # 4 real ones: 1 x 4

The first weight is cut by columns, the second by rows (Shoeybi et al. 2019). Between blocks the sequence is cut over
the same axis (Korthikanti et al. 2022), so that the norm is computed once: gathered before, summed and scattered after.
"""

import contextlib
import os

import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding import P

RANKS = int(os.environ.get("WORLD_SIZE", 8))
MODEL = min(4, RANKS)
LAYERS, WIDTH, HIDDEN, BATCH, SEQUENCE = 2, 16, 64, 4, 8
SPECS = {"norm": P(), "up": P(None, "model"), "down": P("model", None)}
TOKENS = P("data", "model")  # [batch, sequence, width]


def init(seed=0):
    keys = fs.random.split(fs.random.key(seed), 2 * LAYERS)
    weight = lambda k, *shape: fs.random.normal(k, shape) * shape[0] ** -0.5
    return [
        {"norm": torch.ones(WIDTH), "up": weight(a, WIDTH, HIDDEN), "down": weight(b, HIDDEN, WIDTH)}
        for a, b in zip(keys[::2], keys[1::2], strict=True)
    ]


def feed_forward(p, x):
    return F.silu(x @ p["up"]) @ p["down"]


def block(p, x):
    """What one device computes."""
    return x + feed_forward(p, F.rms_norm(x, (WIDTH,), p["norm"]))


def parallel_block(p, x):
    """What a rank computes: its part of the sequence, its columns and rows of the weights."""
    whole = fs.all_gather(F.rms_norm(x, (WIDTH,), p["norm"]), "model", axis=1, tiled=True)
    return x + fs.psum_scatter(feed_forward(p, whole), "model", scatter_dimension=1, tiled=True)


def loss(params, x, block=block):
    for p in params:
        x = block(p, x)
    return torch.sin(x).square().mean()


def main():
    params, x = init(), fs.random.normal(fs.random.key(1), (BATCH, SEQUENCE, WIDTH))
    want = fs.value_and_grad(loss)(params, x)

    mesh = fs.make_mesh({"data": RANKS // MODEL, "model": MODEL})
    local = lambda params, x: fs.pmean(loss(params, x, parallel_block), ("data", "model"))
    step = fs.value_and_grad(fs.shard_map(local, mesh, in_specs=(SPECS_OF_ALL, TOKENS), out_specs=P()))
    placed = fs.device_put(params, mesh, SPECS_OF_ALL), fs.device_put(x, mesh, TOKENS)
    value, grads = step(*placed)
    assert torch.allclose(value, want[0], rtol=1e-5)
    for ours, one in zip(fs.device_get(grads), want[1], strict=True):
        for name in one:
            assert torch.allclose(ours[name], one[name], rtol=1e-4, atol=1e-6), name
    assert all(fs.spec_of(g["up"]) == SPECS["up"] for g in grads)
    print(f"{dict(mesh.shape)}: loss {value:.4f}, gradients as on one device")


SPECS_OF_ALL = [SPECS] * LAYERS

if __name__ == "__main__":
    with contextlib.nullcontext() if "WORLD_SIZE" in os.environ else fs.simulate(RANKS):
        main()
