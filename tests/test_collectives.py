"""Collectives of the local view: each one's transpose by ⟨Ax, y⟩ = ⟨x, Aᵀy⟩, on simulated and on real ranks."""

import pytest
import torch
from helpers import run_ranks
from test_backends import evaluated, with_regions

import fsharding as fs
from fsharding import P

MESHES = {2: {"i": 2, "j": 1}, 4: {"i": 2, "j": 2}, 8: {"i": 4, "j": 2}}
AXES = ["i", ("i", "j"), ("j", "i")]


def size_of(mesh, axes):
    return mesh.axes_size((axes,) if isinstance(axes, str) else axes)


# name -> f(x, axes, n) on a block [n, n]; what it gives has no unvarying part, so that specs can name all axes
COLLECTIVES = {
    "psum": lambda x, a, n: fs.pvary(fs.psum(x, a), a),
    "pmean": lambda x, a, n: fs.pvary(fs.pmean(x, a), a),
    "all_gather": lambda x, a, n: fs.all_gather(x, a, axis=1),
    "all_gather_tiled": lambda x, a, n: fs.all_gather(x, a, axis=1, tiled=True),
    "psum_scatter": lambda x, a, n: fs.psum_scatter(x, a, scatter_dimension=1),
    "psum_scatter_tiled": lambda x, a, n: fs.psum_scatter(x, a, scatter_dimension=1, tiled=True),
    "all_to_all": lambda x, a, n: fs.all_to_all(x, a, 0, 1),
    "all_to_all_tiled": lambda x, a, n: fs.all_to_all(x, a, 0, 1, tiled=True),
    "ppermute": lambda x, a, n: fs.ppermute(x, "i" if a == ("j", "i") else a, [(0, 1), (1, 0)]),
    "ppermute_part": lambda x, a, n: fs.ppermute(x, "i" if a == ("j", "i") else a, [(1, 0)]),
    "axis_index": lambda x, a, n: x * fs.axis_index(a),
}


def problem(mesh, name, axes):
    """A collective as a function of one global value, and a random operand."""
    n = size_of(mesh, axes)
    fn = fs.shard_map(lambda x: COLLECTIVES[name](x, axes, n), mesh, P(mesh.axis_names), P(mesh.axis_names))
    g = torch.Generator().manual_seed(len(name) + n)
    return fn, torch.randn(mesh.size * n, n, generator=g, dtype=torch.float64)


def adjoints(mesh, name, axes):
    both, x = both_sides(mesh, name, axes)
    return fs.device_get(fs.shard(both, mesh, stored_argnums=())(x))


def both_sides(mesh, name, axes):
    """⟨Ax, y⟩ and ⟨x, Aᵀy⟩, also for tangents and for batches, all from one program."""
    fn, x = problem(mesh, name, axes)

    def both(x):
        out, pull = torch.func.vjp(fn, x)
        y = torch.cos(out * 3 + 1).detach()
        (back,) = pull(y)
        _, tangent = torch.func.jvp(fn, (x,), (x * 2,))
        batch = torch.stack([x, x * 0.5, x.sin()])
        mapped = torch.func.vmap(fn)(batch)
        pulled = torch.func.vmap(torch.func.grad(lambda z: (fn(z) * y).sum()))(batch)
        twice = torch.func.grad(lambda z: (torch.func.grad(lambda w: (fn(w) ** 2).sum())(z) ** 2).sum())(x)
        once = torch.func.grad(lambda w: (fn(w) ** 2).sum())
        by_hand = torch.func.vjp(once, x)[1](2 * once(x))[0]  # the derivative of |g|² is 2 J g, J symmetric here
        return {
            "reverse": ((out * y).sum(), (x * back).sum()),
            "forward": (tangent.sum(), 2 * out.sum()),
            "batch": (mapped[0].sum() + mapped[1].sum(), 1.5 * out.sum()),
            "third": (mapped[2].square().sum(), fn(x.sin()).square().sum()),
            "batched reverse": ((pulled - back).abs().sum(), torch.zeros((), dtype=torch.float64)),
            "twice": ((twice - by_hand).abs().sum(), torch.zeros((), dtype=torch.float64)),
        }

    return both, x


def assert_adjoint(found):
    for how, (a, b) in found.items():
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9), (how, a, b)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("ranks", MESHES)
def test_adjoint(ranks, name):
    with fs.simulate(ranks):
        mesh = fs.make_mesh(MESHES[ranks])
        for axes in {2: ["i"], 4: [("i", "j")], 8: ["i", ("j", "i")]}[ranks]:
            assert_adjoint(adjoints(mesh, name, axes))


@pytest.mark.slow
@pytest.mark.parametrize("ranks, axes", [(2, "i"), (4, ("i", "j")), (8, "i")])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_adjoint_compiled(name, ranks, axes):
    """The same programs with what lies between their collectives compiled."""
    mesh = fs.make_mesh(MESHES[ranks], fake=True)
    both, x = both_sides(mesh, name, axes)
    low = fs.shard(both, mesh, stored_argnums=()).lower(x)
    graph, count = with_regions(low)
    assert count
    found = dict(zip(low.result["paths"], evaluated(low, graph, (x,)), strict=True))
    for path, value in found.items():
        if path.endswith("[0]"):
            other = found[path.removesuffix("[0]") + "[1]"]
            assert torch.allclose(value, other, rtol=1e-9, atol=1e-9), path


def values(mesh):
    """Every collective over every set of axes, with the gradient of a function of it."""
    out = {}
    for axes in AXES[::2]:
        parts = [problem(mesh, name, axes) for name in COLLECTIVES]

        def all_of(xs, fns=tuple(fn for fn, _ in parts)):
            return [
                fs.value_and_grad(lambda x, fn=fn: torch.sin(fn(x)).sum())(x) for fn, x in zip(fns, xs, strict=True)
            ]

        out[axes] = fs.device_get(fs.shard(all_of, mesh)([x for _, x in parts]))
    return out


def on_ranks(rank, world):
    mesh = fs.make_mesh(MESHES[world])
    alone = fs.shard_map(lambda x: fs.psum(x * fs.axis_index("i"), ("i", "j")), mesh, P(("i", "j")), P())
    params = fs.device_put(torch.arange(12.0).reshape(4, 3), mesh, P("i"))
    closed = fs.shard_map(lambda x: x @ params, mesh, P(("i", "j")), P(("i", "j")))
    low = alone.lower(torch.ones(4))
    return (
        values(mesh),
        alone(torch.arange(4.0)),
        fs.device_get(closed(torch.ones(4, 4))),
        fs.device_get(fs.grad(fs.shard_map(lambda x: fs.psum(x.sin().sum(), "i"), mesh, P("i"), P()))(torch.ones(4))),
        low.fingerprint(),
        raised(lambda: fs.shard_map(lambda x: x, mesh, P("i"), P())(torch.ones(4))),
    )


def raised(fn):
    try:
        fn()
    except fs.ShardingError as error:
        return str(error)


def test_real_ranks_agree_with_simulated_ones():
    results = run_ranks(4, on_ranks)
    with fs.simulate(4):
        want = on_ranks(0, 4)
    for got in results:
        for axes, rows in want[0].items():
            for (a, ga), (b, gb) in zip(got[0][axes], rows, strict=True):
                assert torch.allclose(a, b, rtol=1e-12) and torch.allclose(ga, gb, rtol=1e-12)
        for a, b in zip(got[1:4], want[1:4], strict=True):
            assert torch.equal(a, b)
        assert got[4] == want[4], "the program of simulated ranks reads as that of real ones"
        assert "may differ between the ranks of 'i'" in got[5]


def test_the_table_of_collectives():
    with fs.simulate(8):
        mesh = fs.make_mesh(MESHES[8])

        def body(x):
            y = fs.all_to_all(fs.all_gather(x, "j", tiled=True), "i", 0, 0, tiled=True)
            z = fs.psum_scatter(fs.ppermute(y, "i", [(0, 1)]), "j", tiled=True)
            return fs.psum(z, ("i", "j")), fs.pmax(z, "i")

        found = fs.shard_map(body, mesh, P(("i", "j")), (P(), P("j"))).lower(torch.ones(64)).collectives()
    rows = [(c.kind, c.axes, c.bytes) for c in found]
    assert rows == [
        ("all_gather", ("j",), 64),
        ("all_to_all", ("i",), 64),
        ("ppermute", ("i",), 64),
        ("reduce_scatter", ("j",), 64),
        ("all_reduce", ("i", "j"), 32),
        ("all_reduce", ("i",), 32),
    ]
    assert all("test_collectives.py" in c.source for c in found)


def test_outside_of_a_region():
    for call in (lambda: fs.psum(torch.ones(2), "i"), lambda: fs.axis_index("i"), lambda: fs.axis_size("i")):
        with pytest.raises(fs.ShardingError, match="outside of `fs.shard_map`"):
            call()


def test_trees_numbers_and_dtypes():
    with fs.simulate(4):
        mesh = fs.make_mesh({"i": 4})

        def body(x):
            return {
                "tree": fs.psum({"a": x.sum(), "b": [x.sum() * 2]}, "i"),
                "count": fs.psum((x > 1).sum(), "i"),
                "flags": fs.psum(x.sum() > 1, "i"),
                "number": torch.tensor(fs.psum(2.5, "i")),
                "mean": fs.pmean(x.sum().long(), "i"),
                "low": fs.pmin(x.sum(), "i"),
                "bf16": fs.psum(x.sum().bfloat16(), "i"),
                "size": torch.tensor(fs.axis_size("i")),
            }

        out = fs.shard_map(body, mesh, P("i"), P())(torch.arange(8.0))
    want = {"tree": {"a": 28.0, "b": [56.0]}, "count": 6, "flags": 3 + (1 > 1), "number": 10.0, "mean": 7.0, "low": 1.0}
    want |= {"bf16": 28.0, "size": 4}
    assert fs.tree.flatten(out)[0] == [torch.tensor(x) for x in fs.tree.flatten(want)[0]]
    assert out["bf16"].dtype == torch.bfloat16 and out["flags"].dtype == torch.int64
