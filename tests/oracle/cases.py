"""Programs of the local view, written once for both libraries, and a seeded sampler of their specs.

A body gets a namespace ``L`` (JAX's or ours) and its blocks. Its operands' *local* shapes are fixed and their specs are
drawn freely, so that values of every type meet; global shapes follow. Specs are tuples of tuples of axis names.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

MESH = {"i": 4, "j": 2}
AXES = tuple(MESH)
TRANSFORMS = ("value", "grad", "grad2", "jvp", "vmap", "vmapgrad")


@dataclass(frozen=True)
class Case:
    name: str
    body: Callable  # body(L, *blocks) -> block
    shapes: tuple[tuple[int, ...], ...]  # global
    in_specs: tuple
    out_spec: tuple
    transforms: tuple[str, ...] = TRANSFORMS
    check: bool = True

    def data(self) -> list[np.ndarray]:
        rng = np.random.default_rng(sum(map(ord, self.name)))
        return [rng.standard_normal(s) for s in self.shapes]


# ---- bodies: name -> (local shapes, maker) ---------------------------------------------------------------------------
# A maker gets the drawn types of the operands and a random generator, and returns the body, the type of its result and
# its rank; None where the draw does not fit.
def plain(fn, rank):
    return lambda types, rng: (fn, frozenset().union(*types), rank)


def _subset(rng, axes):
    axes = [a for a in axes if rng.random() < 0.7] or [rng.choice(sorted(axes))]
    rng.shuffle(axes)
    return tuple(axes) if len(axes) > 1 or rng.random() < 0.5 else axes[0]


def _set(axes):
    return {axes} if isinstance(axes, str) else set(axes)


def summed(op):
    def make(types, rng):
        union = frozenset().union(*types)
        if not union:
            return None
        axes = _subset(rng, sorted(union))
        return (lambda L, x, y: getattr(L, op)(L.sin(x) * y, axes), union - _set(axes), 2)

    return make


def moved(fn, rank):
    """Over any axes: unvarying operands count as varying."""

    def make(types, rng):
        axes = _subset(rng, AXES)
        union = frozenset().union(*types)
        return (lambda L, x, y: fn(L, L.sin(x) * y, axes, y), union | _set(axes), rank)

    return make


def scattered(fn, rank):
    """Sums need an operand that varies over all of the axes or none of them."""

    def make(types, rng):
        union = frozenset().union(*types)
        pool = sorted(union) if union and rng.random() < 0.7 else sorted(set(AXES) - union)
        if not pool:
            return None
        axes = _subset(rng, pool)
        return (lambda L, x, y: fn(L, L.sin(x) * y, axes), union | _set(axes), rank)

    return make


def ring(types, rng):
    axis = rng.choice(AXES)
    n, step = MESH[axis], rng.randint(1, MESH[axis] - 1)
    pairs = [(k, (k + step) % n) for k in range(n)][: rng.choice([n, n - 1])]
    fn = lambda L, x, y: L.ppermute(x, axis, pairs) * L.cos(y)
    return fn, frozenset().union(*types) | {axis}, 2


def both_axes_ring(types, rng):
    pairs = [(k, (k * 3 + 1) % 8) for k in range(8)]
    return (lambda L, x, y: L.ppermute(x, AXES, pairs) * y), frozenset(AXES), 2


def fsdp(types, rng):
    """Weights cut over an axis that also cuts the rows: gathered for use, their gradient is scattered."""
    axis = rng.choice(AXES)
    if axis not in types[0] or axis not in types[1]:
        return None

    def body(L, x, w):
        y = L.tanh(x @ L.all_gather(w, axis, tiled=True)[: x.shape[1]])
        return L.psum((y * y).sum(), tuple(sorted(union)))

    union = types[0] | types[1]
    return body, frozenset(), 0


def gathered_sum(L, x, axes, y):
    return (L.all_gather(x, axes, axis=1) * y[:, None]).sum(1)


def split_size(axes):
    n = 1
    for a in _set(axes):
        n *= MESH[a]
    return n


def widen(L, x, axes):
    """[2, 4] -> [2n, 4]: something for each rank."""
    return L.concatenate([x * (k + 1) for k in range(split_size(axes))], 0)


def exchanged(L, x, axes, y):
    return L.all_to_all(widen(L, x, axes), axes, 0, 1, tiled=True)


def exchanged_stacked(L, x, axes, y):
    n = split_size(axes)
    return L.all_to_all(widen(L, x, axes).reshape(n, 2, 4), axes, 0, 2).sum(2)


def stacked_scatter(L, x, axes):
    return L.psum_scatter(widen(L, x, axes).reshape(2, split_size(axes), 4), axes, scatter_dimension=1)


def nested(types, rng):
    fn = lambda L, x: L.psum(L.sin(x) * x, "j")
    if "j" in types[0] or "j" in types[1]:
        return None

    def body(L, x, y):
        inner = L.nested(lambda x: fn(L, x), (((), ("j",)),), ((), ()), {"j"})
        return inner(x) * y[:, :2]

    return body, frozenset().union(*types), 2


def inner_grad(types, rng):
    def body(L, x, y):
        return L.grad(lambda y: (L.sin(x) * y * y).sum())(y) * x

    return body, frozenset().union(*types), 2


def inner_vmap(types, rng):
    def body(L, x, y):
        return L.vmap(lambda row: L.psum(row * y.sum(0), "i") if "i" in union else row * y.sum(0))(x)

    union = frozenset().union(*types)
    return body, union - {"i"}, 2


def softmax(types, rng):
    """Over a dim that is cut over an axis: the maximum only shifts, so it takes no gradient."""
    axis = rng.choice(AXES)
    if axis not in types[0]:
        return None

    def body(L, x, y):
        top = L.pmax(L.amax(L.stop_gradient(x), 1), axis)
        e = L.exp(x - top[:, None])
        return e / L.psum(e.sum(1), axis)[:, None] * y

    return body, frozenset().union(*types), 2


def numbered(L, x, y):
    return x * (L.axis_index("i") + 1) + y * L.axis_index(("j", "i")) + L.psum(1, "j")


BODIES = {
    "mul": (((2, 4), (2, 4)), plain(lambda L, x, y: L.sin(x) * y, 2)),
    "broadcast": (((2, 4), (4,), ()), plain(lambda L, x, y, z: x * y + L.cos(z) * y, 2)),
    "matmul": (((2, 4), (4, 2)), plain(lambda L, x, w: L.tanh(x @ w), 2)),
    "rowsum": (((2, 4), (2,)), plain(lambda L, x, y: (x * x).sum(1) * y, 1)),
    "where": (((2, 4), (2, 4), (4,)), plain(lambda L, x, y, z: L.where(x > 0, y * y, z), 2)),
    "join": (((2, 4), (2, 4)), plain(lambda L, x, y: L.concatenate([x, L.sin(y)], 0) * 2, 2)),
    "psum": (((2, 4), (2, 4)), summed("psum")),
    "pmean": (((2, 4), (2, 4)), summed("pmean")),
    "all_gather": (((2, 4), (2, 4)), moved(lambda L, x, axes, y: L.all_gather(x, axes), 3)),
    "all_gather_tiled": (((2, 4), (2, 4)), moved(lambda L, x, a, y: L.all_gather(x, a, axis=1, tiled=True), 2)),
    "all_gather_sum": (((2, 4), (2, 4)), moved(gathered_sum, 2)),
    "psum_scatter": (
        ((2, 4), (2, 4)), scattered(lambda L, x, a: L.psum_scatter(widen(L, x, a), a, tiled=True), 2)
    ),
    "psum_scatter_stack": (
        ((2, 4), (2, 4)),
        scattered(stacked_scatter, 2),
    ),
    "all_to_all": (((2, 4), (2, 4)), moved(exchanged, 2)),
    "all_to_all_stack": (((2, 4), (2, 4)), moved(exchanged_stacked, 2)),
    "ppermute": (((2, 4), (2, 4)), ring),
    "ppermute_two": (((2, 4), (2, 4)), both_axes_ring),
    "axis_index": (((2, 4), (2, 4)), lambda types, rng: (numbered, frozenset(AXES), 2)),
    "fsdp": (((2, 4), (4, 2)), fsdp),
    "softmax": (((2, 4), (2, 4)), softmax),
    "inner_grad": (((2, 4), (2, 4)), inner_grad),
    "inner_vmap": (((2, 4), (2, 4)), inner_vmap),
    "nested": (((2, 4), (2, 4)), nested),
}  # fmt: skip
SIMPLE = {"mul", "broadcast", "matmul", "rowsum", "where", "join"}  # of these half as many
AXIS_NAMES = {"nested": {"i"}}  # manual over some axes only


def specs_of(rank: int, axes=AXES) -> list[tuple]:
    """All specs of a tensor: each axis in one dim or none, in any order."""
    found = set()
    for k in range(len(axes) + 1):
        for order in itertools.permutations(axes, k):
            for dims in itertools.product(range(rank), repeat=k):
                spec = [[] for _ in range(rank)]
                for axis, d in zip(order, dims, strict=True):
                    spec[d].append(axis)
                found.add(tuple(map(tuple, spec)))
    return sorted(found)


def sampled(per_body: int, seed: int) -> list[Case]:
    cases = []
    for name, (locals_, maker) in BODIES.items():
        rng, made, axes = random.Random(f"{seed}{name}"), 0, AXIS_NAMES.get(name, AXES)
        while made < (per_body // 2 if name in SIMPLE else per_body):
            specs = tuple(rng.choice(specs_of(len(s), tuple(sorted(axes)))) for s in locals_)
            result = maker([frozenset(a for d in spec for a in d) for spec in specs], rng)
            if result is None:
                continue
            body, varies, rank = result
            outs = [s for s in specs_of(rank, tuple(sorted(axes))) if varies <= {a for d in s for a in d}]
            if not outs:
                continue
            shapes = tuple(
                tuple(n * split_size(d) if d else n for n, d in zip(shape, spec, strict=True))
                for shape, spec in zip(locals_, specs, strict=True)
            )
            cases.append(Case(f"{name}_{seed}{made}", body, shapes, specs, rng.choice(outs)))
            made += 1
    return cases


# ---- programs that are refused ---------------------------------------------------------------------------------------
S = lambda *dims: tuple((d,) if isinstance(d, str) else tuple(d) for d in dims)
WRONG = {
    "unproven": (lambda L, x: x * 2, [(8,)], (S("i"),), S(())),
    "unproven_after_gather": (lambda L, x: L.all_gather(x, "i", tiled=True), [(8,)], (S("i"),), S(())),
    "unproven_second_axis": (lambda L, x: L.psum(x, "i"), [(8,)], (S(("i", "j")),), S(())),
    "indivisible": (lambda L, x: x, [(6,)], (S("i"),), S("i")),
    "in_spec_too_long": (lambda L, x: x, [(8,)], (S("i", ()),), S("i")),
    "out_spec_too_long": (lambda L, x: x.sum(), [(8,)], (S("i"),), S("i")),
    "unknown_axis": (lambda L, x: L.psum(x, "k"), [(8,)], (S("i"),), S(())),
    "unknown_axis_in_spec": (lambda L, x: x, [(8,)], (S("k"),), S("i")),
    "psum_partly_varying": (lambda L, x: L.psum(x, ("i", "j")), [(8,)], (S("i"),), S(())),
    "pmean_partly_varying": (lambda L, x: L.pmean(x, ("i", "j")), [(8,)], (S("i"),), S(())),
    "scatter_partly_varying": (
        lambda L, x: L.psum_scatter(L.concatenate([x] * 8, 0), ("i", "j"), tiled=True), [(8,)], (S("i"),), S(("i", "j"))
    ),
    "axis_twice": (lambda L, x: L.psum(x, ("i", "i")), [(8,)], (S("i"),), S(())),
    "ppermute_source_twice": (lambda L, x: L.ppermute(x, "i", [(0, 1), (0, 2)]), [(8,)], (S("i"),), S("i")),
    "ppermute_target_twice": (lambda L, x: L.ppermute(x, "i", [(0, 1), (2, 1)]), [(8,)], (S("i"),), S("i")),
    "ppermute_out_of_range": (lambda L, x: L.ppermute(x, "i", [(0, 7)]), [(8,)], (S("i"),), S("i")),
    "scatter_size": (lambda L, x: L.psum_scatter(x[:3], "i", tiled=True), [(8,)], (S("j"),), S(("i", "j"))),
    "scatter_stack_size": (lambda L, x: L.psum_scatter(x, "i"), [(12, 2)], (S("j", ()),), S("j", "i")),
    "all_to_all_size": (lambda L, x: L.all_to_all(x, "i", 0, 0), [(6,)], (S("j"),), S(("i", "j"))),
    "all_to_all_tiled_size": (lambda L, x: L.all_to_all(x, "i", 1, 0, tiled=True), [(2, 6)], (S((), ()),), S("i", ())),
    "gather_dim": (lambda L, x: L.all_gather(x, "i", axis=5), [(8,)], (S("i"),), S("i")),
    "pmax_gradient": (lambda L, x: L.grad(lambda z: L.pmax(z, "i").sum())(x), [(8,)], (S("i"),), S("i")),
    "nested_same_axis": (
        lambda L, x: L.nested(lambda y: y, (S("i"),), S("i"), {"i"})(x), [(32,)], (S("i"),), S("i")
    ),
    "too_many_specs": (lambda L, x: x, [(8,)], (S("i"), S("i")), S("i")),
}  # fmt: skip
RIGHT_AFTER_ALL = {  # not refused, by either
    "equal_copies_stacked": (lambda L, x: x * 2, [(8,)], (S(()),), S("i")),
    "psum_of_unvarying": (lambda L, x: L.psum(x, "i"), [(8,)], (S(()),), S(())),
    "pmax_of_unvarying": (lambda L, x: L.pmax(x, ("i", "j")), [(8,)], (S("i"),), S(())),
    "mean_of_unvarying": (lambda L, x: L.pmean(x, "j"), [(8,)], (S("i"),), S("i")),
    "scatter_of_unvarying": (lambda L, x: L.psum_scatter(x, "i", tiled=True), [(8,)], (S(()),), S("i")),
}  # fmt: skip
