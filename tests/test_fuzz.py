"""Random programs: sharded, each must equal one device or be refused.

What is generated. A seed stands for a chain of 3 to 8 torch ops, drawn from the tables below, over a matrix or vector
`w` that is stored, rows `x`, integer rows `y`, a bias `b`, a scalar `s` and two constants that the program closes over;
a mesh of 2 to 6 ranks; a spec for each argument. All numbers are float64. A seed gives two programs: the values that no
later step uses, and `fs.value_and_grad` of a loss over these w.r.t. all float arguments. All ranks run in lockstep in
this process, with NaN in the padding of uneven shards.

What is checked. A program is "equal" (shapes, dtypes, and numbers to 1e-9), "refused" (`fs.ShardingError`), or "wrong":
another number or any other exception. It is "skipped" where one device has no number to compare with: it raises, is
not finite, or moves by far more than its inputs when these move by rounding.

To replay a seed, or to run more: `python tests/test_fuzz.py FIRST COUNT` runs the seeds FIRST to FIRST + COUNT - 1 and
prints the mesh, the specs and the source of each wrong program, then the counts.
"""

from __future__ import annotations

import collections
import dataclasses
import linecache
import math
import random
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from programs import simulate

import fsharding as fs
from fsharding import P
from fsharding import tree as trees

N = 8  # rows
TOLERANCE = 1e-9  # relative to the largest element of a leaf
FLOOR = 1e-3  # leaves smaller than this part of the largest leaf (or of 1) are compared as if they were that large
NUDGE, STEADY = 1e-12, 1e-8  # inputs moved by NUDGE must not move one device's result by more than STEADY
MOST = 4000  # elements of one value

MESHES = [{"d": 2}, {"d": 4}, {"d": 3}, {"a": 2, "b": 2}, {"a": 2, "c": 1, "b": 2}, {"d": 2, "e": 3}]
MESHES += [{"d": 2, "tp": 2}, {"a": 2, "tp": 2, "b": 2}]  # "tp" is a model axis: it may cut w
W_SHAPES = [(6, 8), (8, 8), (7, 6), (8,), (4, 8), (5, 8), (8, 6)]
X_SHAPES = [(N, 6), (N, 8), (N, 4, 6), (6, N), (N,)]
ARGUMENTS, FLOATS = "wxybs", (0, 1, 3, 4)

# ---- op templates, by kind -------------------------------------------------------------------------------------------
# {a} is a value, {b} another; of {a}: {d} and {e} are dims, {m} is {d} from the end, {dims} one dim or two, {n} and {h}
# the size of {d} and half of it, {at} what indexes {d}, {n0} and {last} the first and last size, {perm} an order of the
# dims, {ones} a 1 or 2 for each; {k} is keepdim or nothing, {q} a small number, {t} integer indices. A template that
# does not fit its operands is drawn again.
TEMPLATES = {
    "unary": """
        torch.sin({a}); torch.tanh({a}); torch.exp({a} * 0.1); torch.sigmoid({a}); {a} * 2.5; {a} + 1.0; 1 - {a}; -{a};
        {a} / 3; 2 / ({a}.square() + 1); {a}.square(); {a}.pow(3); {a}.abs(); {a}.relu(); {a}.clamp(-1, 0.5);
        {a}.sign() * 0.3; {a}.remainder(0.7); {a}.frac(); F.silu({a}); F.gelu({a}); F.softplus({a}); F.elu({a});
        torch.nan_to_num({a}); ({a} > 0).double(); ({a}.abs() + 0.5).log(); {a}.round() + {a}
    """,
    "copy": """
        {a}.detach(); {a}.clone(); {a}.double(); {a}.contiguous(); torch.empty_like({a}).copy_({a});
        torch.zeros_like({a}) + {a}; torch.ones_like({a}); torch.full_like({a}, 0.3); {a}.new_zeros({a}.shape) + {a};
        {a}.new_ones({n0}); {a}.to(torch.float64, copy=True)
    """,
    "selfwise": """
        torch.where({a} > 0, {a}, 0.5); {a}.masked_fill({a} > 0.3, -0.7); {a}.lerp({a} * 2, 0.3);
        torch.logaddexp({a}, {a} * 0.5); torch.hypot({a}, torch.ones_like({a})); torch.maximum({a}, -{a});
        torch.atan2({a}, {a} + 3); torch.copysign({a}, -{a}); torch.addcmul({a}, {a}, {a}, value=0.5);
        torch.heaviside({a}, {a}); torch.addcdiv({a}, {a}, {a}.abs() + 1, value=0.5); torch.xlogy({a}, {a}.abs() + 1)
    """,
    "binary": """
        {a} + {b}; {a} - {b}; {a} * {b}; {a} / ({b}.abs() + 1); {a} - {b} * 0.5; torch.where({a} > {b}, {a}, 0.1);
        torch.where({b} > 0, {a}, {b}); torch.maximum({a}, {b}); torch.minimum({a} * 1.0, {b} * 1.0);
        torch.add({a}, {b}, alpha=2); torch.sub({a}, {b}, alpha=0.5); torch.fmod({a}, {b}.abs() + 1);
        torch.clamp({a}, min={b}); F.mse_loss({a}, {b}); F.huber_loss({a}, {b}, reduction="none"); ({a} > {b}) * {a};
        {a}.masked_fill({b} > 0, 0.2); torch.broadcast_tensors({a}, {b})[1]; torch.lerp({a}, {b}, 0.25); {b}.rsub({a})
    """,
    "reduce": """
        {a}.sum(); {a}.mean(); {a}.sum({dims}{k}); {a}.mean({dims}{k}); {a}.amax({dims}{k}); {a}.amin({d}{k});
        {a}.amax(); {a}.max(); {a}.max({d}).values; {a}.min({d}{k}).values; {a}.norm(); {a}.norm(dim={d}{k});
        torch.linalg.vector_norm({a}, ord=3, dim={d}{k}); torch.linalg.vector_norm({a}, ord=float("inf"));
        torch.logsumexp({a}, {dims}{k}); {a}.var({d}{k}); {a}.std({dims}{k}); {a}.prod({d}{k}); {a}.nansum({d});
        {a}.argmax({d}{k}); {a}.argmin({m}); ({a} > 0.2).any({d}{k}); ({a} > -0.2).all(); ({a} > 0).sum({d}{k});
        torch.count_nonzero({a}, {d}); torch.aminmax({a}, dim={d}).max; {a}.median({d}).values; {a}.nanmean({d}{k});
        {a}.sum({m}, dtype=torch.float64); torch.var_mean({a}, {d}{k})[1]; {a}.median(); {a}.argmax(); {a}.prod()
    """,
    "along": """
        {a}.cumsum({d}); {a}.cumprod({d}); {a}.logcumsumexp({d}); {a}.cummax({d}).values; torch.softmax({a}, {d});
        torch.log_softmax({a}, {m}); {a}.sort({d}).values; {a}.topk({h}, {d}).values; {a}.diff(dim={d});
        F.normalize({a}, dim={d}); F.layer_norm({a}, ({last},)); F.rms_norm({a}, ({last},)); F.glu({a}, {d});
        {a}.kthvalue({h}, {d}).values; F.softmin({a}, {d}); {a}.sort({d}, descending=True).indices; {a}.argsort({m})
    """,
    "view": """
        {a}.unsqueeze({d}); {a}.unsqueeze(-1); {a}.squeeze(); {a}[None]; torch.atleast_2d({a}); {a}.reshape(-1);
        {a}.reshape({q}, -1); {a}.reshape(-1, {q}); {a}.view(-1, {q}); {a}.expand(2, *{a}.shape); {a}.mT;
        {a}.unflatten({d}, ({q}, -1)); {a}.unflatten({d}, (-1, {q})); {a}.flatten({d}, {e}); {a}.permute({perm});
        {a}.movedim({d}, {e}); {a}.T; {a}.transpose({d}, {e}); {a}.T.contiguous(); {a}.select({m}, -1); {a}[{at}{h}];
        {a}.select({d}, 0); {a}.narrow({d}, 0, {h}); {a}[{at}{h}:]; {a}[{at}1:-1]; {a}[..., ::2]; {a}[{at}::2];
        {a}.unbind({d})[0]; {a}.unbind({d})[-1]; {a}.chunk(2, {d})[-1]; {a}.split({h}, {d})[0];
        {a}.tensor_split(2, {d})[0]; {a}.diagonal(); {a}.unfold({d}, 2, 2); {a}.view_as({b}); {a}.swapaxes({d}, -1)
    """,
    "rearrange": """
        {a}.flip({d}); {a}.roll(1, {d}); {a}.roll(-2, {m}); {a}.rot90(); {a}.repeat({ones}); {a}.tile(2); {a}.tril();
        {a}.repeat_interleave(2, {d}); {a}.triu(1); F.pad({a}, (1, 0)); F.pad({a}, (0, 2), value=0.3); {a}.tril(-1);
        F.pad({a}, (0, 0, 1, 1)); torch.diag_embed({a}); torch.diag({a}); {a}.expand({q}, *{a}.shape).clone()
    """,
    "product": """
        {a} @ {b}; {a} @ {b}.mT; {a}.mT @ {b}; {b} @ {a}; F.linear({a}, {b}); torch.tensordot({a}, {b}, 1);
        torch.outer({a}.reshape(-1)[:8], {b}.reshape(-1)[:8]); torch.kron({a}, {b}[:1]);
        torch.einsum("...i,...i->...", {a}, {b}); torch.einsum("...i,...j->...ij", {a}, {b});
        torch.einsum("ij,kj->ik", {a}, {b}); torch.einsum("ij,ik->jk", {a}, {b}); torch.einsum("ij,jk->k", {a}, {b});
        torch.einsum("ij,ij->j", {a}, {b}); torch.addmm({b}.sum(0), {a}, {b}, alpha=0.5);
        torch.bmm({a}, {b}.mT.expand({n0}, -1, -1)); torch.baddbmm({a} @ {a}.mT, {a}, {a}.mT, beta=0.5);
        F.scaled_dot_product_attention({a}[None], {b}[None], {b}[None]); F.cosine_similarity({a}, {b}, dim={d});
        F.scaled_dot_product_attention({a}, {a}, {a} * 0.5, is_causal=True); F.bilinear({a}, {a}, {a}.mT @ {a})
    """,
    "join": """
        torch.cat([{a}, {b}], {d}); torch.stack([{a}, {b}], {d}); torch.stack([{a}, {a} * 2], {d});
        torch.cat([{a}, {a}.sin()], {d}); torch.block_diag({a}, {b}); torch.hstack([{a}, {b}]);
        torch.cat([{a}, torch.ones({shape}, dtype=torch.float64)], {d}); torch.cat([{a}[{at}:1], {b}], {d});
        torch.stack({a}.unbind({d}), {e}); torch.cat({a}.chunk(2, {d})[::-1], {d}); torch.vstack([{a}, {b}])
    """,
    "index": """
        {a}[{at}{t} % {n}]; {a}.index_select({d}, {t} % {n}); F.embedding({t} % {n0}, {a}); {a}[{at}{t} % {n}][..., :1];
        {a}[{t} % {n0}, {t} % {last}]; {a}.gather({d}, {a}.argmax({d}, keepdim=True)); {a}.take({t} % {n});
        torch.take_along_dim({a}, {a}.argsort({d}), {d}); {a}.scatter({d}, {a}.argmax({d}, keepdim=True), 0.5);
        torch.zeros_like({a}).scatter_add({d}, {a}.argsort({d}), {a}); F.one_hot(y, 8).double();
        {a}.index_add({d}, I3 % {n}, {a}.index_select({d}, I3 % {n})); {a}.index_fill({d}, I3 % {n}, 0.4);
        torch.full_like({a}, 0.0).index_put(({t} % {n0},), {a}[{t} % {n0}], accumulate=True);
        torch.arange({n}).double() * {a}.movedim({d}, -1); (y[:, None] == torch.arange(6)).double();
        F.cross_entropy({a}, y % {last}); F.nll_loss({a}, y % {last}, reduction="none"); {a} * (y[:, None] > 3);
        F.cross_entropy({a}, y % {last}, ignore_index=0, reduction="sum"); {a}.gather({d}, {a}.argsort({d})[{at}:1]);
        torch.where((y > 2)[:, None], {a}, 0.0); torch.bucketize({a}, torch.tensor([-0.5, 0.0, 1.0]).double())
    """,
}
BASES = """
    {a} * 1; {a}.clone(); torch.zeros_like({a}); torch.empty_like({a}).fill_(0.2); torch.ones({shape}).double();
    {a}.transpose(0, {d}).clone().transpose(0, {d}); {a}.transpose(0, {d}).contiguous().transpose(0, {d}); {a}.sin()
"""
IN_PLACE = """
    {z}[{at}0] = 0.5; {z}[{at}:{h}] *= 2; {z}[{at}-1] = {a}[{at}0] * 3; {z}[{at}::2] = {a}[{at}::2].sin();
    {z}[{at}0:1].copy_({a}[{at}-1:]); {z}[..., 0] += {a}[..., -1]; {z}[{z} > 0] = 0.1; {z}[{t} % {n0}] = 0.2;
    {z}.mul_({a}); {z}.add_({a}).relu_(); {z}.add_({b}); {z}.exp_(); {z}.fill_(0.3); {z}.clamp_(max=0.2);
    {z}.copy_({a}.detach()); {z}.copy_({b}); {z}.masked_fill_({z} > 0.1, 0.4); {z}.select({d}, 0).add_(1);
    {z}.T.mul_(2); {z}.view(-1)[:2] = 0.1; {z}.unsqueeze(0).add_({a}); {z}.chunk(2, {d})[0].mul_(3);
    {z}.diagonal().add_(1); {z}.unbind({d})[-1].mul_(2); {z}.index_add_({d}, I3 % {n}, {a}.index_select({d}, I3 % {n}));
    {z}.scatter_({d}, {a}.argmax({d}, keepdim=True), 0.5); {z}.index_copy_({d}, I3[:1], {a}.narrow({d}, 0, 1))
"""
KINDS = "unary unary copy selfwise binary binary binary reduce reduce reduce along view view view rearrange".split()
KINDS += "product product join index index in_place in_place".split()  # repeated: drawn more often
LOSSES = [  # of one result
    "(t * 0.3).sin().sum() + t.square().sum() * 0.1",
    "((t * 0.3).sin() * weights(t)).sum()",
    "(t * weights(t)).mean()",
]
ANCHORS = ["", " + w.sum() * 0.01 + x.sum() * 0.01"]  # without it some losses do not depend on some arguments


def entries(text: str) -> list[str]:
    return [one.strip() for one in text.split(";") if one.strip()]


TABLE = {kind: entries(text) for kind, text in {**TEMPLATES, "base": BASES, "in_place": IN_PLACE}.items()}


# ---- programs --------------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Case:
    seed: int
    source: str
    f: Callable
    loss: Callable
    args: tuple
    sizes: dict[str, int]
    specs: tuple
    stored: tuple[int, ...]

    def programs(self) -> dict[str, Callable]:
        return {"values": self.f, "gradients": fs.value_and_grad(self.loss, argnums=FLOATS)}

    def __str__(self):
        shapes = ", ".join(f"{n}{list(v.shape)}: {p}" for n, v, p in zip(ARGUMENTS, self.args, self.specs, strict=True))
        return f"seed {self.seed}, mesh {self.sizes}, stored {self.stored}, {shapes}\n{self.source}"


def fields(r: random.Random, name: str, value: torch.Tensor, other: str) -> dict:
    """What the templates may name: see their comment."""
    shape, count = list(value.shape), value.ndim
    d, e = r.randrange(max(count, 1)), r.randrange(max(count, 1))
    n = shape[d] if count else 1
    dims = [d, d - count] + ([(d, (d + 1) % count)] if count > 1 else [])
    return dict(
        **dict(a=name, b=other, d=d, e=e, m=d - count, n=n, h=max(1, n // 2), at=":, " * d, shape=shape),
        **dict(n0=shape[0] if count else 1, last=shape[-1] if count else 1, perm=r.sample(range(count), count)),
        **dict(dims=r.choice(dims), k=r.choice(["", ", keepdim=True"]), q=r.choice([2, 3, 4, 6, 8])),
        **dict(ones=", ".join(r.choice("12") for _ in shape), t=r.choice(["y", "I3", f"torch.arange({n})"])),
    )


def draw(r: random.Random, values: dict[str, torch.Tensor], name: str) -> list[str]:
    """The lines of one more step, which assigns ``name``."""
    kind = r.choice(KINDS)
    fit = [k for k, v in values.items() if kind == "view" or v.is_floating_point()]
    a = fit[-1] if r.random() < 0.5 else r.choice(fit)  # the last one often, so that steps build on each other
    b = r.choice(list(values) if kind == "binary" else fit)
    known = fields(r, a, values[a], b) | {"z": name}
    if kind != "in_place":
        return [f"{name} = " + r.choice(TABLE[kind]).format(**known)]
    return [f"{name} = " + r.choice(TABLE["base"]).format(**known), r.choice(TABLE["in_place"]).format(**known)]


def define(seed: int, lines: list[str], results: list[str], loss: str) -> tuple[str, dict]:
    """The source of ``f`` and ``loss``, and the names that it defines."""
    parameters = ", ".join(ARGUMENTS)
    source = f"def f({parameters}):\n" + "".join(f"    {line}\n" for line in lines)
    source += f"    return ({', '.join(results)},)\n"
    source += f"def loss({parameters}):\n    results = [t.double() for t in f({parameters})]\n    return {loss}\n"
    g = torch.Generator().manual_seed(0)
    names = dict(torch=torch, F=F, C=torch.randn(8, 6, generator=g, dtype=torch.float64), I3=torch.tensor([2, 0, 2]))
    names["weights"] = lambda t: torch.arange(t.numel(), dtype=torch.float64).reshape(t.shape) % 3 + 1
    file = f"<fuzz {seed}>"
    exec(compile(source, file, "exec"), names)
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # messages quote the program's lines
    return source, names


def usable(value) -> bool:
    if not isinstance(value, torch.Tensor) or not 0 < value.numel() <= MOST or value.ndim > 4:
        return False
    return value.dtype in (torch.float64, torch.int64, torch.bool) and bool(value.double().isfinite().all())


def write(r: random.Random, seed: int, args: tuple) -> tuple[str, dict]:
    """A program that runs on one device."""
    values = {"C": torch.zeros(8, 6).double()} if r.random() < 0.3 else {}
    values |= zip(ARGUMENTS, args, strict=True)
    lines, unused, names = [], [], [f"t{i}" for i in range(r.randint(3, 8))]
    while names:
        try:
            more = draw(r, values, names[0])
            (value,) = define(seed, lines + more, names[:1], "0")[1]["f"](*copies(args))
        except Exception:  # the template does not fit
            continue
        if usable(value):
            lines, values[names[0]] = lines + more, value
            unused = [k for k in unused if not any(k in line for line in more)] + [names.pop(0)]
    loss = f"sum({r.choice(LOSSES)} for t in results)" + r.choice(ANCHORS)
    return define(seed, lines, unused, loss)


def copies(args: tuple) -> tuple:
    return tuple(x.clone() for x in args)


# ---- layouts ---------------------------------------------------------------------------------------------------------
def divides(n: int, axes: list[str], sizes: dict[str, int]) -> bool:
    return n % math.prod(sizes[axis] for axis in axes) == 0


def spread(r: random.Random, shape, sizes: dict[str, int], uneven: bool) -> P:
    """Some of the axes, in any order, over any dims; in mesh order where a dim is uneven, or none there."""
    dims = [[] for _ in shape]
    for axis in r.sample(list(sizes), len(sizes)):
        if dims and r.random() < 0.75:
            r.choice(dims).append(axis)
    for n, axes in zip(shape, dims, strict=True):
        if not divides(n, axes, sizes):
            axes[:] = sorted(axes, key=list(sizes).index) if uneven else []
    return P(*(tuple(axes) or None for axes in dims))


def layout(r: random.Random, args: tuple, sizes: dict[str, int]) -> tuple[tuple, tuple[int, ...]]:
    """Specs of the arguments, and which of these are stored. Stored shards may be uneven; rows are even."""
    w, x, y, b, _ = args
    axes = r.sample(list(sizes), r.randint(max(1, len(sizes) - 1), len(sizes)))
    rows = [None] * x.ndim
    rows[r.randrange(x.ndim)] = tuple(axes)
    at_x = P(*rows) if all(divides(n, axes, sizes) for n, d in zip(x.shape, rows, strict=True) if d) else P()
    at_x = spread(r, x.shape, sizes, False) if r.random() < 0.2 else at_x
    at_y = P(tuple(axes)) if divides(N, axes, sizes) and r.random() < 0.8 else P()
    stored = r.choice([(0,), (0, 3, 4)])
    at_b = spread(r, b.shape, sizes, True) if 3 in stored else P()
    return (spread(r, w.shape, sizes, True), at_x, at_y, at_b, P()), stored


def build(seed: int) -> Case:
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    w, x = normal(*r.choice(W_SHAPES)), normal(*r.choice(X_SHAPES))
    args = (w, x, torch.randint(0, 8, (N,), generator=g), normal(w.shape[-1]), normal())
    source, names = write(r, seed, args)
    sizes = r.choice(MESHES)
    specs, stored = layout(r, args, {axis: n for axis, n in sizes.items() if axis != "tp"})
    if "tp" in sizes and r.random() < 0.7:
        specs = (cut(r, w.shape, specs[0], sizes["tp"]), *specs[1:])
    return Case(seed, source, names["f"], names["loss"], args, sizes, specs, stored)


def cut(r: random.Random, shape, spec: P, parts: int) -> P:
    """The spec with the model axis in front of one dim's axes, where it divides one."""
    fit = [d for d, n in enumerate(shape) if n % parts == 0]
    at = r.choice(fit) if fit else None
    full = [*spec, *[None] * (len(shape) - len(tuple(spec)))]
    return P(*(("tp", *(axes or ())) if d == at else axes for d, axes in enumerate(full)))


# ---- checks ----------------------------------------------------------------------------------------------------------
def differences(got, want, tolerance: float = TOLERANCE) -> list[str]:
    paths, expected, _ = trees.flatten_with_paths(want)
    _, found, _ = trees.flatten_with_paths(got)
    largest = max((y.double().abs().max().item() for y in expected), default=0.0)
    out = [] if len(found) == len(expected) else [f"{len(found)} leaves, not {len(expected)}"]
    for path, x, y in zip(paths, found, expected, strict=False):
        if x.shape != y.shape or x.dtype != y.dtype:
            out.append(f"{path}: {list(x.shape)} {x.dtype}, not {list(y.shape)} {y.dtype}")
            continue
        scale = max(y.double().abs().max().item(), FLOOR * max(1.0, largest))
        error = (x.double() - y.double()).abs().max().item() / scale
        if not error <= tolerance:  # NaN, too, is wrong
            out.append(f"{path}: relative difference {error:.2g}")
    return out


def on_one_device(f: Callable, args: tuple):
    """The result, or None where it is no number to compare with."""
    g = torch.Generator().manual_seed(0)
    near = [x * (1 + NUDGE * torch.randn(x.shape, generator=g).double()) if x.is_floating_point() else x for x in args]
    try:
        want, moved = f(*copies(args)), f(*near)
    except Exception:
        return None
    finite = all(bool(x.double().isfinite().all()) for x in trees.flatten_with_paths(want)[1])
    return want if finite and not differences(moved, want, STEADY) else None


def outcome(case: Case, f: Callable) -> tuple[str, str]:
    """One of equal, refused, wrong, skipped; and what is to be said about it."""
    want = on_one_device(f, case.args)
    if want is None:
        return "skipped", ""
    mesh = fs.make_mesh(case.sizes, model_axes=("tp",) if "tp" in case.sizes else (), fake=True)
    try:
        got, _ = simulate(fs.shard(f, mesh, stored_argnums=case.stored), copies(case.args), case.specs)
    except fs.ShardingError as error:
        return "refused", str(error)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    wrong = differences(got, want)
    return ("wrong" if wrong else "equal"), "; ".join(wrong)


def fuzz(first: int, count: int) -> tuple[collections.Counter, list[str]]:
    """How many programs ended how, and a report on each wrong one."""
    counts, reports = collections.Counter(equal=0, refused=0, wrong=0, skipped=0), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, and that an op "has no rule" and is not split
        for case in map(build, range(first, first + count)):
            for name, f in case.programs().items():
                kind, note = outcome(case, f)
                counts[kind] += 1
                if kind == "wrong":
                    reports.append(f"{name} of {case}{note}\n")
    return counts, reports


def check(first: int, count: int):
    counts, reports = fuzz(first, count)
    assert not reports, "\n" + "\n".join(reports)
    assert counts["equal"] >= 0.6 * counts.total(), f"too few programs were compared: {dict(counts)}"


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_programs(first):
    check(first, 10)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(40, 440, 50))
def test_more_random_programs(first):
    check(first, 50)


if __name__ == "__main__":
    torch.set_num_threads(1)
    counts, reports = fuzz(int(sys.argv[1]), int(sys.argv[2]))
    print("\n".join(reports))
    print(", ".join(f"{n} {kind}" for kind, n in counts.items()))
