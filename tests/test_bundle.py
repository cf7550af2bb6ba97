"""Many casts, and marks of many gradients, as one op: the same as one by one, under every transform."""

import operator

import pytest
import torch

import fsharding as fs
from fsharding import P
from fsharding.program import bundle

XS = [torch.randn(3, 4), torch.randn(5, dtype=torch.float64), torch.randn(2, 2)]
TO = [torch.bfloat16, torch.float32, torch.float32]  # the last has its dtype already


def together(*xs):
    return sum(y.double().sin().sum() for y in bundle.casts(xs, TO))


def single(*xs):
    return sum(x.to(d).double().sin().sum() for x, d in zip(xs, TO, strict=True))


def hvp(f):
    return lambda *xs: torch.func.jvp(torch.func.grad(f, argnums=(0, 1, 2)), xs, tuple(map(torch.ones_like, xs)))[1]


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f, argnums=(0, 1, 2)),
    "grad of one": lambda f: torch.func.grad(f, argnums=1),
    "jvp": lambda f: lambda *xs: torch.func.jvp(f, xs, tuple(map(torch.ones_like, xs)))[1],
    "jvp of one": lambda f: lambda a, b, c: torch.func.jvp(lambda y: f(a, y, c), (b,), (torch.ones_like(b),))[1],
    "hvp": hvp,
    "grad of grad": lambda f: torch.func.grad(lambda *xs: torch.func.grad(f)(*xs).double().square().sum()),
    "vmap": lambda f: lambda a, b, c: torch.func.vmap(lambda s: f(a * s, b, c * s))(torch.arange(3.0)),
    "vmap of grad": lambda f: lambda a, b, c: torch.func.vmap(lambda s: torch.func.grad(f)(a * s, b, c))(torch.ones(2)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_casts_as_one_by_one(name):
    got, want = (TRANSFORMS[name](f)(*XS) for f in (together, single))
    for x, y in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


def test_the_program_holds_single_casts_and_marks_where_their_operands_are_ready():
    """No bundle is left; the gradient of the last layer is cast before the first layer's is computed."""
    mesh = fs.make_mesh({"d": 2}, fake=True)

    def loss(ws, x):
        for w in ws:
            x = torch.tanh(x @ w)
        return x.float().square().mean()

    ws = [fs.ShapeDtype((8, 8), torch.float32, P("d")) for _ in range(4)]
    x = fs.ShapeDtype((4, 8), torch.float32, P("d"))
    low = fs.shard(fs.value_and_grad(loss), mesh, precision="bfloat16").lower(ws, x)
    nodes = list(low.program.graph.graph.nodes)
    assert not any(n.target in (bundle.casts_raw, bundle.likes_raw) for n in nodes)
    marks = [n for n in nodes if n.target is bundle.like_raw]
    assert len(marks) == 4 and all(n.args[0].target is torch.ops.aten._to_copy.default for n in marks)
    place = {n: i for i, n in enumerate(nodes)}
    order = sorted(place[n] for n in marks)
    products = [place[n] for n in nodes if n.target is torch.ops.aten.mm.default]
    assert sum(order[0] < i for i in products) >= 4  # three layers' products come later, two each but for the first
    assert all(place[a] < place[n] for n in nodes for a in n.all_input_nodes)
    assert not any(n.target is operator.getitem for n in nodes)


def test_a_gradient_that_is_no_tensor_of_its_own_is_marked_for_each_argument():
    """x and w get one and the same gradient tensor; each rests as its argument does."""
    mesh = fs.make_mesh({"d": 2}, fake=True)
    args = [fs.ShapeDtype((4, 8), torch.float32, P(None, "d")), fs.ShapeDtype((4, 8), torch.float32, P("d"))]
    low = fs.shard(fs.grad(lambda w, x: (w + x).sum(), argnums=(0, 1)), mesh).lower(*args)
    assert [dims for _, dims, _ in low.local.outputs] == [((), ("d",)), (("d",), ())]
