"""What planning costs: trace and partition per MoE layer, and on meshes of 8 to 4,096 ranks.

    python examples/benchmarks/lowering.py

Runs on one CPU core, without processes or data. Times are process times: the median of three after a warm-up.
"""

import statistics
import time

import torch

import fsharding as fs
from fsharding import P
from fsharding.models import qwen3_moe


def lowered(mesh, layers, rows):
    """The loss and gradients of a small Qwen3-MoE in the dp2ep layout, planned."""
    cfg = qwen3_moe.Config(
        vocab_size=512, hidden_size=128, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        head_dim=16, moe_intermediate_size=128, num_experts=64, num_experts_per_tok=4,
    )  # fmt: skip
    axes = qwen3_moe.axes(cfg)
    specs = fs.layouts.dp2ep(mesh)(axes)

    def loss(params, batch):
        total, weight = qwen3_moe.loss(params, batch, cfg)
        return total / weight

    tokens = fs.ShapeDtype((rows, 32), torch.int64, P(mesh.data_axes))
    params = fs.init(axes, mesh, specs)
    start = time.process_time()
    low = fs.shard(fs.value_and_grad(loss), mesh).lower(params, {"tokens": tokens, "labels": tokens})
    return time.process_time() - start, low


def median(mesh, layers, rows):
    runs = [lowered(mesh, layers, rows) for _ in range(3)]
    return statistics.median(seconds for seconds, _ in runs), runs[0][1]


def main():
    torch.set_num_threads(1)
    shapes = [
        {"replicate": 1, "efsdp": 4, "ep": 2},
        {"replicate": 2, "efsdp": 8, "ep": 8},
        {"replicate": 8, "efsdp": 64, "ep": 8},
    ]
    meshes = [fs.make_mesh(shape, fake=True) for shape in shapes]
    lowered(meshes[0], 1, 8)
    one, _ = median(meshes[0], 1, 8)
    five, low = median(meshes[0], 5, 8)
    print(
        f"trace and partition, 8 ranks: {one:.2f} s for 1 layer, {five:.2f} s for 5, {(five - one) / 4:.3f} s a "
        "further layer"
    )
    print(
        f"  ({len(low.program.graph.graph.nodes)} nodes traced, {len(low.local.graph.nodes)} in the local program of "
        "5 layers)"
    )
    for mesh in meshes:
        seconds, _ = median(mesh, 2, mesh.size)
        print(f"2 layers on {mesh.size:5d} ranks {dict(mesh.shape)}: {seconds:.2f} s")
    seconds, low = median(meshes[2], 48, meshes[2].size)
    print(f"48 layers on {meshes[2].size} ranks: {seconds:.2f} s ({len(low.local.graph.nodes)} local nodes)")


if __name__ == "__main__":
    main()
