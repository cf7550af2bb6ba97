"""Types of values in a ``shard_map``: what meets what, and the gradients that follow."""

import pytest
import torch
import torch.nn.functional as F
from programs import close, randn, refused

import fsharding as fs
from fsharding import P


@pytest.fixture
def mesh():
    with fs.simulate(8):
        yield fs.make_mesh({"i": 4, "j": 2})


# ---- types -----------------------------------------------------------------------------------------------------------
LIBRARY = {
    "linear": lambda x, w: F.linear(x, w[:3], w[0, :3]),
    "layer_norm": lambda x, w: F.layer_norm(x, (4,), w[0], w[1]),
    "rms_norm": lambda x, w: F.rms_norm(x, (4,), w[0]),
    "embedding": lambda x, w: F.embedding((x > 0).long().sum(1), torch.cat([w, w])),
    "cross_entropy": lambda x, w: F.cross_entropy(x @ w, (x > 0).long().sum(1).clamp(max=3)),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None]),
    "where": lambda x, w: torch.where(x > 0, w[0], w[1] * 2),
    "index": lambda x, w: w[(x > 0).long().sum(1).clamp(max=3)],
    "stack": lambda x, w: torch.stack([x[0], w[0]]),
    "einsum": lambda x, w: torch.einsum("ab,cb->ac", x, w),
    "in place": lambda x, w: (x * 1).mul_(w[0]),
    "maximum": lambda x, w: torch.maximum(x, w[0]),
    "gather": lambda x, w: w[:2].gather(1, (x > 0).long()),
}


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("order", [1, 2])
def test_an_unvarying_value_among_varying_ones(mesh, name, order):
    """The gradient of a value that all ranks hold is the sum of what each of them makes of it."""
    x, w, op = randn(8, 4), randn(4, 4, seed=1), LIBRARY[name]
    body = lambda x, w: fs.psum(op(x, w).sin().sum(), "i")
    region = fs.shard_map(body, mesh, (P("i"), P()), P())
    alone = lambda x, w: sum(op(part, w).sin().sum() for part in x.chunk(4))

    def derived(f):
        g = torch.func.grad(f, argnums=(0, 1))
        if order == 1:
            return g
        return torch.func.grad(lambda x, w: sum((y * y).sum() for y in g(x, w)), argnums=(0, 1))

    if (name, order) == ("attention", 2):
        pytest.skip("the fused kernel has no second derivative")
    close(fs.shard(derived(region), mesh)(x, w), derived(alone)(x, w))


class Times(torch.autograd.Function):
    @staticmethod
    def forward(a, b):
        return a * b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b, g * a


def test_an_unseen_mixture_of_types_is_found(mesh):
    def body(x, w):
        w = w.detach().requires_grad_()
        return torch.autograd.grad(Times.apply(x, w * 1).sum(), w)[0]

    f = fs.shard_map(body, mesh, (P("i"), P()), P(), check=False)
    refused(r"a gradient varies over 'i', the value itself does not.*fs.pvary\(x, \('i',\)\)", f, randn(8), randn(2))


def test_writing_in_place(mesh):
    def body(x):
        z = torch.zeros(2)
        z[0] = x[0]
        return z

    out = lambda x: torch.add(x, 1, out=torch.zeros(2))
    refused("writes into `out=`", fs.shard_map(out, mesh, P("i"), P("i")), randn(8))
    message = refused(
        "`__setitem__` writes a value that varies over 'i'", fs.shard_map(body, mesh, P("i"), P("i")), randn(8)
    )
    assert "test_varying.py:" in message and "fs.pvary(x, ('i',))" in message
