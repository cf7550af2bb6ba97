"""Each elementwise op of the table by itself: rows, broadcast operands, values at rest, numbers; against one device."""

import zlib

import pytest
import torch
from programs import simulate, worst

import fsharding as fs
from fsharding import P
from fsharding.program.rules import POINTWISE

INTEGER = "__lshift__ __rshift__ bitwise gcd lcm".split()
POSITIVE = "acosh digamma igamma igammac lgamma log polygamma pow special_zeta special_bessel special_modified".split()
MESH = fs.make_mesh({"a": 2, "b": 2}, fake=True)
SHAPES = {  # of the first operand and of the others, and how they are split
    "rows": (((8, 6), P(("a", "b"))), ((8, 6), P("a"))),
    "broadcast": (((8, 6), P("b", "a")), ((6,), P())),
    "column": (((6, 8), P(None, "a")), ((6, 1), P())),
    "scalar": (((8, 6), P("a")), ((), P())),
}


def value(op, shape, number):
    name = op.name().split("::")[1]
    g = torch.Generator().manual_seed(zlib.crc32(str(op).encode()) + number)
    if name.startswith(tuple(INTEGER)):
        return torch.randint(0, 5, shape, generator=g)
    if name.startswith("logical") or name == "where.self" and number == 0:
        return torch.rand(shape, generator=g) > 0.5
    x = torch.rand(shape, generator=g, dtype=torch.float64) * 0.8 + 0.1
    if name.startswith(tuple(POSITIVE)):
        return x + 1
    return x if name.startswith("special_ndtri") or name in ("atanh", "erfinv") else x * (1 - 2 * (number % 2))


def operands(op, shapes):
    """The tensors, and the op as a function of them: its numbers are filled in."""
    tensors, specs, fixed = [], [], []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor" or kind == "Optional[Tensor]":
            shape, spec = shapes[0] if not tensors else shapes[1]
            fixed.append(None)
            tensors.append(value(op, shape, len(tensors)))
            specs.append(spec)
        elif argument.kwarg_only:
            continue
        elif op.name() == "aten::clamp":
            fixed.append({"min": 0.3, "max": 0.6}[argument.name])
        elif argument.has_default_value():
            fixed.append(argument.default_value)
        else:
            fixed.append({"Scalar": 2, "number": 2, "int": 1, "bool": False, "float": 0.5}.get(kind, 2))
    modes = {a.name: "floor" for a in op._schema.arguments if a.name == "rounding_mode"}
    modes |= {a.name: 1 for a in op._schema.arguments if a.name == "decimals"}

    def call(*xs):
        it = iter(xs)
        return op(*(next(it) if f is None else f for f in fixed), **modes)

    return call, tensors, specs


@pytest.mark.parametrize("op", sorted(POINTWISE, key=str), ids=str)
def test_elementwise_op_by_itself(op):
    for shapes in SHAPES.values():
        call, tensors, specs = operands(op, shapes)
        want = call(*tensors)
        assert not want.is_floating_point() or bool(want.isfinite().all())
        got, low = simulate(fs.shard(call, MESH, stored_argnums=(), strict=True), tuple(tensors), tuple(specs))
        assert got.dtype == want.dtype and worst(got, want) <= 1e-12
        if len(tensors) == 1:
            break


@pytest.mark.parametrize("op", sorted(POINTWISE, key=str), ids=str)
def test_elementwise_op_at_rest(op):
    """Among stored values nothing is gathered; 7 rows over 4 ranks leave padding, which is NaN here."""
    call, tensors, _ = operands(op, (((7, 6), None), ((7, 6), None)))
    spec = P(("a", "b"))
    stored = tuple(range(len(tensors)))
    got, low = simulate(fs.shard(call, MESH, stored_argnums=stored, strict=True), tuple(tensors), (spec,) * len(stored))
    assert worst(got, call(*tensors)) <= 1e-12
    assert not low.collectives()
