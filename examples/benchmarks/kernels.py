"""Grouped products and expert layers against `torch._grouped_mm`, dense cuBLAS and the unfused layer, in one run.

    python examples/benchmarks/kernels.py                                  # all of it; writes docs/results/kernels.json
    python examples/benchmarks/kernels.py --only olmoe --routings balanced --seconds 60 --out part.json

Needs a GPU. Random data, medians of CUDA events, L2 cache flushed, all contenders of a row interleaved. TFLOP/s count
the expert products only (2·rows·K·N each; a layer has two, its step six), whatever runs around them. Rows that the time
limit leaves out are absent from the results, never estimated. `dense` is cuBLAS on one product of equal size.
"""

import argparse
import functools
import json
import multiprocessing
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this file's own folder would hide the package behind this file's name

from kernels import expert_mlp, route  # noqa: E402
from kernels.tune import LAYERS, Case, products, timed, token_ids  # noqa: E402

OPS = ("forward", "dgrad", "wgrad")


def unfused(x, w_in, w_out, ids, weights):
    """The layer from torch's own parts: sort, row gather, product, silu·mul, product, gather, weighted sum."""
    tokens, k = ids.shape
    order, perm = ids.flatten().sort(stable=True)
    inverse = torch.empty_like(perm).scatter_(0, perm, torch.arange(perm.numel(), device=perm.device))
    experts = torch.arange(w_in.shape[0], device=ids.device)
    offsets = torch.searchsorted(order, experts, right=True).to(torch.int32)
    gate, up = torch._grouped_mm(x[perm // k], w_in, offs=offsets).chunk(2, -1)
    y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w_out, offs=offsets)
    return (y[inverse].view(tokens, k, -1) * weights[..., None]).sum(1).to(x.dtype)


def fused(x, w_in, w_out, ids, weights):
    """The same layer in one op, routing included."""
    return expert_mlp(x, w_in, w_out, route(ids, w_in.shape[0]), weights)


def fused_up(x, w_in, ids):
    """Gather, up-product and SwiGLU, forward only."""
    from kernels.glu import glu_op

    r = route(ids, w_in.shape[0])
    return glu_op(x, w_in, r.offsets, r.blocks, r.rows, "swiglu", False)[1]


def unfused_up(x, w_in, ids):
    """The same from torch's parts."""
    order, perm = ids.flatten().sort(stable=True)
    experts = torch.arange(w_in.shape[0], device=ids.device)
    offsets = torch.searchsorted(order, experts, right=True).to(torch.int32)
    gate, up = torch._grouped_mm(x[perm // ids.shape[1]], w_in, offs=offsets).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def layer_inputs(entry, kind):
    """(x, w_in, w_out, ids, weights, gradient of the output) on the GPU."""
    _, experts, k, hidden, inner, tokens = entry
    normal = lambda *shape, scale=1.0: (torch.randn(shape, device="cuda") * scale).bfloat16()  # noqa: E731
    ids = token_ids(experts, tokens, k, kind)
    weights = torch.rand(tokens, k, device="cuda").softmax(-1).bfloat16()
    w_in = normal(experts, hidden, 2 * inner, scale=hidden**-0.5)
    w_out = normal(experts, inner, hidden, scale=inner**-0.5)
    return normal(tokens, hidden), w_in, w_out, ids, weights, normal(tokens, hidden)


def forward_of(layer, inputs):
    with torch.no_grad():
        return layer(*inputs[:5])


def step_of(layer, inputs):
    """Forward and all four gradients."""
    x, w_in, w_out, ids, weights, g = inputs
    leaves = [t.detach().requires_grad_() for t in (x, w_in, w_out, weights)]
    return torch.autograd.grad(layer(*leaves[:3], ids, leaves[3]), leaves, g)


def saved_mib(layer, inputs) -> float:
    """MiB kept between forward and backward, each storage once, the expert weights left out."""
    x, w_in, w_out, ids, weights, _ = inputs
    leaves, seen = [t.detach().requires_grad_() for t in (x, w_in, w_out, weights)], {}
    skip = {w_in.untyped_storage().data_ptr(), w_out.untyped_storage().data_ptr()}

    def pack(t):
        storage = t.untyped_storage()
        if t.is_cuda and storage.data_ptr() not in skip:
            seen[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(*leaves[:3], ids, leaves[3])
    del out
    return sum(seen.values()) / 2**20


def compiled(layer):
    return torch.compile(layer, dynamic=False)


def warm(entry):
    """Compile one layer in a process of its own; Inductor's and Triton's caches are shared through the disk."""
    torch._dynamo.reset()
    inputs, layer = layer_inputs(entry, "balanced"), compiled(unfused)
    forward_of(layer, inputs)
    step_of(layer, inputs)
    step_of(fused, inputs)
    torch.cuda.synchronize()


def product_rows(name, experts, k, n, rows, kind, repeats):
    """Three rows, one an op: ours (as the table chooses), torch, dense."""
    case = Case(experts, k, n, rows, kind, name.endswith("/up"))
    run, library, flops = case.ops(), case.library(), 2 * rows * k * n / 1e9
    for op in OPS:
        grouped, dense = library[op]
        ms = timed({"ours": functools.partial(run[op], None), "torch": grouped, "dense": dense}, repeats)
        rate = {f"{who}_tflops": round(flops / t, 1) if t else None for who, t in ms.items()}
        yield {"shape": name, "routing": kind, "op": op, "experts": experts, "K": k, "N": n, "rows": rows, **rate}


def layer_rows(entry, kind, repeats, use_compile):
    """Two rows, forward and step: ours against the better of eager and compiled."""
    name, experts, k, hidden, inner, tokens = entry
    inputs, flops = layer_inputs(entry, kind), 6 * tokens * k * hidden * inner / 1e9
    x, w_in, _, ids, *_ = inputs
    ms = timed({"ours": lambda: fused_up(x, w_in, ids), "torch": lambda: unfused_up(x, w_in, ids)}, repeats)
    up = {f"{who}_tflops": round(flops / 1.5 / t, 1) for who, t in ms.items() if t}
    yield {"shape": name, "routing": kind, "op": "gather_glu", **up}
    layers = {"ours": fused, "eager": unfused} | ({"compiled": compiled(unfused)} if use_compile else {})
    saved = {who: round(saved_mib(layer, inputs), 1) for who, layer in layers.items()}
    best = min(v for who, v in saved.items() if who != "ours")
    for op, run, factor in (("layer_forward", forward_of, 1), ("layer_step", step_of, 3)):
        functions = {who: functools.partial(run, layer, inputs) for who, layer in layers.items()}
        ms = timed(functions, repeats, pause=10_000_000)
        rate = {f"{who}_tflops": round(flops * factor / t, 1) if t else None for who, t in ms.items()}
        others = [v for who, v in rate.items() if who != "ours_tflops" and v]
        yield {
            "shape": name, "routing": kind, "op": op, "experts": experts, "k": k, "hidden": hidden, "inner": inner,
            "tokens": tokens, **rate, "torch_tflops": max(others), "dense_tflops": None,
            "ours_saved_mib": saved["ours"], "torch_saved_mib": best,
        }  # fmt: skip
    torch._dynamo.reset()


def geometric_mean(values) -> float:
    values = list(values)
    return torch.tensor(values, dtype=torch.float64).log().mean().exp().item() if values else float("nan")


def table(rows) -> str:
    """Markdown: one line a row, then geometric means of ours / torch per op and routing."""
    lines = ["| shape | routing | op | ours | torch | dense | ours / torch | saved MiB |", "|---" * 8 + "|"]
    for r in rows:
        ratio = r["ours_tflops"] / r["torch_tflops"] if r["ours_tflops"] and r["torch_tflops"] else float("nan")
        saved = f"{r['ours_saved_mib']:.0f} / {r['torch_saved_mib']:.0f}" if "ours_saved_mib" in r else ""
        cells = [r["shape"], r["routing"], r["op"], r["ours_tflops"], r["torch_tflops"], r.get("dense_tflops") or ""]
        lines.append("| " + " | ".join(map(str, [*cells, f"{ratio:.2f}", saved])) + " |")
    lines.append("")
    for op, kind in sorted({(r["op"], r["routing"]) for r in rows}):
        found = [r["ours_tflops"] / r["torch_tflops"] for r in rows
                 if (r["op"], r["routing"]) == (op, kind) and r["ours_tflops"] and r["torch_tflops"]]  # fmt: skip
        if found:
            lines.append(f"{op:14s} {kind:9s} geometric mean {geometric_mean(found):.3f}, least {min(found):.2f}")
    return "\n".join(lines)


COLOURS = {"balanced": "#4477aa", "zipf": "#ee6677", "one-hot": "#bbbbbb"}


def plot(rows, path: Path) -> None:
    """An SVG: a line a shape and op, a dot a routing, placed by the speed of ours over torch's."""
    found = {}
    for r in rows:
        if r["ours_tflops"] and r["torch_tflops"]:
            found.setdefault((r["shape"], r["op"]), {})[r["routing"]] = r["ours_tflops"] / r["torch_tflops"]
    high = max([2.0, *(v for line in found.values() for v in line.values())])
    at = lambda ratio: round(230 + (ratio - 0.8) / (high - 0.8) * 400, 1)  # noqa: E731
    height, text = 14 * len(found) + 50, 'font-family="sans-serif" font-size="10"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="660" height="{height}" {text}>',
           f'<rect width="660" height="{height}" fill="white"/>']  # fmt: skip
    for i, (kind, colour) in enumerate(COLOURS.items()):
        out.append(f'<circle cx="{240 + 90 * i}" cy="12" r="4" fill="{colour}"/>')
        out.append(f'<text x="{248 + 90 * i}" y="16">{kind}</text>')
    for tick in range(8, int(high * 10) + 1, 2):
        x, stroke = at(tick / 10), "black" if tick == 10 else "#dddddd"
        out.append(f'<path d="M{x} 24V{height - 20}" stroke="{stroke}"/>')
        out.append(f'<text x="{x}" y="{height - 8}" text-anchor="middle">{tick / 10}</text>')
    for i, ((shape, op), line) in enumerate(found.items()):
        y = 34 + 14 * i
        out.append(f'<text x="220" y="{y + 3}" text-anchor="end">{shape} {op}</text>')
        out += [f'<circle cx="{at(v)}" cy="{y}" r="4" fill="{COLOURS[kind]}"/>' for kind, v in line.items()]
    path.write_text("\n".join([*out, "</svg>", ""]))


def collect(args, layers):
    """Rows until the time is up, products and layers of one shape together."""
    end = time.time() + args.seconds
    rows = []
    for kind in args.routings.split(","):
        for entry in layers:
            if "layers" in args.parts and time.time() < end:
                rows += layer_rows(entry, kind, args.repeats, not args.no_compile)
            for todo in products([entry]) if "products" in args.parts else []:
                if time.time() < end:
                    rows += product_rows(*todo, kind, args.repeats)
            print(f"{entry[0]} {kind}: {len(rows)} rows, {end - time.time():.0f} s left", flush=True)
    return rows


def results(rows, args) -> dict:
    """What is written: the five ops of the products and layers as `rows`, the fused up-product beside them."""
    about = [args.only and f"--only {args.only}", f"--routings {args.routings}", f"--parts {args.parts}",
             f"--repeats {args.repeats}", "--no-compile" if args.no_compile else ""]  # fmt: skip
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": " ".join(["python examples/benchmarks/kernels.py", *filter(None, about)]),
        "rows": [r for r in rows if r["op"] != "gather_glu"],
        "gather_glu": [r for r in rows if r["op"] == "gather_glu"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "kernels.json")
    parser.add_argument("--plot", type=Path, help="also draw the ratios, as SVG")
    parser.add_argument("--only", default="", help="comma-separated layer names")
    parser.add_argument("--routings", default="balanced,zipf,one-hot")
    parser.add_argument("--parts", default="products,layers")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3600, help="stop starting new rows after this time")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled unfused layer out")
    parser.add_argument("--processes", type=int, default=6, help="processes that compile ahead")
    args = parser.parse_args()
    layers = [entry for entry in LAYERS if not args.only or entry[0] in args.only.split(",")]
    if "layers" in args.parts and not args.no_compile:
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            pool.map(warm, layers, chunksize=1)
    rows = collect(args, layers)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results(rows, args), indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    print(table(rows))


if __name__ == "__main__":
    main()
