"""The table of rules as data (``rules``), and rules of the user's own (``register_rule``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fsharding.annotate.mesh import make_mesh
from fsharding.annotate.spec import P
from fsharding.errors import ShardingError
from fsharding.program import rules as table
from fsharding.program.labels import label_rule, parse, splittable, tensor_slots
from fsharding.program.trace import decomposed

VERIFIED_ON = ("2.11", "2.13", "2.14")
"""The torch versions on which the conformance suite passed with every op of the table in it."""


@dataclass(frozen=True)
class RuleRow:
    """One row of the table.

    Attributes:
        op: the op, such as ``"aten::mm"``.
        kind: "ours", "pointwise", "decomposed" (rewritten into ops of the table when a function is traced), "refused"
            or "user".
        rule: what the rule does.
        verified: the torch versions on which the conformance suite compared it with one device. A user's rule has the
            running version if samples were given, else none.
    """

    op: str
    kind: str
    rule: str
    verified: tuple[str, ...]


class Rules(tuple):
    """The rows, in order of their kind and name. ``print`` it, or filter it as any tuple."""

    def __str__(self) -> str:
        wide = max((len(row.op) for row in self), default=0)
        lines = [f"{r.op:<{wide}}  {r.kind:<10}  {', '.join(r.verified) or '-':<16}  {r.rule}" for r in self]
        return "\n".join([f"{'op':<{wide}}  {'kind':<10}  {'torch':<16}  rule", *lines])

    __repr__ = __str__


def rules() -> Rules:
    """The table behind ``fs.shard``: every op that has a rule, what the rule does, and where it was verified.

    Ops that are not in it run on operands that every rank gathers, which is right on any mesh but slow; they warn with
    the source line, show as ``kind="fallback"`` in ``collectives()``, and are refused under ``strict=True``.
    """
    gone = set(decomposed())  # rules that only another version of PyTorch asks for are no rows of their own
    ours = [(_name(op), rule) for op, rule in table.RULES.items()]
    rows = [RuleRow(name, "ours", _says(rule), VERIFIED_ON) for name, rule in ours if name not in gone]
    rows += [RuleRow(_name(op), "pointwise", _says(table.pw.pointwise), VERIFIED_ON) for op in table.POINTWISE]
    rows += [RuleRow(_name(op), "user", _says(rule), checked) for op, (rule, checked) in table.USER.items()]
    served = {row.op for row in rows}
    named = sorted(n for n in gone - served if not n.startswith("aten::_"))
    rows += [RuleRow(n, "decomposed", "into ops of this table", VERIFIED_ON) for n in named]
    order = {kind: i for i, kind in enumerate(("user", "ours", "pointwise", "decomposed"))}
    return Rules(sorted(rows, key=lambda row: (order[row.kind], row.op)))


def _name(op) -> str:
    if not isinstance(op, torch._ops.OpOverload):
        return op.__name__
    name = op.name()
    return name if "." in name or op._overloadname == "default" else f"{name}.{op._overloadname}"


def _says(rule: Callable) -> str:
    text = (rule.__doc__ or "").strip().split("\n\n")[0]
    return " ".join(text.split())


def register_rule(
    op: torch._ops.OpOverload | torch._library.custom_ops.CustomOpDef,
    rule: str | Callable[..., str],
    *,
    samples: Sequence[tuple] = (),
    replace: bool = False,
) -> None:
    """Teach ``fs.shard`` how an op of yours behaves on blocks, so that it no longer gathers its operands.

    ``fs.register_rule(torch.ops.mine.scale.default, "b [d], b -> b [d]")`` says: the first dim may be split, alike in
    both operands and in the result; the second must be whole. One term per tensor operand (an optional one has a term
    too) and per result. A plain label that a result lacks is summed over: each rank's result is then one term of a sum,
    as in ``"b i, b j -> i j"`` for a weight's gradient. ``...`` stands for leading dims.

    Args:
        op: an op overload, or what ``torch.library.custom_op`` returns. It needs a fake implementation.
        rule: the labels, or a function of the op's arguments (meta tensors of global shape) that returns them.
        samples: tuples of arguments. The rule is compared with the whole op on each, for every label that may be split
            and 2 and 3 ranks (where these divide it): a wrong rule is refused here instead of giving wrong numbers.
        replace: allow an op that has a rule already.

    Raises:
        ShardingError: no op, unreadable labels, an op that has a rule, or a rule that a sample contradicts.
    """
    op = getattr(op, "_opoverload", op)
    if not isinstance(op, torch._ops.OpOverload):
        raise ShardingError(f"`register_rule` takes an op overload such as `torch.ops.mine.scale.default`, got {op!r}.")
    if not replace and (op in table.RULES or op in table.POINTWISE or op in table.USER):
        raise ShardingError(f"`{_name(op)}` has a rule already: pass `replace=True` to use yours instead.")
    if isinstance(rule, str):
        _check_arity(op, rule)
    elif not callable(rule):
        raise ShardingError(f"a rule is a string of labels or a function that returns one, got {type(rule).__name__}.")
    before = table.USER.get(op)
    table.USER[op] = (label_rule(rule), (".".join(torch.__version__.split(".")[:2]),) if samples else ())
    try:
        for sample in samples:
            _compare(op, rule, sample)
    except Exception:
        del table.USER[op]
        if before is not None:
            table.USER[op] = before
        raise


def _check_arity(op, rule: str) -> None:
    labels, slots = parse(rule), tensor_slots(op, (), {})
    if len(slots) != len(labels.operands):
        raise ShardingError(
            f"rule {rule!r} has {len(labels.operands)} operands, `{_name(op)}` takes {len(slots)} tensors: "
            "one term each."
        )
    if len(op._schema.returns) != len(labels.results):
        raise ShardingError(
            f"rule {rule!r} has {len(labels.results)} results, `{_name(op)}` returns {len(op._schema.returns)}."
        )


def _compare(op, rule, sample: tuple) -> None:
    """One sample on every split that the rule allows, all ranks in this process."""
    from fsharding.program import lockstep
    from fsharding.program.shard import shard  # which imports this table

    labels = parse(rule if isinstance(rule, str) else rule(*sample))
    given = zip(tensor_slots(op, sample, {}), labels.operands, strict=True)
    given = [(i, x, term) for (i, x), term in given if isinstance(x, torch.Tensor)]
    tensors = [x for _, x, _ in given]
    with torch.no_grad():
        want = op(*sample)
    want = list(want) if isinstance(want, tuple | list) else [want]

    def run(*xs):
        full = list(sample)
        for (i, *_), x in zip(given, xs, strict=True):
            full[i] = x
        return op(*full)

    for name, size, dims in splittable(labels, [(x, term) for _, x, term in given]):
        for parts in (2, 3):
            if size == 0 or size % parts:
                continue
            mesh = make_mesh({"data": parts}, fake=True)
            specs = tuple(P(*[None] * d, "data") if d is not None else P() for d in dims)
            low = shard(run, mesh, in_specs=specs, stored_argnums=(), strict=True).lower(*tensors)
            for i, (x, y) in enumerate(zip(lockstep.evaluate(low, tensors), want, strict=True)):
                _same(op, labels.text, name, parts, i, x, y)


def _same(op, text, name, parts, i, x, y) -> None:
    scale = y.double().abs().max().item() if y.numel() else 0.0
    error = (x.double() - y.double()).abs().max().item() if y.numel() else 0.0
    loose = 1e-5 if y.dtype in (torch.float32, torch.float64) or not y.is_floating_point() else 2e-2
    if not error <= loose * max(scale, 1e-6):  # NaN, too, is wrong
        raise ShardingError(
            f"rule {text!r} of `{_name(op)}` is wrong: with {name!r} split {parts} ways result {i} is off by "
            f"{error:.2g} (its largest element is {scale:.2g}). Put {name!r} in brackets if the op needs it whole."
        )
