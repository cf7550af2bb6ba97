"""Embeddings of tables too large to travel: rows move instead, values and gradients exact, also beside other uses."""

import pytest
import torch
import torch.nn.functional as F
from programs import simulate, worst

import fsharding as fs
from fsharding import P

V, D = 96, 4


def data(rows=(8, 2)):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V, rows, generator=g)
    ids[1] = ids[0]  # repeated ids, within a rank and across
    return torch.randn(V, D, generator=g), ids


def objective(w, ids, padding=None):
    return (F.embedding(ids, w, padding_idx=padding) * torch.arange(1.0, D + 1)).sin().sum()


LAYOUTS = [
    ({"a": 2}, P("a"), P("a")),
    ({"a": 4}, P("a"), P("a")),
    ({"a": 2, "b": 2}, P(("a", "b")), P(("a", "b"))),
    ({"a": 2, "b": 2}, P(("b", "a")), P("b", "a")),  # the table's order is not the mesh's
    ({"a": 2, "b": 2}, P("b"), P(("a", "b"))),  # a is a replica: one more reduction
]


@pytest.mark.parametrize("case", range(len(LAYOUTS)))
@pytest.mark.parametrize("padding", [None, 5])
def test_rows_travel_and_nothing_else(case, padding):
    sizes, spec, rows = LAYOUTS[case]
    w, ids = data()
    ids[2, 0] = 5
    fn = fs.value_and_grad(lambda w, ids: objective(w, ids, padding))
    got, low = simulate(fs.shard(fn, fs.make_mesh(sizes, fake=True), strict=True), (w, ids), (spec, rows))
    assert worst(got, fn(w, ids)) <= 1e-6
    assert got[1].equal(fn(w, ids)[1]) or worst(got[1], fn(w, ids)[1]) <= 1e-6
    table = V * D * 4
    assert all(c.bytes < table / 2 for c in low.collectives() if c.kind in ("all_gather", "reduce_scatter"))
    assert low.local.outputs[1][1] == tuple(tuple(a for a in axes) for axes in _dims(spec))


def _dims(spec):
    first = spec[0]
    return ((first,) if isinstance(first, str) else tuple(first), ())


def test_values_are_bitwise_those_of_the_table():
    w, ids = data()
    fn = fs.shard(lambda w, ids: F.embedding(ids, w), fs.make_mesh({"a": 4}, fake=True))
    got, _ = simulate(fn, (w, ids), (P("a"), P("a")))
    assert got.equal(F.embedding(ids, w))


@pytest.mark.parametrize("why", ["tied", "many tokens", "uneven", "replicated tokens", "model axis"])
def test_otherwise_the_table_travels(why):
    w, ids = data((24, 4) if why == "many tokens" else (8, 2))
    mesh, spec, rows, fn = fs.make_mesh({"a": 2, "b": 2}, fake=True), P(("a", "b")), P(("a", "b")), objective
    if why == "tied":
        fn = lambda w, ids: objective(w, ids) + (F.embedding(ids, w) @ w.T).square().mean()  # noqa: E731
    if why == "uneven":
        w = w[:95]
        ids = ids % 95
    if why == "replicated tokens":
        rows = P("a")
    if why == "model axis":
        mesh, spec, rows = fs.make_mesh({"a": 2, "b": 2}, model_axes=("b",), fake=True), P("a", "b"), P("a")
    fn = fs.value_and_grad(fn)
    got, low = simulate(fs.shard(fn, mesh), (w, ids), (spec, rows))
    assert worst(got, fn(w, ids)) <= 1e-5
    if why != "model axis":
        assert max(c.bytes for c in low.collectives() if c.kind == "all_gather") >= w.numel() * 4


def test_mixed_precision_and_an_update():
    w, ids = data()
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.sgd(0.1))

    def step(w, s, ids):
        value, g = fs.value_and_grad(objective)(w, ids)
        u, s = optimizer.update(g, s, w)
        return fs.optim.apply_updates(w, u), s, value

    state = optimizer.init(w)
    fn = fs.shard(step, fs.make_mesh({"a": 4}, fake=True), donate_argnums=(0, 1), strict=True)
    got, low = simulate(fn, (w, state, ids), (P("a"), fs.tree.map_with_path(lambda _, x: P(), state), P("a")))
    assert worst(got, step(w, state, ids)) <= 1e-5
