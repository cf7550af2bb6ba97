"""Measure candidate configurations on the GPU and write the table: `python -m kernels.tune --out results.json`.

Each candidate is timed against the others in turn (one repetition of each, then the next), with random data, the L2
cache flushed and the launches queued behind a pause, so that neither clocks nor host speed favour one. `--write` turns
the results into `tuned.py`. Times are medians of CUDA events, TFLOP/s count 2·rows·K·N.
"""

import argparse
import functools
import json
import multiprocessing
import time
from pathlib import Path

import torch

from .glu import glu_backward_launch, glu_launch
from .routing import Routing, from_offsets
from .rows import rows_launch
from .table import DEFAULT, bucket
from .wgrad import wgrad_launch

# (name, E, k, hidden, expert hidden, tokens): layers of the field, each rank's share where it says ep
LAYERS = [
    ("qwen3-30b", 128, 8, 2048, 768, 32768),
    ("qwen3-30b-ep8", 16, 8, 2048, 768, 16384),
    ("deepseek-v3-ep8", 32, 8, 7168, 2048, 8192),
    ("olmoe", 64, 8, 2048, 1024, 16384),
    ("gpt-oss-20b", 32, 4, 2880, 2880, 16384),
    ("mixtral", 8, 2, 4096, 14336, 16384),
]


def products(layers=LAYERS, rows=None):
    """(name, E, K, N, rows) of the single products: up [H -> 2I] and down [I -> H] of every layer."""
    out = []
    for name, experts, k, hidden, inner, tokens in layers:
        count = rows or min(tokens * k, 131072)
        out.append((f"{name}/up", experts, hidden, 2 * inner, count))
        out.append((f"{name}/down", experts, inner, hidden, count))
    return out


def group_sizes(experts: int, rows: int, kind: str) -> list[int]:
    """Rows per expert: "balanced", "zipf" (∝ 1/rank, in shuffled order) or "one-hot"."""
    if kind == "balanced":
        return [rows * (e + 1) // experts - rows * e // experts for e in range(experts)]
    if kind == "one-hot":
        return [rows if e == experts // 2 else 0 for e in range(experts)]
    weight = torch.tensor([1.0 / (e + 1) for e in range(experts)], dtype=torch.float64)
    ends = (weight.cumsum(0) / weight.sum() * rows).round().long()
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    return sizes[torch.randperm(experts, generator=torch.Generator().manual_seed(0))].tolist()


def token_ids(experts: int, tokens: int, k: int, kind: str) -> torch.Tensor:
    """[tokens, k] distinct experts per token: uniform, Zipf by Gumbel top-k, or the first k experts for everyone."""
    generator = torch.Generator("cuda").manual_seed(0)
    if kind == "one-hot":
        return torch.arange(k, device="cuda").expand(tokens, k).contiguous()
    if kind == "balanced":
        first = torch.arange(tokens, device="cuda")[:, None] * k
        return (first + torch.arange(k, device="cuda")) % experts
    logits = -torch.log(torch.arange(1, experts + 1, device="cuda", dtype=torch.float32))
    logits = logits[torch.randperm(experts, device="cuda", generator=generator)]
    noise = torch.rand(tokens, experts, device="cuda", generator=generator).clamp(1e-9, 1 - 1e-7)
    return (logits - torch.log(-torch.log(noise))).topk(k).indices


@functools.cache
def flush_buffer() -> torch.Tensor:
    """Larger than the L2 cache, so that writing it evicts everything else."""
    return torch.empty(2**28, dtype=torch.int8, device="cuda")


def timed(functions: dict, repeats: int = 12, pause: int = 400_000) -> dict:
    """Median milliseconds of each function, interleaved; None for one that raises (the error is printed)."""
    alive, times = {}, {}
    for name, fn in functions.items():
        try:
            fn()
            torch.cuda.synchronize()
            alive[name], times[name] = fn, []
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    for _ in range(repeats):
        for name, fn in alive.items():
            flush_buffer().zero_()
            torch.cuda._sleep(pause)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            fn()
            end.record()
            times[name].append((begin, end))
    torch.cuda.synchronize()
    median = lambda pairs: sorted(b.elapsed_time(e) for b, e in pairs)[len(pairs) // 2]  # noqa: E731
    return {name: median(times[name]) if name in times else None for name in functions}


def candidates(op: str) -> dict:
    """Named configurations worth trying for `op`."""
    base = DEFAULT[op]
    small = dict(block_n=128, warps=4, stages=3, split=1, per_sm=2)
    if op in ("forward", "dgrad"):
        found = [{}, dict(flatten=False), dict(stages=4), dict(split=0), dict(group=16), dict(group=4),
                 dict(small, flatten=False), small]  # fmt: skip
    elif op == "gather":
        found = [{}, dict(impl="copy"), dict(stages=4), dict(group=16), dict(small, flatten=False)]
    elif op == "wgrad":
        found = [{}, dict(stages=4), dict(group=4), dict(group=16), dict(small), dict(cuts=1)]
    elif op == "wgrad_gather":
        found = [{}, dict(impl="triton"), dict(impl="triton", block_m=256, block_n=128)]
    elif op == "glu":
        found = [{}, dict(impl="triton")]
    elif op == "glu_only":
        found = [{}, dict(impl="split"), dict(group=16)]
    else:
        fused = dict(impl="triton")
        found = [{}, dict(fused, block_n=256), dict(fused, warps=4, per_sm=2, split=2)]
    return {",".join(f"{k}={v}" for k, v in c.items()) or "default": base._replace(**c) for c in found}


class Case:
    """Operands of one product, and each op on them as a function of the configuration."""

    def __init__(self, experts, k, n, rows, kind, up):
        normal = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
        self.experts, self.k, self.n, self.rows, self.up = experts, k, n, rows, up
        offsets = torch.tensor(group_sizes(experts, rows, kind)).cumsum(0).to(torch.int32).cuda()
        self.routing: Routing = from_offsets(offsets, rows)
        self.w = normal(experts, k, n)
        self.x, self.g = normal(rows, k), normal(rows, n)
        self.index = torch.randint(0, max(rows // 8, 1), (rows,), dtype=torch.int32, device="cuda")

    def ops(self) -> dict:
        """op -> function of a configuration. The up product reads token rows through the index, the down product's
        backward reads token gradients so."""
        o, b, order, index = self.routing.offsets, self.routing.blocks, self.routing.order, self.index
        tokens = max(self.rows // 8, 1)
        found = {
            "forward": lambda c: rows_launch(self.x, self.w, o, b, config=c),
            "dgrad": lambda c: rows_launch(self.g, self.w, o, b, transposed=True, config=c),
            "wgrad": lambda c: wgrad_launch(self.x, self.g, o, order, config=c),
        }
        if self.up:
            x = self.x[:tokens]
            return found | {
                "gather": lambda c: rows_launch(x, self.w, o, b, index, config=c),
                "glu": lambda c: glu_launch(x, self.w, o, b, index, config=c),
                "glu_only": lambda c: glu_launch(x, self.w, o, b, index, keep=False, config=c),
                "wgrad_gather": lambda c: wgrad_launch(x, self.g, o, order, index, config=c),
            }
        g, scale = self.g[:tokens], torch.rand(self.rows, device="cuda")
        h = torch.randn(self.rows, 2 * self.k, dtype=torch.bfloat16, device="cuda")
        return found | {
            "glu_backward": lambda c: glu_backward_launch(g, self.w, h, scale, o, b, index, config=c),
            "wgrad_gather": lambda c: wgrad_launch(self.x, g, o, order, None, index, config=c),
        }

    def library(self) -> dict:
        """What torch offers: `_grouped_mm`, and the dense product of equal FLOPs."""
        offs = self.routing.offsets
        dense = self.w[0]
        return {
            "forward": (lambda: torch._grouped_mm(self.x, self.w, offs=offs), lambda: self.x @ dense),
            "dgrad": (lambda: torch._grouped_mm(self.g, self.w.mT, offs=offs), lambda: self.g @ dense.mT),
            "wgrad": (lambda: torch._grouped_mm(self.x.mT, self.g, offs=offs), lambda: self.x.mT @ self.g),
        }


def key(op: str, case: Case) -> tuple:
    """Table key of an op on a case: N result columns and K as `table.choose` sees them."""
    n, k = (case.k, case.n) if op in ("dgrad", "glu_backward") else (case.n, case.k)
    n = case.n // 2 if op in ("glu", "glu_only") else n
    return (op, n, k, case.experts, bucket(case.rows, case.experts))


def warm(task):
    """Compile one op's candidates in a process of its own (the compiler's disk cache is shared)."""
    op, up = task
    run = Case(8, 256, 512, 1024, "balanced", up).ops()[op]
    for config in candidates(op).values():
        try:
            run(config)
        except Exception:
            pass
    torch.cuda.synchronize()


def ops_of(name: str) -> list[str]:
    """The ops that a layer runs on its up or down product."""
    if name.endswith("/up"):
        return ["forward", "dgrad", "wgrad", "gather", "glu", "glu_only", "wgrad_gather"]
    return ["forward", "dgrad", "wgrad", "glu_backward", "wgrad_gather"]


def measure(todo, kinds, repeats, only="") -> list[dict]:
    """One line a (product, op, routing): milliseconds of each candidate, of torch and of the dense product."""
    lines = []
    for name, experts, k, n, rows in todo:
        for kind in kinds:
            case = Case(experts, k, n, rows, kind, name.endswith("/up"))
            run, library = case.ops(), case.library()
            for op in (op for op in ops_of(name) if not only or op in only.split(",")):
                functions = {label: functools.partial(run[op], c) for label, c in candidates(op).items()}
                if op in library:
                    functions |= {"torch": library[op][0], "dense": library[op][1]}
                result = timed(functions, repeats)
                flops = 2 * rows * k * n
                rates = {label: flops / ms / 1e9 for label, ms in result.items() if ms}
                lines.append({"shape": name, "op": op, "routing": kind, "key": key(op, case), "tflops": rates})
                show = " ".join(f"{label}:{rate:.0f}" for label, rate in rates.items())
                print(f"{name:20s} {kind:8s} {op:12s} {show}", flush=True)
            del case, run, library, functions
    return lines


def chosen(lines) -> dict:
    """Best candidate of every key, by the geometric mean of its rates over the routings."""
    table: dict = {}
    for line in lines:
        for label, rate in line["tflops"].items():
            if label != "dense":
                table.setdefault(tuple(line["key"]), {}).setdefault(label, []).append(rate)
    best = {}
    for where, rates in table.items():
        full = max(len(r) for r in rates.values())
        score = {label: torch.tensor(r).log().mean().item() for label, r in rates.items() if len(r) == full}
        label = max(score, key=score.get)
        if label == "torch":
            best[where] = {"impl": "torch"}
        elif label != "default":
            config, base = candidates(where[0])[label], DEFAULT[where[0]]
            best[where] = {f: v for f, v in config._asdict().items() if v != getattr(base, f)}
    return best


def write(best: dict, path: Path) -> None:
    """`tuned.py` from the winners."""
    text = ['"""Measured choices, written by `python -m kernels.tune`; the rest runs the defaults of `table.py`."""']
    text += ["", "TUNED: dict[tuple[str, int, int, int, int], dict] = {"]
    text += [f"    {k!r}: {v!r},".replace("'", '"') for k, v in sorted(best.items())]
    path.write_text("\n".join([*text, "}", ""]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="raw results, JSON")
    parser.add_argument("--write", action="store_true", help="rewrite kernels/tuned.py from the results")
    parser.add_argument("--only", default="", help="comma-separated layer names")
    parser.add_argument("--ops", default="", help="comma-separated ops")
    parser.add_argument("--routings", default="balanced,zipf")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--processes", type=int, default=12, help="processes that compile ahead")
    args = parser.parse_args()
    layers = [entry for entry in LAYERS if not args.only or entry[0] in args.only.split(",")]
    todo, begin = products(layers), time.time()
    tasks = sorted({(op, name.endswith("/up")) for name, *_ in todo for op in ops_of(name)
                    if not args.ops or op in args.ops.split(",")})  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(warm, tasks, chunksize=1)
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    lines = measure(todo, args.routings.split(","), args.repeats, args.ops)
    args.out.write_text(json.dumps(lines))
    if args.write:
        write(chosen(lines), Path(__file__).with_name("tuned.py"))
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
