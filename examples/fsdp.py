"""FSDP in the local view: every rank rests 1/n of each weight, and gathers a layer where it uses it.

    python examples/fsdp.py                              # 8 simulated ranks in one process
    torchrun --nproc-per-node 4 examples/fsdp.py         # real ones

The transpose of the gather is a scatter of the sum: gradients come out as the weights rest. With `fs.remat` a layer
gathers again for its backward pass instead of keeping what it gathered. In `fs.shard` alone none of this is written.
"""

import contextlib
import os

import torch

import fsharding as fs
from fsharding import P

RANKS = int(os.environ.get("WORLD_SIZE", 8))
LAYERS, WIDTH, ROWS, STEPS, LEARNING_RATE = 3, 32, 64, 10, 0.3


def init(seed=0):
    keys = fs.random.split(fs.random.key(seed), LAYERS)
    return [{"w": fs.random.normal(k, (WIDTH, WIDTH)) * WIDTH**-0.5, "b": torch.zeros(WIDTH)} for k in keys]


def layer(p, x):
    return x + torch.tanh(x @ p["w"] + p["b"])


@fs.remat
def gathered_layer(p, x):
    return layer({k: fs.all_gather(v, "data", tiled=True) for k, v in p.items()}, x)


def loss(params, x, y, layer=layer):
    for p in params:
        x = layer(p, x)
    return (x - y).square().mean()


def local_loss(params, x, y):
    return fs.pmean(loss(params, x, y, gathered_layer), "data")


def sgd(loss):
    def step(params, x, y):
        value, grads = fs.value_and_grad(loss)(params, x, y)
        return [{k: p[k] - LEARNING_RATE * g[k] for k in p} for p, g in zip(params, grads, strict=True)], value

    return step


def main():
    x = fs.random.normal(fs.random.key(1), (ROWS, WIDTH))
    params, alone, y, expected = init(), init(), torch.roll(x, 1, dims=1), []
    for _ in range(STEPS):
        alone, value = sgd(loss)(alone, x, y)
        expected.append(value)

    mesh = fs.make_mesh({"data": RANKS})
    parallel = fs.shard_map(local_loss, mesh, in_specs=(P("data"), P("data"), P("data")), out_specs=P())
    step = fs.shard(sgd(parallel), mesh, donate_argnums=0)
    params, x, y = (fs.device_put(tree, mesh, P("data")) for tree in (params, x, y))
    for moved in step.lower(params, x, y).collectives():
        print(f"  {moved.phase:8} {moved.kind:14} {moved.bytes:5} bytes over {moved.axes}")
    for want in expected:
        params, value = step(params, x, y)
        assert torch.allclose(value, want, rtol=1e-5), (value, want)
    assert fs.spec_of(params[0]["w"]) == P("data")
    for ours, one in zip(fs.device_get(params), alone, strict=True):
        assert torch.allclose(ours["w"], one["w"], rtol=1e-4, atol=1e-6)
    print(f"{RANKS} ranks: loss {expected[0]:.4f} to {value:.4f} in {STEPS} steps, as on one device")


if __name__ == "__main__":
    with contextlib.nullcontext() if "WORLD_SIZE" in os.environ else fs.simulate(RANKS):
        main()
