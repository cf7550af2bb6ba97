"""Train a small Qwen3-MoE, byte by byte, on the source text of Python's own standard library.

    python examples/train_moe.py --ranks 4                                   # starts its own processes (CPU: gloo)
    python examples/train_moe.py --ranks 2 --device cuda --precision bf16    # GPUs: NCCL
    torchrun --nproc-per-node 4 examples/train_moe.py --layout hsdp --mesh replicate=2,efsdp=2

The step below is what one device would compute. ``fs.shard`` decides where it happens; at the end one process repeats
the first steps with the same function, unsharded, and the two must agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import subprocess
import sys
import time

import optree
import text_data
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import fsharding as fs
from fsharding.models import qwen3_moe

LAYOUTS = ("fsdp", "hsdp", "dp2ep", "legacy_ep")
TRAVEL = ("dp2ep", "legacy_ep")  # with expert parallelism
PARITY_STEPS = 5
PARITY_LIMIT = 1e-5


def parse(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value, text in (
        ("layers", 2, "transformer blocks"),
        ("hidden", 64, "hidden size"),
        ("heads", 4, "query heads"),
        ("kv-heads", 2, "key and value heads"),
        ("experts", 8, "experts a layer"),
        ("top-k", 2, "experts a token"),
        ("expert-hidden", 64, "hidden size of one expert"),
        ("steps", 160, "optimizer steps"),
        ("batch", 32, "sequences a step, over all ranks"),
        ("seq", 128, "bytes a sequence"),
        ("micro-batches", 1, "parts of a batch that are accumulated"),
        ("seed", 0, "of weights and batches"),
    ):
        p.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    p.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (default 4e-3)")
    p.add_argument("--layout", choices=LAYOUTS, default="dp2ep", help="where parameters rest (default dp2ep)")
    p.add_argument("--dispatcher", choices=("all_to_all", "gather"), default="all_to_all",
                   help="how tokens reach experts on other ranks (default all_to_all)")  # fmt: skip
    p.add_argument("--tp", type=int, default=1, help="ranks that share attention heads, beside the layout (default 1)")
    p.add_argument("--mesh", help="axes and sizes, as efsdp=2,ep=2 (default: chosen from layout and ranks)")
    p.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the arithmetic; masters are fp32")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--ranks", type=int, help="processes to start (default: the GPUs, at most 8, else 4)")
    args = p.parse_args(argv)
    if "WORLD_SIZE" in os.environ:  # under a launcher, which decides
        args.ranks = int(os.environ["WORLD_SIZE"])
    elif args.ranks is None:
        gpus = min(torch.cuda.device_count(), 8) if args.device == "cuda" else 4
        args.ranks = 1 << gpus.bit_length() - 1  # a power of two, which divides the default batch
    if args.ranks % args.tp or args.heads % args.tp or args.kv_heads % args.tp:
        p.error(f"--tp {args.tp} must divide --ranks {args.ranks}, --heads {args.heads} and --kv-heads {args.kv_heads}")
    if args.dispatcher != "all_to_all" and args.layout not in TRAVEL:
        p.error(f"--dispatcher {args.dispatcher} needs a layout in which tokens travel: {' or '.join(TRAVEL)}")
    if args.batch % (args.ranks * args.micro_batches):
        p.error(f"--batch {args.batch} must be divisible by ranks x micro-batches = {args.ranks * args.micro_batches}")
    # layout, mesh, ... change where the step happens, not what it learns
    free = ("layout", "dispatcher", "mesh", "tp", "precision", "device", "ranks")
    args.default_sizes = all(v == p.get_default(name) for name, v in vars(args).items() if name not in free)
    try:
        args.axes = mesh_axes(args)
    except ValueError:
        p.error(f"--mesh {args.mesh} must read as efsdp=2,ep=2")
    return args


def mesh_axes(args) -> dict[str, int]:
    """The mesh as asked for, or the usual one of a layout: two-way experts or replicas where ranks are even."""
    if args.mesh:
        return {name: int(size) for name, size in (part.split("=") for part in args.mesh.split(","))}
    ranks, last = args.ranks // args.tp, {"tp": args.tp} if args.tp > 1 else {}
    two = 2 if ranks % 2 == 0 else 1
    first = {"fsdp": {}, "hsdp": {"replicate": two}}.get(args.layout)
    if first is None:
        return {"efsdp": ranks // two, "ep": two, **last}
    return {**first, "efsdp": ranks // (two if first else 1), **last}


def model_config(args) -> qwen3_moe.Config:
    return qwen3_moe.Config(
        vocab_size=text_data.VOCABULARY,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=max(args.hidden // args.heads // 2 * 2, 2),
        moe_intermediate_size=args.expert_hidden,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        rope_theta=1e4,
        router_aux_loss_coef=1e-2,
        initializer_range=0.05,
    )


# ---- what one device would compute -----------------------------------------------------------------------------------
def make_step(cfg, optimizer, micro_batches):
    """(params, state, batch) -> (params, state, metrics): loss, gradient, clipping and update in one pure function."""

    def loss(params, batch):
        return qwen3_moe.loss(params, batch, cfg)

    def mean(params, batch):
        total, weight = loss(params, batch)
        return total / weight

    value_and_grad = fs.value_and_grad(mean) if micro_batches == 1 else fs.accumulate(loss, micro_batches)

    def step(params, state, batch):
        value, grads = value_and_grad(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return fs.optim.apply_updates(params, updates), state, {"loss": value, "grad_norm": state[0].norm}

    return step


def make_optimizer(args):
    rate = fs.optim.warmup_cosine(args.lr, max(1, args.steps // 10), max(2, args.steps), end=args.lr / 10)
    return fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(rate, b2=0.99, weight_decay=0.1))


def make_evaluate(cfg):
    """(params, batch) -> (sum of cross-entropies, number of bytes), without the balancing term."""
    plain = dataclasses.replace(cfg, router_aux_loss_coef=0.0)

    def evaluate(params, batch):
        return qwen3_moe.loss(params, batch, plain)

    return evaluate


# ---- where it happens ------------------------------------------------------------------------------------------------
class Trainer:
    """The mesh, the text, the sharded functions, and the console of the first rank."""

    def __init__(self, args):
        self.args, self.cfg = args, model_config(args)
        model_axes = ("tp",) if "tp" in args.axes else ()
        self.mesh = fs.make_mesh(args.axes, device=args.device, model_axes=model_axes)
        self.rank = self.mesh.rank
        self.console = Console(quiet=self.rank != 0, soft_wrap=True)
        self.train_text, self.held_text = text_data.standard_library()
        self.optimizer = make_optimizer(args)
        self.plain_step = make_step(self.cfg, self.optimizer, args.micro_batches)
        precision = None if args.precision == "fp32" else fs.Precision(compute="bfloat16", reduce="float32")
        # in the layouts with expert parallelism the tokens travel to the experts, in the others weights are gathered
        how = dict(precision=precision, experts=fs.Experts("ep", args.dispatcher) if args.layout in TRAVEL else None)
        self.step = fs.shard(self.plain_step, self.mesh, donate_argnums=(0, 1), **how)
        self.evaluate = fs.shard(make_evaluate(self.cfg), self.mesh, **how)
        described = qwen3_moe.axes(self.cfg)
        layout = getattr(fs.layouts, args.layout)(self.mesh)
        specs = (fs.layouts.tensor_parallel(layout) if model_axes else layout)(described)
        self.params = fs.init(described, self.mesh, specs, seed=args.seed)
        self.state = self.optimizer.init(self.params)

    def say(self, text=""):
        self.console.print(text, markup=False, highlight=False)

    def batch(self, step):
        """The whole batch of a step, the same on every rank."""
        return text_data.batch_at(self.train_text, step, self.args.batch, self.args.seq, self.args.seed)

    def place(self, batch):
        """This rank's rows of a whole batch, joined to one value over the data axes."""
        rows, at, parts = {}, 0, 1
        for axis, where in self.mesh.coordinates().items():
            if axis in self.mesh.data_axes:
                at, parts = at * self.mesh.shape[axis] + where, parts * self.mesh.shape[axis]
        for name, value in batch.items():
            n = value.shape[0] // parts
            rows[name] = value[at * n : (at + 1) * n].to(self.args.device)
        return fs.from_local(rows, self.mesh, fs.P(self.mesh.data_axes))

    # ---- before the first step
    def introduce(self):
        size = sum(p.numel() for p in optree.tree_leaves(self.params))
        axes = ", ".join(f"{k}={v}" for k, v in self.mesh.shape.items())
        self.say(f"{size:,} parameters, {self.mesh.size} ranks ({axes}), layout {self.args.layout}, "
                 f"{self.args.device} {self.args.precision}; {len(self.train_text):,} bytes of text")
        started = time.perf_counter()
        lowered = self.step.lower(self.params, self.state, self.place(self.batch(0)))
        self.console.print(collective_table(lowered.collectives(), time.perf_counter() - started))

    # ---- training
    def train(self):
        """Run all steps; return the metrics of the first ones."""
        first, args = [], self.args
        columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("compiling", total=args.steps)
            then, done = time.perf_counter(), 0
            for i in range(args.steps):
                batch = self.place(self.batch(i))
                self.params, self.state, metrics = self.step(self.params, self.state, batch)
                if i < PARITY_STEPS:
                    first.append(numbers(metrics))
                if i % 10 == 0 or i == args.steps - 1:
                    shown, now = numbers(metrics), time.perf_counter()  # reading the numbers waits for the step
                    speed = (i - done) * args.batch * args.seq / max(now - then, 1e-9)  # since the last look
                    then, done = now, i
                    text = f"loss {shown['loss']:.3f}  |g| {shown['grad_norm']:.2f}  {speed:,.0f} tokens/s"
                    progress.update(task, completed=i + 1, description=text)
                    if not self.console.is_terminal and (i % 50 == 0 or i == args.steps - 1):
                        self.say(f"step {i + 1:4d}  {text}")
        return first

    def held_out(self, sequences=256):
        """Loss on held-out text, and what byte pairs achieve on the same bytes."""
        length, ranks = self.args.seq, self.mesh.size
        most = min(sequences, (len(self.held_text) - 1) // length)
        rows = ranks * max(1, min(8, most // ranks))
        count = max(1, most // rows) * rows
        total = weight = 0.0
        for i in range(0, count, rows):
            starts = torch.arange(i, i + rows) * length
            batch = self.place(text_data.windows(self.held_text, starts, length))
            part = numbers(self.evaluate(self.params, batch))
            total, weight = total + part[0], weight + part[1]
        bigram = text_data.bigram_entropy(self.train_text, self.held_text[: count * length + 1])
        return total / weight, bigram

    # ---- checks and a look at the result
    def parity(self, start, first):
        """The same first steps by the plain function on one device in fp32: the largest relative differences."""
        params, state = start, self.optimizer.init(start)
        errors: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        for i, expected in enumerate(first):
            params, state, metrics = self.plain_step(params, state, to_device(self.batch(i), self.args.device))
            one = numbers(metrics)
            for name, seen in errors.items():
                error = abs(expected[name] - one[name]) / abs(one[name])
                seen.append(error if math.isfinite(error) else math.inf)  # max() would pass over a NaN
        return {name: max(seen, default=0.0) for name, seen in errors.items()}

    def sample(self, params, count=240, temperature=0.7):
        """Text that the model continues, by the plain function on gathered parameters."""
        generator = torch.Generator().manual_seed(self.args.seed)
        text = list(b"import os\n\n\nclass ")
        for _ in range(count):
            window = torch.tensor([text[-self.args.seq :]], device=self.args.device)
            with torch.no_grad():
                logits, _ = qwen3_moe.forward(params, window, self.cfg)
            probabilities = torch.softmax(logits[0, -1].float().cpu() / temperature, -1)
            text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return bytes(text).decode("utf-8", "replace")


def collective_table(collectives, seconds) -> Table:
    """What the step sends, by kind, mesh axes and phase."""
    table = Table(title=f"collectives of one step (traced and partitioned in {seconds:.1f} s)", title_justify="left")
    for name, side in (("phase", "left"), ("kind", "left"), ("axes", "left"), ("dtype", "left"), ("count", "right"),
                       ("bytes a rank", "right")):
        table.add_column(name, justify=side, no_wrap=True)
    groups: dict[tuple, list[int]] = {}
    for c in collectives:
        groups.setdefault((c.phase, c.kind, ", ".join(c.axes), str(c.dtype).removeprefix("torch.")), []).append(c.bytes)
    order = {"forward": 0, "backward": 1, "update": 2}
    for key, sizes in sorted(groups.items(), key=lambda item: (order.get(item[0][0], 3), item[0])):
        table.add_row(*map(str, key), str(len(sizes)), f"{sum(sizes):,}")
    return table


def numbers(values):
    """0-d results as Python numbers."""
    full = fs.device_get(values)
    return {k: v.item() for k, v in full.items()} if isinstance(full, dict) else tuple(v.item() for v in full)


def to_device(tree, device):
    return {name: value.to(device) for name, value in tree.items()}


def main(args) -> int:
    """Train, check and show; 0 if all checks hold."""
    if args.device == "cpu":
        torch.set_num_threads(1 if args.ranks > 1 else max(1, (os.cpu_count() or 2)))
    started = time.perf_counter()
    trainer = Trainer(args)
    # copies, because the first step writes its results into what it was given
    start = optree.tree_map(torch.clone, fs.device_get(trainer.params))
    trainer.introduce()
    first = trainer.train()
    held, bigram = trainer.held_out()
    final = fs.device_get(trainer.params)
    code = 0
    if trainer.rank == 0:
        code = report(trainer, start, first, held, bigram, final)
        trainer.say(f"\n{time.perf_counter() - started:.0f} s in all")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return code


def report(trainer, start, first, held, bigram, final) -> int:
    args = trainer.args
    trainer.say(f"\nheld-out loss {held:.4f} nats a byte; bigram entropy of the same bytes {bigram:.4f}")
    trainer.say("  (bigram: -mean log p(byte | byte before it), pairs counted in the training text, add-one smoothing)")
    worst = trainer.parity(start, first)
    trainer.say(f"parity: max |Δloss| {worst['loss']:.1e}  max |Δgrad_norm| {worst['grad_norm']:.1e}  "
                f"(relative, first {len(first)} steps, against one process in fp32)")
    trainer.say(f"\nsample:\n{trainer.sample(final)}")
    failed = []
    if args.precision == "fp32" and max(worst.values()) > PARITY_LIMIT:
        failed.append(f"parity is worse than {PARITY_LIMIT}")
    if args.default_sizes and not held < bigram:
        failed.append("the held-out loss is not below the bigram entropy")
    for line in failed:
        trainer.say(f"FAILED: {line}")
    return 1 if failed else 0


def launch(args) -> int:
    """Start ``args.ranks`` copies of this script on this machine; the launcher picks and keeps a free port."""
    # one thread a rank, and the loopback device: some machines cannot resolve their own name
    cpu = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    env = {**cpu, **os.environ} if args.device == "cpu" else dict(os.environ)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
               "--nproc-per-node", str(args.ranks), os.path.abspath(__file__), *sys.argv[1:]]
    return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    settings = parse()
    alone = "RANK" in os.environ or settings.ranks == 1
    sys.exit(main(settings) if alone else launch(settings))
