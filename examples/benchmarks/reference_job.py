"""The reference job: Qwen3-30B-A3B shapes, 8 of 48 layers, against transformers + FSDP2, in one run.

    python examples/benchmarks/reference_job.py            # everything; writes docs/results/reference_job.json
    python examples/benchmarks/reference_job.py --systems transformers:fsdp2:compiled ours:dp2ep:inductor
    python examples/benchmarks/reference_job.py --gpus 4 --ep 2 --out four.json      # efsdp 2 x ep 2
    python examples/benchmarks/reference_job.py --systems ours:dp2ep:eager --profile traces  # Perfetto opens them
    python examples/benchmarks/reference_job.py --small --steps 2     # two CPU processes, tiny: does it run?

Sequence 4096, 2 sequences a GPU, random tokens, bf16 compute, fp32 master weights, reductions and AdamW state, clipping
by the global norm, no recomputation. A system is NAME:LAYOUT:BACKEND; a layout may name its dispatcher, as in
dp2ep+gather. Each runs in processes of its own, in turn. The step time is the median over the timed steps of the
slowest rank, between CUDA synchronisations; memory is the allocator's peak over the timed steps, with cudagraph from
the start of the run; exposed communication is the time in which only communication kernels run, from a profile of one
further step. "planned" is what `memory_analysis()` said before anything ran.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this file's own folder would hide the package behind this file's name
SYSTEMS = [
    "transformers:fsdp2:eager", "transformers:fsdp2:compiled", "ours:dp2ep:eager", "ours:dp2ep:inductor",
    "ours:dp2ep+gather:cudagraph", "ours:fsdp:inductor", "ours:fsdp:cudagraph",
]  # fmt: skip
SIZES = dict(
    vocab_size=151936, hidden_size=2048, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
)  # fmt: skip
TINY = dict(
    vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip


def main() -> None:
    args = parsed()
    if "RANK" in os.environ:
        return worker(args)
    rows = []
    for system in args.systems:
        out = Path(args.out).parent / f".{system.replace(':', '_')}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.gpus}", "--standalone",
                   __file__, *sys.argv[1:], "--systems", system, "--out", str(out)]  # fmt: skip
        print(f"--- {system}", flush=True)
        try:
            done = subprocess.run(command, timeout=args.limit, env={**os.environ, "OMP_NUM_THREADS": "4"})
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {args.limit} s"
        if out.exists():
            rows.append(json.loads(out.read_text()))
            out.unlink()
        else:
            print(f"{system}: no result ({code})", flush=True)
    print(table(rows))
    if rows and not args.small:
        Path(args.out).write_text(json.dumps(rows, indent=1) + "\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--ep", type=int, default=None, help="ranks over which dp2ep splits experts; default: all")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--batch", type=int, default=2, help="sequences a GPU")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--limit", type=int, default=420, help="seconds for one system")
    parser.add_argument("--profile", default=None, help="folder for traces")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", default=str(ROOT / "docs" / "results" / "reference_job.json"))
    return parser.parse_args()


def table(rows: list[dict]) -> str:
    peers = [r["step_ms"] for r in rows if r["system"] == "transformers" and r["backend"] == "compiled"]
    head = f"{'system':<14}{'layout':<8}{'dispatcher':<12}{'backend':<11}{'step ms':>9}{'tok/s/GPU':>11}"
    lines = [f"{head}{'peak GiB':>10}{'planned':>9}{'exposed ms':>12}{'x peer':>8}"]
    for r in rows:
        ratio = f"{peers[0] / r['step_ms']:.2f}" if peers else "-"
        names = f"{r['system']:<14}{r['layout']:<8}{r['dispatcher'] or '-':<12}{r['backend']:<11}"
        lines.append(
            f"{names}{r['step_ms']:>9.1f}{r['tokens_per_s_per_gpu']:>11.0f}"
            f"{r['peak_gib']:>10.1f}{r.get('planned_gib') or 0:>9.1f}{r['exposed_comm_ms']:>12.1f}{ratio:>8}"
        )
    return "\n".join(lines)


# ---- one rank --------------------------------------------------------------------------------------------------------
def worker(args) -> None:
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if cuda else "cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    name, layout, backend = args.systems[0].split(":")
    layout, _, dispatcher = layout.partition("+")
    sizes = dict(TINY if args.small else SIZES)
    if args.layers:
        sizes["num_hidden_layers"] = args.layers
    batch, length = (2, 32) if args.small else (args.batch, args.sequence)
    g = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, sizes["vocab_size"], (batch, length + 1), generator=g).to(device)
    started = time.perf_counter()
    ep = (args.ep or dist.get_world_size()) if layout == "dp2ep" else 1
    dispatcher = (dispatcher or "all_to_all") if ep > 1 else None
    build = functools.partial(ours, ep=ep, dispatcher=dispatcher) if name == "ours" else peer
    step, planned = build(sizes, layout, backend, tokens)
    first = float(step())
    compile_s = time.perf_counter() - started
    for _ in range(args.warmup - 1):
        last = step()
    sync = torch.cuda.synchronize if cuda else (lambda: None)
    sync()
    if cuda and backend != "cudagraph":  # a captured step's own pool counts as allocated only while it is captured
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.steps):
        dist.barrier()
        sync()
        t = time.perf_counter()
        last = step()
        sync()
        times.append((time.perf_counter() - t) * 1e3)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    ms = statistics.median(slowest.tolist())
    peak = torch.tensor([torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0], dtype=torch.float64)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    exposed = profile(step, args, args.systems[0].replace(":", "_")) if cuda else {"exposed_comm_ms": 0.0}
    row = dict(
        system="transformers" if name == "transformers" else "fsharding", layout=layout,
        dispatcher=dispatcher, backend=backend, step_ms=ms,
        tokens_per_s_per_gpu=batch * length / ms * 1e3, peak_gib=float(peak), planned_gib=planned, **exposed,
        first_loss=first, last_loss=float(last), first_step_s=compile_s, gpus=dist.get_world_size(), ep=ep,
        layers=sizes["num_hidden_layers"], sequence=length, batch_per_gpu=batch, torch=torch.__version__,
        device=torch.cuda.get_device_name() if cuda else "cpu",
    )  # fmt: skip
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
        Path(args.out).write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def ours(sizes: dict, layout: str, backend: str, tokens, ep: int, dispatcher: str | None):
    import torch
    import torch.distributed as dist

    import fsharding as fs
    from fsharding import P
    from fsharding.models import qwen3_moe as model

    cfg = model.Config(**sizes)
    ranks, experts = dist.get_world_size(), fs.Experts("ep", dispatcher) if dispatcher else None
    mesh = fs.make_mesh({"replicate": 1, "efsdp": ranks // ep, "ep": ep}, device=tokens.device)
    axes = model.axes(cfg)
    params = fs.init(axes, mesh, getattr(fs.layouts, layout)(mesh)(axes))
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-4, weight_decay=0.1))
    state = optimizer.init(params)

    def mean(p, b):
        total, weight = model.loss(p, b, cfg, keep_logits=True)
        return total / weight

    def update(p, s, b):
        value, grads = fs.value_and_grad(mean)(p, b)
        updates, s = optimizer.update(grads, s, p)
        return fs.optim.apply_updates(p, updates), s, value

    step = fs.shard(
        update, mesh, donate_argnums=(0, 1), backend=backend, experts=experts, strict=True,
        precision=fs.Precision(compute="bfloat16", reduce="float32"),
    )  # fmt: skip
    batch = fs.from_local({"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}, mesh,
                          P(mesh.data_axes))  # fmt: skip
    planned = step.lower(params, state, batch).memory_analysis()["peak"] / 2**30
    box = [params, state]
    del params, state

    def run():
        box[0], box[1], value = step(box[0], box[1], batch)
        return value

    torch.manual_seed(0)
    return run, planned


def peer(sizes: dict, layout: str, backend: str, tokens):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**sizes, router_aux_loss_coef=1e-3, output_router_logits=False, tie_word_embeddings=False,
                            use_cache=False, dtype="float32")  # fmt: skip
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    mesh = init_device_mesh(tokens.device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if backend == "compiled":
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=tokens.device)
    g = torch.Generator(device=tokens.device).manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            local = p.detach().to_local()
            local.fill_(1.0) if "norm" in name else local.normal_(0, 0.02, generator=g)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(tokens.device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def run():
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run, None


# ---- profile ---------------------------------------------------------------------------------------------------------
def profile(step, args, name: str) -> dict:
    """One step under the profiler: exposed communication and the time by kind of kernel, milliseconds of rank 0."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    if args.profile and dist.get_rank() == 0:
        Path(args.profile).mkdir(parents=True, exist_ok=True)
        prof.export_chrome_trace(str(Path(args.profile) / f"{name}.json.gz"))
    spans = [
        (e.time_range.start, e.time_range.end, e.name)
        for e in prof.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith(("fsharding", "Optimizer", "FSDP"))
        and not getattr(e, "is_user_annotation", False)
    ]  # fmt: skip
    comm = union([(a, b) for a, b, n in spans if "nccl" in n.lower()])
    work = union([(a, b) for a, b, n in spans if "nccl" not in n.lower()])
    both = union(comm + work)
    kinds: dict[str, float] = {}
    for a, b, n in spans:
        kinds[kind_of(n)] = kinds.get(kind_of(n), 0.0) + (b - a) / 1e3
    top: dict[str, float] = {}
    for a, b, n in spans:
        top[n[:70]] = top.get(n[:70], 0.0) + (b - a) / 1e3
    most = dict(sorted(top.items(), key=lambda kv: -kv[1])[:24])
    return {
        "exposed_comm_ms": (length(both) - length(work)) / 1e3,
        "busy_ms": length(both) / 1e3,
        "kernel_ms": {k: round(v, 2) for k, v in sorted(kinds.items(), key=lambda kv: -kv[1])},
        "top_kernels_ms": {k: round(v, 2) for k, v in most.items()},
    }


def kind_of(name: str) -> str:
    low = name.lower()
    kinds = {
        "communication": ("nccl",), "attention": ("flash", "fmha", "attention", "sdpa"),
        "optimizer": ("adam", "multi_tensor", "norm_reduce"),
        "experts": ("grouped", "glu", "wgrad", "rows_kernel", "combine", "gather_kernel", "group_gemm"),
        "cross entropy": ("row_loss", "row_gradient", "cross_entropy", "log_softmax", "nll", "softmax"),
        "dense gemm": ("gemm", "cutlass", "xmma", "nvjet", "cublas"),
        "copies": ("memcpy", "memset", "copy"),
    }  # fmt: skip
    return next((kind for kind, words in kinds.items() if any(w in low for w in words)), "elementwise")


def union(spans: list[tuple]) -> list[tuple]:
    out: list[list] = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1]:
            out[-1][1] = max(out[-1][1], b)
        else:
            out.append([a, b])
    return [tuple(s) for s in out]


def length(spans: list[tuple]) -> float:
    return sum(b - a for a, b in spans)


if __name__ == "__main__":
    main()
