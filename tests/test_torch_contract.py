"""Every fact about PyTorch that the library leans on, asserted on the version that is installed (2.11 and 2.13 are
supported)."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import fsharding as fs
from fsharding import _compat as compat
from fsharding.moe import ops
from fsharding.oplib import raw_op
from fsharding.program.trace import trace

A = torch.ops.aten


def test_custom_meta_survives_a_second_trace():
    from torch.fx.proxy import _COPY_META_FIELDS

    assert "custom" in _COPY_META_FIELDS


def test_the_tracer_is_reachable_and_backward_nodes_know_their_forward():
    seen = []

    def f(x):
        tracer = compat.current_tracer()
        create = tracer.create_node

        def watch(*args, **kwargs):
            seen.append(compat.backward_sequence())
            return create(*args, **kwargs)

        tracer.create_node = watch
        return torch.func.grad(lambda y: y.sin().sum())(x)

    make_fx(f, tracing_mode="fake")(torch.randn(3))
    assert None in seen and any(isinstance(s, int) for s in seen)
    assert compat.current_tracer() is None


def test_watching_gradients_of_every_transform():
    pairs = []

    def after(grads, inputs):
        pairs.append([(g.shape, x.shape) for g, x in zip(grads, inputs, strict=True)])
        return tuple(g * 2 for g in grads)

    x = torch.randn(3)
    f = lambda y: (y**2).sum()
    with compat.watch_gradients(after):
        assert torch.equal(torch.func.grad(f)(x), 4 * x)
        _, pull = torch.func.vjp(f, x)
        assert torch.equal(pull(torch.ones(()))[0], 4 * x)
        torch.func.grad_and_value(f)(x)
    assert len(pairs) == 3
    assert torch.equal(torch.func.grad(f)(x), 2 * x)


def test_a_raw_op_without_derivative_would_be_silently_wrong_and_ours_raises():
    from fsharding import ShardingError

    doubled = raw_op("test_doubled(Tensor x) -> Tensor", lambda x: 2 * x, lambda x: torch.empty_like(x))
    with pytest.raises(ShardingError, match="no derivative"):
        torch.func.grad(lambda x: (doubled(x) * x).sum())(torch.ones(2))


def test_fakes_also_serve_meta_tensors():
    x, w = torch.empty(6, 4, device="meta"), torch.empty(2, 4, 3, device="meta")
    assert ops.ragged_dot_raw(x, w, torch.empty(2, dtype=torch.int32, device="meta")).shape == (6, 3)


@pytest.mark.parametrize("op", ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"])
def test_functional_collectives_have_shapes_without_a_group(op):
    args = {
        "all_gather_into_tensor": (4, "no such group"),
        "reduce_scatter_tensor": ("sum", 4, "no such group"),
        "all_reduce": ("sum", "no such group"),
    }
    out = getattr(torch.ops._c10d_functional, op).default(torch.empty(8, 2, device="meta"), *args[op])
    assert out.shape[0] == {"all_gather_into_tensor": 32, "reduce_scatter_tensor": 2, "all_reduce": 8}[op]


def test_the_core_of_ops_keeps_sums_and_fused_kernels():
    """The decomposition of ``sum`` says "no dim" for "all dims", and that of CPU flash attention is wrong under its
    backward."""

    def f(x):
        return [torch.func.grad(lambda y: torch.nn.functional.silu(torch.softmax(y, -1)).sum())(x)]

    names = {str(n.target) for n in trace(f, [torch.empty(3, 4)]).graph.graph.nodes}
    assert "aten._softmax_backward_data.default" in names


def test_constants_are_read_by_reference_under_transforms():
    c = torch.ones(3)
    program = trace(lambda x: [torch.func.grad(lambda y: (y * c).sum())(x)], [torch.empty(3)])
    assert len(program.constants) == 1 and program.constants[0].data_ptr() == c.data_ptr()


def test_strided_shard_is_found_where_each_version_keeps_it():
    assert compat.StridedShard(0, split_factor=2).split_factor == 2


def test_dtensors_of_a_mesh_without_processes():
    import fsharding as fs

    mesh = fs.make_mesh({"a": 1}, device="cpu")
    x = fs.device_put(torch.arange(6.0), mesh, fs.P("a"))
    assert torch.equal((x * 2).full_tensor(), torch.arange(6.0) * 2)
    same = compat.wrapped_like(compat.local_of(x) + 1, x)
    assert same.placements == x.placements and torch.equal(same.full_tensor(), torch.arange(6.0) + 1)
    compat.retire(x)
    assert compat.local_of(x).device.type == "meta"


def test_attention_kernels_agree_with_pytorch():
    from fsharding.program.attention import scaled_dot_product_attention as ours

    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 6, 8, generator=g, requires_grad=True)
    k, v = (torch.randn(2, 2, 6, 8, generator=g, requires_grad=True) for _ in "kv")
    mask = torch.rand(2, 4, 6, 6, generator=g) > 0.2
    for kwargs in ({"is_causal": True}, {"attn_mask": mask}, {}):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kwargs)
        mine = ours(q, k, v, enable_gqa=True, **kwargs)
        assert torch.allclose(mine, theirs, atol=1e-6)
        t = torch.randn(theirs.shape, generator=g)
        for a, b in zip(
            torch.autograd.grad(mine, (q, k, v), t), torch.autograd.grad(theirs, (q, k, v), t), strict=True
        ):
            assert torch.allclose(a, b, atol=1e-5)


# ---- the local view --------------------------------------------------------------------------------------------------
class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_functions_under_functorch_and_pulls_are_seen_by_function_modes():
    """So types are aligned for a user's own Function, and `torch.autograd.grad` must be left alone."""
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.func.grad(lambda x: _Twice.apply(x).sum())(torch.ones(2))
    assert torch.autograd.grad in seen
    assert any(getattr(f, "__name__", "") == "custom_function_call" for f in seen)


def test_the_node_of_a_value_is_found_through_transforms():
    found = []

    def fn(x):
        def inner(y):
            found.append(compat.node_of(y * 1))
            return (y * 3).sum()

        return torch.func.vmap(torch.func.grad(inner))(x)

    make_fx(fn, tracing_mode="fake")(torch.ones(2, 3))
    assert [node.target for node in found] == [torch.ops.aten.mul.Tensor]
    assert compat.node_of(torch.ones(1)) is None


def test_ops_that_differ_between_ranks_are_not_folded_over_constants():
    from fsharding.comm import manual

    group = "fs[i=2]/i"
    traced = make_fx(lambda: manual.total(torch.tensor(3.0), "sum", group), tracing_mode="fake")()
    assert manual.reduce_raw in [n.target for n in traced.graph.nodes]


def test_a_leaf_of_a_subclass_is_a_dtensor_that_runs_no_op_by_itself():
    with fs.simulate(2):
        leaf = fs.device_put(torch.arange(4.0), fs.make_mesh({"a": 2}), fs.P("a"))
        assert isinstance(leaf, DTensor) and type(leaf * 2) is type(leaf)
        with pytest.raises(fs.ShardingError):
            torch.cumsum(leaf, 0)


def test_what_a_function_saved_can_be_let_go_while_its_backward_runs():
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 2)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            (saved,) = ctx.saved_tensors
            kept = compat.release_saved(ctx)
            try:
                again = ctx.saved_tensors[0] is not None
            except RuntimeError:
                again = False
            seen.append((kept, again))
            return g * 2

    y = Twice.apply(torch.ones(3, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [(True, True), (False, False)]


def test_saved_tensor_hooks_can_be_left():
    f = lambda: torch.func.grad(torch.sin)(torch.ones(()))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        with pytest.raises(RuntimeError, match="hooks"):
            f()
        with compat.without_saved_hooks():
            f()
        assert not packed
        torch.ones((), requires_grad=True).sin()
        assert packed
