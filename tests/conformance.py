"""Runs a case of the conformance table on layouts: one trace for all of them, all ranks in lockstep, no processes.

``python tests/conformance.py [NAMES]`` runs every layout in every variant: fp32 and bf16, values and gradients, inputs
and blocks that lie transposed in memory. ``test_conformance.py`` runs parts of that. ``CONFORMANCE_DEVICE=cuda`` runs
the ranks' programs on a GPU.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from conformance_cases import CASES, KINDS, ROUGH_IN_BF16, Case

import fsharding as fs
from fsharding import P
from fsharding import tree as trees
from fsharding.annotate.spec import normalize
from fsharding.program import explain, lockstep
from fsharding.program.execute import set_device
from fsharding.program.graphs import drop_dead
from fsharding.program.partition import LocalProgram, Partition

DEVICE = os.environ.get("CONFORMANCE_DEVICE", "cpu")  # where the ranks run; the reference is one device, the CPU
if DEVICE != "cpu":  # fp32 is compared to 1e-5, and replicas bit by bit
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
TOLERANCE = 1e-5  # relative to a leaf's largest element, fp32
ULP = 2.0**-7  # of bf16, relative to a leaf's largest element
MOST_NOISE = {torch.float32: 1e-3, torch.bfloat16: 2.0**-4}  # one device's own error, above which a check says nothing


# ---- layouts ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Layout:
    """Mesh sizes, the axes that split the rows, the data axes that each dim of ``w`` rests on."""

    sizes: tuple[tuple[str, int], ...]
    rows: tuple[str, ...]
    stored: tuple[tuple[str, ...], ...]
    cut: bool = False  # does the model axis "tp" cut w?

    def __str__(self):
        sizes = "".join(f"{a}{n}" for a, n in self.sizes)
        at = ",".join("".join(axes) or "-" for axes in self.stored)
        return f"{sizes}:{''.join(self.rows)}:{at}{':tp' * self.cut}"

    @functools.cached_property
    def mesh(self):
        sizes = dict(self.sizes)
        return fs.make_mesh(sizes, model_axes=("tp",) if "tp" in sizes else (), fake=True)

    @property
    def plain(self) -> bool:
        """Rows over data axes, nothing else."""
        return "tp" not in dict(self.sizes)

    def specs(self, case: Case, turned: bool = False) -> tuple[P, P, P]:
        """Of w, x and y; ``turned``: the first dims of w and x come last."""
        w, x, model_dim = KINDS[case.kind][1:]
        dims = [*self.stored, *[()] * (len(w) - len(self.stored))]
        if self.cut:
            dims[model_dim] = ("tp", *dims[model_dim])
        rows = [self.rows, *[()] * (len(x) - 1)]
        if turned:
            dims, rows = [*dims[1:], dims[0]], [*rows[1:], rows[0]]
        return P(*(d or None for d in dims)), P(*(d or None for d in rows)), P(self.rows)


def layout(sizes: dict[str, int], rows, *stored, cut=False) -> Layout:
    return Layout(tuple(sizes.items()), tuple(rows), tuple(map(tuple, stored)), cut)


LAYOUTS = [  # the first three are what the fast tests run
    layout({"d": 3}, "d", "d"),
    layout({"a": 2, "b": 4}, "ba", "", "ab"),
    layout({"d": 2, "tp": 2}, "d", "d", cut=True),
    layout({"d": 2}, "d", "", "d"),
    layout({"d": 4}, "d", "d"),
    layout({"d": 8}, "d", "d"),
    layout({"d": 8}, "d"),
    layout({"a": 2, "b": 2}, "ab", "ab"),
    layout({"a": 3, "b": 2}, "ab", "b", "a"),
    layout({"d": 3, "tp": 2}, "d", "", "d"),
    layout({"d": 4, "tp": 2}, "d", cut=True),
    layout({"a": 2, "tp": 2, "b": 2}, "ba", "b", "a", cut=True),
]


PLAIN_MESHES = [fs.make_mesh({"one": 1}, fake=True)]


# ---- programs --------------------------------------------------------------------------------------------------------
def weights(out: torch.Tensor) -> torch.Tensor:
    """Another factor for each element, so that a permutation of a result is another loss."""
    return (torch.arange(out.numel()).reshape(out.shape) % 7 + 1).float()


def with_gradients(f: Callable) -> Callable:
    """((loss, result), gradients) of a fixed nonlinear loss of the result."""

    def loss(w, x, y):
        out = f(w, x, y)
        z = out.float() if out.dtype in (torch.bfloat16, torch.float16) else out
        if z.is_floating_point():
            return (((z * 0.3).sin() + z.square() * 0.1) * weights(z)).sum(), out
        return w.float().sum() + x.float().square().sum(), out

    return fs.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def turned(f: Callable) -> Callable:
    """The same of inputs whose first dim comes last, so that what ``f`` sees lies transposed in memory."""
    return lambda w, x, y: f(w.movedim(-1, 0), x.movedim(-1, 0), y)


def turn(w, x, y):
    return w.movedim(0, -1).contiguous(), x.movedim(0, -1).contiguous(), y


class Traced:
    """A function traced once. Each layout gets its own partition of the one global program, as ``fs.shard`` does it."""

    def __init__(self, f: Callable, args):
        self.args = args
        self.low = fs.shard(f, fs.make_mesh({"one": 1}, fake=True)).lower(*args)

    def plan(self, mesh, specs, strict: bool = False) -> tuple[LocalProgram, list[str]]:
        """The local program, and what was warned about."""
        inputs = list(self.low.local.inputs)
        for i, (spec, x) in enumerate(zip(specs, self.args, strict=True)):
            inputs[i] = replace(inputs[i], dims=normalize(spec, x.ndim, mesh.axis_names, inputs[i].name))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", ".*deterministic")  # a shape function of PyTorch may say so
            local = Partition(mesh, strict=strict).run(self.low.program.graph, inputs, None)
        drop_dead(local.graph)
        set_device(local.graph, torch.device(DEVICE))
        return local, [str(w.message) for w in caught]

    def run(self, local: LocalProgram, lay: Callable = lambda block: block) -> list[torch.Tensor]:
        """Flat results; ``lay`` makes another memory layout of each rank's block of each input."""
        flat, mesh = [*self.args, *self.low.program.constants], local.mesh
        blocks = [
            [lay(lockstep.cut(x, spec, mesh, rank)).to(DEVICE) for x, spec in zip(flat, local.inputs, strict=True)]
            for rank in range(mesh.size)
        ]
        results = lockstep.run(local.graph, mesh, blocks)
        return lockstep.join(local, [[x.cpu() for x in own] for own in results])


def transposed(block: torch.Tensor) -> torch.Tensor:
    """The same block with other strides."""
    if block.ndim < 2:
        return torch.stack([block, block], -1)[..., 0]
    return block.transpose(-1, -2).contiguous().transpose(-1, -2)


def fallbacks(local: LocalProgram) -> list[explain.Collective]:
    return [c for c in explain.collectives(local) if c.kind == "fallback"]


# ---- comparison ------------------------------------------------------------------------------------------------------
class Reference:
    """One device's results of a function in a dtype, and in a wider one."""

    def __init__(self, f: Callable, args):
        self.f, self.args, self.dtype = f, args, args[0].dtype
        self.own = flat(f(*args))

    @functools.cached_property
    def there(self) -> list[torch.Tensor] | None:
        """One device's results where the ranks run; None if that is the CPU, or the function holds CPU tensors."""
        if DEVICE == "cpu":
            return None
        try:
            return [x.cpu() for x in flat(self.f(*(x.to(DEVICE) for x in self.args)))]
        except RuntimeError:
            return None

    @functools.cached_property
    def exact(self) -> list[torch.Tensor]:
        wide = {torch.float32: torch.float64, torch.bfloat16: torch.float32}[self.dtype]
        return flat(self.f(*(x.to(wide) if x.is_floating_point() else x for x in self.args)))

    def check(self, got: list[torch.Tensor]) -> str:
        """What is wrong with the results, or nothing.

        fp32: within 1e-5 of one device. Where rounding makes more of a difference (and always in bf16): no further from
        the wider result than twice one device's own error, plus one rounding; and that error must itself be small, or
        the comparison would say nothing. On a GPU whose kernels pick another of several ties, or order sums otherwise
        from run to run, one GPU's results are as good a reference.
        """
        wrong = self._differs(got, self.own)
        return self._differs(got, self.there) if wrong and self.there is not None else wrong

    def _differs(self, got: list[torch.Tensor], own: list[torch.Tensor]) -> str:
        assert len(got) == len(own)
        for i, (x, y) in enumerate(zip(got, own, strict=True)):
            if x.shape != y.shape or x.dtype != y.dtype:
                return f"result {i} is {x.dtype} {list(x.shape)}, not {y.dtype} {list(y.shape)}"
            if self.dtype == torch.float32 and distance(x, y) <= TOLERANCE:
                continue
            if self.dtype == torch.bfloat16 and distance(x, y) <= ULP:
                continue
            exact = self.exact[i]
            error, own = distance(x, exact), distance(y, exact)
            if not own <= MOST_NOISE[self.dtype]:
                return f"result {i}: one device's own error is {own:.2g}"
            if not error <= 2 * own + (TOLERANCE if self.dtype == torch.float32 else ULP):
                return f"result {i} is off by {error:.2g}, one device by {own:.2g}"
        return ""


def flat(tree) -> list[torch.Tensor]:
    return trees.flatten(tree)[0]


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference, relative to the largest element. NaN is far from everything."""
    x, y = x.double(), y.double()
    if not y.numel():
        return 0.0
    found = ((x - y).abs().max() / (y.abs().max().item() or 1.0)).item()
    return math.inf if math.isnan(found) else found


# ---- the full product ------------------------------------------------------------------------------------------------
def variants(case: Case):
    """(name, function, args, are the specs turned?) of each variant that one device runs."""
    for dtype in (torch.float32, torch.bfloat16):
        args, name = case.inputs(dtype), str(dtype).removeprefix("torch.")
        yield f"{name} gradients", with_gradients(case.run), args, False
        yield f"{name} turned", with_gradients(turned(case.run)), turn(*args), True
    yield "float32 values", case.run, case.inputs(), False


def run_all(case: Case, rotate: int | None = None) -> list[str]:
    """Every difference of a case that is not refused.

    Args:
        rotate: fp32 gradients on every layout, other variants on one layout only, chosen by this number.
    """
    found = []
    for number, (name, f, args, turn_specs) in enumerate(variants(case)):
        if args[0].dtype == torch.bfloat16 and (case.name in ROUGH_IN_BF16 or (rotate is not None and turn_specs)):
            continue
        try:
            reference = Reference(f, args)
        except (RuntimeError, TypeError):  # one device cannot, in this dtype
            assert "bfloat16" in name, name
            continue
        traced, layouts = Traced(f, args), LAYOUTS
        if rotate is not None and number:
            layouts = [LAYOUTS[(rotate * 5 + number * 3) % len(LAYOUTS)]]
        for at in layouts:
            local, _ = traced.plan(at.mesh, at.specs(case, turn_specs))
            wrong = reference.check(traced.run(local, transposed if turn_specs else lambda block: block))
            if wrong:
                found.append(f"{case.name}, {name} on {at}: {wrong}")
            if case.expected == "rule" and at.plain and fallbacks(local):
                found.append(f"{case.name}, {name} on {at}: falls back")
    return found


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for number, name in enumerate(names):
        for line in run_all(CASES[name]) if CASES[name].expected != "refused" else ():
            print(line, flush=True)
        if number % 50 == 0:
            print(f"{number} of {len(names)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
