"""The table: which rule serves which op. An op outside of it runs on whole operands (``fallback.py``).

Every rule is ours and is compared with one device by the tests; none is taken on trust from elsewhere.
"""

from __future__ import annotations

import torch

from fsharding.comm import shards
from fsharding.moe import ops as moe_ops
from fsharding.program import constrain, cross_entropy, rules_lookup, rules_mlp, rules_outside, update
from fsharding.program import rules_batch as batch
from fsharding.program import rules_index as ind
from fsharding.program import rules_manual as by_hand
from fsharding.program import rules_moe as moe
from fsharding.program import rules_pointwise as pw
from fsharding.program import rules_reduce as red
from fsharding.program import rules_strided as strided
from fsharding.program import rules_views as views
from fsharding.program.attention import attention_backward_raw, attention_raw
from fsharding.program.bundle import like_raw
from fsharding.program.partition import Partition
from fsharding.program.remat import offload_raw, reload_raw
from fsharding.program.values import Const, Lazy, Placed, Spread, Stored, Viewed
from fsharding.random import draw_raw

A = torch.ops.aten


# ---- creation --------------------------------------------------------------------------------------------------------
def constant(value_of):
    def rule(p, node, args, kwargs):
        val = node.meta["val"]
        return Const(value_of(args, kwargs), tuple(val.shape), val.dtype)

    rule.__doc__ = "One number everywhere: made with the block that it meets, never whole."
    return rule


def constant_like(value_of):
    def rule(p: Partition, node, args, kwargs):
        """``zeros_like`` and others: of a stored value at rest, of rows as rows."""
        val, x = node.meta["val"], args[0]
        value = value_of(args, kwargs)
        if isinstance(x, Stored) and x.shape == tuple(val.shape):
            return Stored(
                p.emit.call(A.full.default, list(x.node.meta["val"].shape), value, dtype=val.dtype), x.shape, x.dims
            )
        dims = x.dims if isinstance(x, Placed) and x.shape == tuple(val.shape) else None
        return Const(value, tuple(val.shape), val.dtype, dims)

    return rule


def draw(p: Partition, node, args, kwargs):
    """Random numbers by global index: each rank draws its own block, once that is known."""
    key, shape, kind, dtype = args
    mesh = p.mesh.alias(())

    def make(dims):
        p.local_shape(shape, dims)  # refuses what does not divide
        node = p.emit.call(
            shards.draw_shard, p.total(key).node, list(shape), kind, dtype, shards.encode_dims(dims), mesh
        )
        return Placed(node, tuple(shape), dims)

    return Lazy(make, tuple(shape), dtype)


def create(p: Partition, node, args, kwargs):
    """``arange`` and others: small, made whole on every rank."""
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "layout")}
    out = p.emit.call(node.target, *args, **kwargs)
    return Placed(out, p.shape_of_meta(), ((),) * node.meta["val"].ndim)


def like(p: Partition, node, args, kwargs):
    """A gradient, laid out as its parameter rests: one reduce-scatter over exactly the axes of the parameter's spec."""
    g, x = args
    if isinstance(g, Stored):
        return g if g.dims == getattr(x, "dims", None) else like(p, node, (p.placed(g), x), kwargs)
    if isinstance(x, Stored):
        if isinstance(g, Const):
            local = list(x.node.meta["val"].shape)
            return Stored(p.emit.call(A.full.default, local, g.value, dtype=g.dtype), x.shape, x.dims)
        p.emit.note["phase"] = "backward"
        return p.rest(p.placed(g), x.dims, x.name, p.reduce_dtype)
    if isinstance(x, Placed) and any(x.dims):
        if not isinstance(g, Const | Lazy | Spread):
            g = p.total(g)
            # A model axis that splits the gradient but not the value: the gradient is gathered.
            pairs = zip(map(p._real, g.dims), map(p._real, x.dims), strict=True)
            g = p.unshard(g, tuple(a[len(b) :] if a[: len(b)] == b else a for a, b in pairs))
        return p.total(p.relayout(g, x.dims))
    if isinstance(x, Viewed) or isinstance(g, Const | Lazy | Spread):
        return g
    return p.total(g)


def moved(p: Partition, node, args, kwargs):
    """To host memory and back, block by block."""
    x = p.total(args[0])
    return Placed(p.emit.call(node.target, x.node, **kwargs), x.shape, x.dims)


def attention(p: Partition, node, args, kwargs):
    """Local in the batch and head dims (B, H): sequence and feature dims are whole."""
    tensors, rest = args[:4], args[4:]
    operands = [(x, _attention_labels(node, x, i)) for i, x in enumerate(tensors) if x is not None]
    return _attention(p, node, operands, tensors, rest, ["q", "lse"])


def attention_backward(p: Partition, node, args, kwargs):
    """Local in the batch and head dims (B, H), as attention is."""
    g, q, k, v, out, lse, mask, *rest = args
    tensors = (g, q, k, v, out, lse, mask)
    kinds = (0, 0, 1, 2, 0, 4, 3)
    operands = [(x, _attention_labels(node, x, kind)) for x, kind in zip(tensors, kinds, strict=True) if x is not None]
    return _attention(p, node, operands, tensors, rest, ["q", "kv", "kv"])


def _attention_labels(node, x, kind):
    return ["B", "H", None] if kind == 4 else ["B", "H", None, None]


def _attention(p, node, operands, tensors, rest, outs):
    # A cut of the head dim must cut query and key heads alike; `align` checks that the axes agree, sizes divide or
    # raise.
    placed, found = p.align(operands)
    it = iter(placed)
    local = [None if x is None else next(it).node for x in tensors]
    out = p.emit.call(node.target, *local, *rest)
    bh = (found.get("B", ()), found.get("H", ()))
    dims = {"q": (*bh, (), ()), "kv": (*bh, (), ()), "lse": (*bh, ())}
    return tuple(
        Placed(p.emit.item(out, i), tuple(v.shape), dims[name])
        for i, (v, name) in enumerate(zip(node.meta["val"], outs, strict=True))
    )


def layer_norm(p: Partition, node, args, kwargs):
    """Local in all dims but the normalised ones."""
    x, shape, weight, bias, eps = args
    x = p.total(x)
    keep = x.ndim - len(shape)
    operands = [(x, [*range(keep), *([None] * len(shape))])]
    operands += [(w, [None] * len(shape)) for w in (weight, bias) if w is not None]
    placed, found = p.align(operands)
    it = iter(placed[1:])
    w, b = (next(it).node if v is not None else None for v in (weight, bias))
    out = p.emit.call(node.target, placed[0].node, shape, w, b, eps)
    dims = tuple(found.get(d, ()) for d in range(keep)) + ((),) * len(shape)
    return tuple(Placed(p.emit.item(out, i), tuple(v.shape), dims) for i, v in enumerate(node.meta["val"]))


def layer_norm_backward(p: Partition, node, args, kwargs):
    """Row gradients are local; those of weight and bias are sums over all rows."""
    g, x, shape, mean, rstd, weight, bias, mask = args
    keep = len(x.shape) - len(shape)
    rows, whole = list(range(keep)), [None] * len(shape)
    operands = [(g, rows + whole), (x, rows + whole), (mean, rows + whole), (rstd, rows + whole)]
    operands += [(w, whole) for w in (weight, bias) if w is not None]
    placed, found = p.align(operands)
    it = iter(x.node for x in placed[4:])
    w, b = (next(it) if v is not None else None for v in (weight, bias))
    local = [x.node for x in placed[:4]]
    out = p.emit.call(node.target, local[0], local[1], shape, local[2], local[3], w, b, mask)
    dims = tuple(found.get(d, ()) for d in rows)
    partial = frozenset(a for axes in dims for a in p._real(p.row_axes(axes)))
    made = node.meta["val"]
    results = [Placed(p.emit.item(out, 0), tuple(made[0].shape), dims + ((),) * len(shape)) if mask[0] else None]
    for i in (1, 2):
        results.append(
            Placed(p.emit.item(out, i), tuple(made[i].shape), ((),) * len(shape), partial) if mask[i] else None
        )
    return tuple(results)


def _last_two(args, kwargs):
    return [-1, -2]


_WHOLE = [(A.full.default, lambda a, k: a[1]), (A.zeros.default, lambda a, k: 0), (A.ones.default, lambda a, k: 1)]
_WHOLE += [
    (A.scalar_tensor.default, lambda a, k: a[0]),
    (A.new_zeros.default, lambda a, k: 0),
    (A.new_ones.default, lambda a, k: 1),
]
_WHOLE += [(A.new_full.default, lambda a, k: a[2])]
# What is read of an `empty` is written first, or was undefined: a zero is as good.
_WHOLE += [
    (op, lambda a, k: 0)
    for op in (
        A.empty.memory_format,
        A.empty_permuted.default,
        A.new_empty.default,
        A.empty_strided.default,
        A.new_empty_strided.default,
    )
]
_LIKE = [
    (A.full_like.default, lambda a, k: a[1]),
    (A.zeros_like.default, lambda a, k: 0),
    (A.ones_like.default, lambda a, k: 1),
]
_LIKE += [(A.empty_like.default, lambda a, k: 0)]

RULES = {
    **{op: constant(f) for op, f in _WHOLE},
    **{op: constant_like(f) for op, f in _LIKE},
    **{
        op: create
        for op in (A.arange.start_step, A.arange.default, A.arange.start, A.linspace.default, A.eye.default, A.eye.m)
    },
    **{
        op: pw.identity
        for op in (A.clone.default, A.alias.default, A.detach.default, A.lift_fresh_copy.default, A.lift_fresh.default)
    },
    **red.OPERATORS,
    A._to_copy.default: pw.to_copy,
    A.copy.default: pw.copy,
    # views
    **{
        op: views.reshape for op in (A.view.default, A.reshape.default, A._unsafe_view.default, A._reshape_copy.default)
    },
    A.permute.default: views.permute,
    A.transpose.int: views.transpose,
    A.t.default: views.matrix_transpose,
    A.unsqueeze.default: views.unsqueeze,
    **{op: views.squeeze for op in (A.squeeze.default, A.squeeze.dim, A.squeeze.dims)},
    A.expand.default: views.expand,
    A.select.int: views.select,
    A.slice.Tensor: views.slice_,
    **{op: views.split for op in (A.split.Tensor, A.split_with_sizes.default)},
    A.unbind.int: views.unbind,
    **{op: views.join for op in (A.cat.default, A.stack.default)},
    A.flip.default: views.flip,
    A.constant_pad_nd.default: views.pad,
    A.repeat.default: views.repeat,
    A.as_strided.default: strided.as_strided,
    A.as_strided_scatter.default: strided.as_strided_scatter,
    A.select_scatter.default: views.select_scatter,
    # reductions and products
    **{op: red.sum_ for op in (A.sum.default, A.sum.dim_IntList)},
    **{op: red.mean for op in (A.mean.default, A.mean.dim)},
    **{
        op: red.extremum
        for op in (
            A.amax.default,
            A.amin.default,
            A.max.default,
            A.min.default,
            A.any.default,
            A.any.dim,
            A.any.dims,
            A.all.default,
            A.all.dim,
            A.all.dims,
        )
    },
    **{op: red.whole_reduction for op in (A.var.correction, A.prod.dim_int)},
    A.mm.default: red.mm,
    A.bmm.default: red.bmm,
    A.mv.default: red.mv,
    A.dot.default: red.dot,
    **{op: red.addmm for op in (A.addmm.default, A.baddbmm.default)},
    # along one dim
    **{
        op: red.along([0], red.arg(1))
        for op in (
            A._softmax.default,
            A._log_softmax.default,
            A.cumsum.default,
            A.cumprod.default,
            A.logcumsumexp.default,
        )
    },
    **{
        op: red.along([0, 1], red.arg(2))
        for op in (A._softmax_backward_data.default, A._log_softmax_backward_data.default)
    },
    A.topk.default: red.along([0], red.arg(2)),
    A.sort.default: red.along([0], red.arg(1)),
    A.sort.stable: red.along([0], lambda a, k: [k.get("dim", -1)]),
    A.argsort.stable: red.along([0], lambda a, k: [k.get("dim", -1)]),
    A.gather.default: red.along([0, 2], red.arg(1)),
    **{op: red.along([0, 2, 3], red.arg(1)) for op in (A.scatter.src, A.scatter_add.default)},
    **{op: red.along([0, 2], red.arg(1)) for op in (A.scatter.value,)},
    **{op: red.along([0, 1], red.arg(2, default=0)) for op in (A.slice_scatter.default,)},
    **{op: red.along([0], _last_two) for op in (A.tril.default, A.triu.default)},
    A.embedding.default: rules_lookup.embedding,
    A.embedding_dense_backward.default: rules_lookup.embedding_backward,
    A.index.Tensor: ind.index,
    A.index_put.default: ind.index_put,
    A.index_select.default: ind.index_select,
    # local in the batch dims
    **batch.RULES,
    # whole kernels
    attention_raw: attention,
    attention_backward_raw: attention_backward,
    A.native_layer_norm.default: layer_norm,
    A.native_layer_norm_backward.default: layer_norm_backward,
    like_raw: like,
    **{op: moved for op in (offload_raw, reload_raw)},
    draw_raw: draw,
    **cross_entropy.RULES,
    constrain.constrain_raw: constrain.rule,
    constrain.constrain_t_raw: constrain.transpose_rule,
    update.squares_raw: update.squares,
    update.adamw_raw: update.adamw,
    # routed experts
    moe_ops.route: moe.route,
    moe_ops.dispatch_raw: moe.dispatch,
    moe_ops.dispatch_t_raw: moe.dispatch_t,
    moe_ops.combine_raw: moe.combine,
    moe_ops.combine_t_raw: moe.combine_t,
    moe_ops.combine_w_raw: moe.combine_w,
    moe_ops.ragged_dot_raw: moe.ragged_dot,
    moe_ops.ragged_dw_raw: moe.ragged_dw,
    moe_ops.expand_raw: moe.expand,
    moe_ops.segment_sum_raw: moe.segment_sum,
    **rules_mlp.RULES,
    **rules_outside.RULES,
    # the local view
    **by_hand.RULES,
}

# Elementwise ops that the trace leaves whole: `op` or `op:overload,overload`. PyTorch's own tag is not the authority:
# each of these is compared with one device (tests/test_pointwise.py).
_POINTWISE = """
    __lshift__:Scalar,Tensor __rshift__:Scalar,Tensor _conj_physical abs acos acosh add:Scalar,Tensor angle asin asinh
    atan atan2 atanh bitwise_and:Scalar,Scalar_Tensor,Tensor bitwise_left_shift:Scalar_Tensor,Tensor,Tensor_Scalar
    bitwise_not bitwise_or:Scalar,Scalar_Tensor,Tensor bitwise_right_shift:Scalar_Tensor,Tensor,Tensor_Scalar
    bitwise_xor:Scalar,Scalar_Tensor,Tensor ceil clamp:Tensor,default conj_physical copysign:Scalar,Tensor cos cosh
    digamma div:Scalar,Scalar_mode,Tensor,Tensor_mode elu eq:Scalar,Tensor erf erfc erfinv exp exp2 expm1 floor fmax
    fmin fmod:Scalar,Tensor gcd ge:Scalar,Tensor gelu gelu_backward gt:Scalar,Tensor hardtanh hypot i0 igamma igammac
    isinf isnan lcm ldexp:Tensor le:Scalar,Tensor leaky_relu lgamma log log10 log1p log2 logical_and logical_not
    logical_or logical_xor lt:Scalar,Tensor maximum minimum mul:Scalar,Tensor ne:Scalar,Tensor neg nextafter polygamma
    positive pow:Scalar,Tensor_Scalar,Tensor_Tensor reciprocal relu remainder:Scalar,Scalar_Tensor,Tensor
    round:decimals,default rsqrt sigmoid sigmoid_backward sign signbit silu silu_backward sin sinh special_bessel_j0
    special_bessel_j1 special_bessel_y0 special_bessel_y1 special_erfcx special_i0e special_i1 special_i1e
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
    special_ndtri special_zeta:default,other_scalar,self_scalar sqrt sub:Scalar,Tensor tan tanh tanh_backward trunc
    where:self
"""


def _overloads(words: str):
    for word in words.split():
        name, _, overloads = word.partition(":")
        for overload in overloads.split(",") if overloads else ["default"]:
            yield getattr(getattr(A, name), overload)


POINTWISE = frozenset(_overloads(_POINTWISE))
USER: dict = {}  # op -> (rule, the torch version on which its samples agreed); see ``table.register_rule``


def _random(p: Partition, node, args, kwargs):
    p.fail("torch's random numbers depend on the number of ranks. Use `fs.random` inside `shard`")


def rule_for(target):
    """The rule that serves an op, at the cost of a lookup; ops without one run on values that every rank holds whole,
    and are refused otherwise."""
    if target in USER:
        return USER[target][0]
    if target in RULES:
        return RULES[target]
    if target in POINTWISE:
        return pw.pointwise
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return _random
    return red.replicated
