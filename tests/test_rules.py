"""The table as data, and rules that a user registers."""

import warnings

import pytest
import torch
from programs import simulate, worst

import fsharding as fs
from fsharding import P
from fsharding.program import rules as table

LIB = torch.library.Library("fs_test_rules", "FRAGMENT")
MESH = fs.make_mesh({"a": 2, "b": 3}, fake=True)


def define(schema, kernel, fake=None):
    name = schema.split("(")[0]
    LIB.define(schema)
    LIB.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fs_test_rules::{name}", fake or kernel, lib=LIB)
    return getattr(torch.ops.fs_test_rules, name).default


scale = define("scale(Tensor x, Tensor s, Tensor? bias=None) -> Tensor", lambda x, s, bias=None: x * s[:, None])
reverse = define("reverse(Tensor x) -> Tensor", lambda x: x.flip(-1).clone())
outer = define("outer(Tensor x, Tensor y) -> Tensor", lambda x, y: x.T @ y)
both = define("both(Tensor x) -> (Tensor, Tensor)", lambda x: (x.sum(-1), x.sum(0)))
rolled = define("rolled(Tensor x, int dim) -> Tensor", lambda x, dim: x.roll(1, dim))


@pytest.fixture(autouse=True)
def forget():
    before = dict(table.USER)  # what other tests of this process registered, such as the examples of the docs
    table.USER.clear()
    yield
    table.USER.clear()
    table.USER.update(before)


def rows(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).sin()


def run(fn, args, specs, **kwargs):
    """The result on 6 ranks, and the kinds of the collectives."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, low = simulate(fs.shard(fn, MESH, stored_argnums=(), strict=True, **kwargs), args, specs)
    assert worst(got, fn(*args)) <= 1e-6
    return [c.kind for c in low.collectives()]


# ---- the table -------------------------------------------------------------------------------------------------------
def test_the_table_is_data_that_one_can_print_and_filter():
    rows = fs.rules()
    text = str(rows)
    assert text.splitlines()[0].split() == ["op", "kind", "torch", "rule"]
    assert len(text.splitlines()) == len(rows) + 1 and repr(rows) == text
    found = {row.op: row for row in rows}
    assert len(found) == len(rows)  # an op has one row
    assert found["aten::mm"].kind == "ours" and "pending sum" in found["aten::mm"].rule
    assert found["aten::sin"].kind == "pointwise" and found["aten::mish"].kind == "decomposed"
    assert all(row.rule and row.verified for row in rows)
    here = ".".join(torch.__version__.split(".")[:2])
    assert all(here in row.verified for row in rows if row.kind != "user")


def test_the_kinds_agree_with_what_serves_an_op():
    assert not set(table.RULES) & set(table.POINTWISE)
    for op in table.POINTWISE:
        assert table.rule_for(op) is table.pw.pointwise and not op._schema.is_mutable


def test_an_op_outside_of_the_table_is_no_part_of_it():
    assert table.rule_for(reverse) is table.red.replicated
    assert "fs_test_rules::reverse" not in {row.op for row in fs.rules()}


# ---- rules of the user's own -----------------------------------------------------------------------------------------
def test_a_registered_rule_replaces_the_fallback():
    x, s = rows(6, 4), rows(6)
    specs = (P(("a", "b")), P(("a", "b")))
    with pytest.raises(fs.ShardingError, match="fs_test_rules::scale"):
        run(scale, (x, s), specs)
    fs.register_rule(scale, "b d, b, b -> b d")
    assert run(lambda x, s: scale(x, s), (x, s), specs) == []
    assert run(lambda x, s: scale(x, s), (x, s), (P("b", "a"), P("b"))) == []
    assert run(lambda x, s: scale(x, s, None).sum(0), (x, s), specs) == ["all_reduce"]
    row = next(r for r in fs.rules() if r.op == "fs_test_rules::scale")
    assert row == fs.rules()[0] and (row.kind, row.verified, row.rule) == ("user", (), "`b d, b, b -> b d`")


def test_a_label_in_brackets_must_be_whole():
    x = rows(6, 6)
    fs.register_rule(reverse, "... [d] -> ... [d]", samples=[(x,), (rows(2, 6, 4),)])
    assert run(reverse, (x,), (P("a"),)) == []
    with pytest.raises(fs.ShardingError, match=r"test_rules\.py:\d+: `fs_test_rules::reverse`.*whole"):
        run(lambda x: reverse(x), (x,), (P(None, "a"),))
    with pytest.warns(UserWarning, match="no rule"):
        got, low = simulate(fs.shard(lambda x: reverse(x), MESH, stored_argnums=()), (x,), (P(None, "a"),))
    assert worst(got, x.flip(-1)) == 0 and any(c.kind == "fallback" for c in low.collectives())


def test_a_label_that_a_result_lacks_is_summed_over():
    x, y = rows(6, 4), rows(6, 2)
    fs.register_rule(outer, "b i, b j -> i j", samples=[(x, y)])
    assert run(outer, (x, y), (P(("a", "b")), P(("a", "b")))) == ["all_reduce"]
    assert run(outer, (x, y), (P("b", "a"), P("b"))) == ["all_reduce"]


def test_several_results():
    x = rows(6, 6)
    fs.register_rule(both, "b d -> b, d", samples=[(x,)])
    for spec in (P("a"), P(None, "b"), P("a", "b")):
        run(lambda x: both(x), (x,), (spec,))


def test_a_rule_that_depends_on_the_arguments():
    def rule(x, dim):
        names = [f"[n{d}]" if d == dim % x.ndim else f"n{d}" for d in range(x.ndim)]
        return f"{' '.join(names)} -> {' '.join(names)}"

    x = rows(6, 6)
    fs.register_rule(rolled, rule, samples=[(x, 0), (x, -1)])
    assert run(lambda x: rolled(x, -1), (x,), (P("a"),)) == []
    assert run(lambda x: rolled(x, 0), (x,), (P(None, "b"),)) == []


def test_gradients_go_through_a_function_of_the_users():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(x, s):
            return scale(x, s)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            x, s = ctx.saved_tensors
            return scale(g, s), (g * x).sum(1)

    fs.register_rule(scale, "b d, b, b -> b d", samples=[(rows(6, 4), rows(6))])
    f = fs.value_and_grad(lambda w, x, s: Scale.apply(x @ w, s).square().sum())
    args = (rows(4, 5), rows(6, 4), rows(6))
    got, low = simulate(fs.shard(f, MESH, strict=True), args, (P(("a", "b")), P(("a", "b")), P(("a", "b"))))
    assert worst(got, f(*args)) <= 1e-6


def test_what_custom_op_returns_can_be_registered():
    @torch.library.custom_op("fs_test_rules::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    fs.register_rule(doubled, "... -> ...", samples=[(rows(6, 2),)])
    assert run(lambda x: doubled(x), (rows(6, 2),), (P("a"),)) == []
    assert next(r for r in fs.rules() if r.kind == "user").verified


# ---- mistakes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rule, message",
    [
        ("b d, b, b", "no `->`"),
        ("b d, b -> b d", "takes 3 tensors"),
        ("b d, b, b -> b d, b", "returns 1"),
        ("b d, b, b -> b e", r"\['e'\], which no operand has"),
        ("b b, b, b -> b", "twice in one term"),
        ("b [d], b, b -> b d", "both in brackets and plain"),
        ("b d, b, b -> b *", "is no label"),
        ("b ..., b, b -> b ...", "comes first"),
        (7, "a string of labels"),
    ],
)
def test_unreadable_rules_are_refused(rule, message):
    with pytest.raises(fs.ShardingError, match=message):
        fs.register_rule(scale, rule)
    assert scale not in table.USER


def test_a_wrong_rule_is_refused_by_its_samples_and_not_kept():
    with pytest.raises(fs.ShardingError, match=r"with 'd' split 2 ways result 0 is off .* Put 'd' in brackets"):
        fs.register_rule(reverse, "b d -> b d", samples=[(rows(6, 6),)])
    with pytest.raises(fs.ShardingError, match="is off"):  # a mean is no sum
        mean = define("mean_rows(Tensor x) -> Tensor", lambda x: x.mean(0))
        fs.register_rule(mean, "b d -> d", samples=[(rows(6, 6),)])
    assert not table.USER
    fs.register_rule(reverse, "b [d] -> b [d]", samples=[(rows(6, 6),)])
    with pytest.raises(fs.ShardingError, match="is off"):
        fs.register_rule(reverse, "b d -> b d", samples=[(rows(6, 6),)], replace=True)
    assert run(reverse, (rows(6, 6),), (P("a"),)) == []  # the right one is back


def test_an_op_with_a_rule_is_not_overwritten_by_accident():
    for op in (torch.ops.aten.mm.default, torch.ops.aten.sin.default):
        with pytest.raises(fs.ShardingError, match="replace=True"):
            fs.register_rule(op, "m k, k n -> m n" if "mm" in str(op) else "... -> ...")
    with pytest.raises(fs.ShardingError, match="op overload"):
        fs.register_rule(torch.sin, "... -> ...")


def test_a_rule_that_does_not_fit_the_call_names_the_line():
    fs.register_rule(reverse, "b d -> b d")
    with pytest.raises(fs.ShardingError, match=r"test_rules\.py:\d+: `fs_test_rules::reverse`: .*2 dims"):
        simulate(fs.shard(lambda x: reverse(x), MESH, stored_argnums=()), (rows(6, 2, 2),), (P("a"),))
    fs.register_rule(both, "b d -> b, b")
    with pytest.raises(fs.ShardingError, match=r"test_rules\.py:\d+: `fs_test_rules::both`"):
        simulate(fs.shard(lambda x: both(x), MESH, stored_argnums=()), (rows(6, 4),), (P("a"),))
