"""Ops of the table that no function of the conformance table reaches; and that with these every op of it is
compared."""

import pytest
import torch
import torch.nn.functional as F
from conformance import PLAIN_MESHES, Traced, with_gradients
from conformance_cases import CASES
from programs import simulate, worst

import fsharding as fs
from fsharding import P
from fsharding.program import rules as table

ROWS = 12
VOLUME, LINE = (ROWS, 2, 4, 4, 4), (ROWS, 2, 6)


def turned(x):
    """A grid of sampling places between -1 and 1, made of the input."""
    places = torch.tanh(x[:, :1].expand(-1, 3, -1, -1, -1)).movedim(1, -1)
    return places * torch.tensor([0.9, 0.7, 0.8])


FUNCTIONS = {
    "adaptive_max_pool3d": (VOLUME, lambda x: F.adaptive_max_pool3d(x, 2)),
    "reflection_pad3d": (VOLUME, lambda x: F.pad(x, (1, 2, 0, 1, 1, 1), mode="reflect")),
    "replication_pad3d": (VOLUME, lambda x: F.pad(x, (1, 2, 0, 1, 1, 1), mode="replicate")),
    "nearest1d": (LINE, lambda x: F.interpolate(x, scale_factor=2, mode="nearest")),
    "nearest3d": (VOLUME, lambda x: F.interpolate(x, size=(5, 3, 6), mode="nearest")),
    "nearest_exact1d": (LINE, lambda x: F.interpolate(x, size=9, mode="nearest-exact")),
    "nearest_exact3d": (VOLUME, lambda x: F.interpolate(x, size=(5, 3, 6), mode="nearest-exact")),
    "bicubic_aa": (VOLUME[:4], lambda x: F.interpolate(x, size=(3, 2), mode="bicubic", antialias=True)),
    "grid_sample3d": (VOLUME, lambda x: F.grid_sample(x, turned(x), align_corners=False)),
    "nanmedian": ((ROWS, 7), lambda x: x.nanmedian(1).values),
}


def inputs(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_local_in_the_batch(name):
    shape, f = FUNCTIONS[name]
    x, w = inputs(shape), torch.tensor([1.3])
    step = with_gradients(lambda w, x, y: f(x * w[0]))
    args = (w, x, torch.zeros(ROWS))
    for sizes, rows in (({"a": 2}, P("a")), ({"a": 2, "b": 3}, P(("b", "a"))), ({"a": 4}, P("a"))):
        mesh = fs.make_mesh(sizes, fake=True)
        got, low = simulate(fs.shard(step, mesh, strict=True), args, (P(), rows, rows))
        assert worst(got, step(*args)) <= 1e-5, sizes


# Moved as they are, never traced: views of one device's memory, and what a version of PyTorch calls them.
SPELLINGS = {"alias", "lift_fresh", "lift_fresh_copy", "reshape", "_reshape_copy", "empty_strided", "detach"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_op_of_the_table_is_met_by_a_function():
    met = set()
    for case in CASES.values():
        if case.expected != "refused":
            traced = Traced(with_gradients(case.run), case.inputs())
            met |= {n.target for n in traced.low.program.graph.graph.nodes}
    for shape, f in FUNCTIONS.values():
        low = fs.shard(with_gradients(lambda w, x, y, f=f: f(x * w[0])), PLAIN_MESHES[0]).lower(
            torch.ones(1), inputs(shape), torch.zeros(ROWS)
        )
        met |= {n.target for n in low.program.graph.graph.nodes}
    ours = {row.op for row in fs.rules() if row.kind == "ours"}
    left = {
        op
        for op in table.RULES
        if getattr(op, "namespace", "") == "aten" and op.name() in ours and op not in met
        and op.name().partition("::")[2].partition(".")[0] not in SPELLINGS
    }  # fmt: skip
    assert not left, sorted(map(str, left))
