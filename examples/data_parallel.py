"""Data parallelism in the local view: every rank holds the model and its own rows of the batch.

    python examples/data_parallel.py                              # 8 simulated ranks in one process
    torchrun --nproc-per-node 4 examples/data_parallel.py         # real ones

The loss is a mean over ranks. Its gradient is summed over them without a word: the parameters are the same on all
ranks and the rows are not, so the cotangent of the former is the sum of what each rank makes of it.
"""

import contextlib
import os

import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding import P

RANKS = int(os.environ.get("WORLD_SIZE", 8))
STEPS, LEARNING_RATE = 20, 0.1


def init(seed=0):
    first, second = fs.random.split(fs.random.key(seed))
    w1, w2 = fs.random.normal(first, (16, 64)) / 4, fs.random.normal(second, (64, 4)) / 8
    return {"w1": w1, "b1": torch.zeros(64), "w2": w2}


def predict(params, x):
    return F.gelu(x @ params["w1"] + params["b1"]) @ params["w2"]


def loss(params, x, y):
    """What one device computes, on all rows or on a rank's."""
    return (predict(params, x) - y).square().mean()


def sgd(loss):
    def step(params, x, y):
        value, grads = fs.value_and_grad(loss)(params, x, y)
        return {k: params[k] - LEARNING_RATE * grads[k] for k in params}, value

    return step


def data(seed=1, rows=64):
    keys = fs.random.split(fs.random.key(seed))
    x = fs.random.normal(keys[0], (rows, 16))
    return x, torch.sin(x @ fs.random.normal(keys[1], (16, 4)))


def main():
    params, (x, y) = init(), data()
    alone, expected = init(), []
    for _ in range(STEPS):
        alone, value = sgd(loss)(alone, x, y)
        expected.append(value)

    mesh = fs.make_mesh({"data": RANKS})
    local = lambda params, x, y: fs.pmean(loss(params, x, y), "data")
    parallel = fs.shard_map(local, mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    step = fs.shard(sgd(parallel), mesh)
    params, x, y = fs.device_put(params, mesh), fs.device_put(x, mesh, P("data")), fs.device_put(y, mesh, P("data"))
    for want in expected:
        params, value = step(params, x, y)
        assert torch.allclose(value, want, rtol=1e-5), (value, want)
    for name, leaf in fs.device_get(params).items():
        assert torch.allclose(leaf, alone[name], rtol=1e-4, atol=1e-6), name
    print(f"{RANKS} ranks: loss {expected[0]:.4f} to {value:.4f} in {STEPS} steps, as on one device")


if __name__ == "__main__":
    with contextlib.nullcontext() if "WORLD_SIZE" in os.environ else fs.simulate(RANKS):
        main()
