"""The conformance table on layouts: every case is right by rule, right by fallback, or refused with the line. Never
another number. ``conformance_cases.py`` says which case is expected to be what."""

import math
import re

import pytest
import torch
from conformance import (
    LAYOUTS,
    Layout,
    Reference,
    Traced,
    fallbacks,
    run_all,
    transposed,
    with_gradients,
)
from conformance_cases import CASES, FALLBACK, REFUSED, ROUGH_IN_BF16, Case

import fsharding as fs
from fsharding.program import lockstep

LINE = r"(cases_\w+|conformance)\.py:\d+"
ACCEPTED = sorted(name for name, case in CASES.items() if case.expected != "refused")
PLAIN = LAYOUTS[0]


def planned(case: Case, traced: Traced, at: Layout):
    """The local program, checked for what it says about fallbacks."""
    local, warned = traced.plan(at.mesh, at.specs(case))
    records = fallbacks(local)
    assert bool(records) <= bool(warned) and all(re.search(f"{LINE}.*has no rule", text) for text in warned), warned
    if case.expected == "rule" and at.plain:
        assert not records and not warned, (at, warned)
    if case.expected == "fallback" and at is PLAIN:
        assert records and all(record.bytes and record.source for record in records)
    return local


@pytest.mark.parametrize("name", ACCEPTED)
def test_values_and_gradients(name):
    """Cut three ways; over two axes in the other order, a block transposed in memory; beside a model axis."""
    case, args = CASES[name], CASES[name].inputs()
    f = with_gradients(case.run)
    reference, traced = Reference(f, args), Traced(f, args)
    for at, turn in zip(LAYOUTS[:3], (False, True, False), strict=True):
        local = planned(case, traced, at)
        assert not reference.check(traced.run(local, transposed if turn else lambda x: x)), at


@pytest.mark.parametrize("name", [n for i, n in enumerate(ACCEPTED) if i % 8 == 0 and n not in ROUGH_IN_BF16])
def test_half_precision(name):
    case, args = CASES[name], CASES[name].inputs(torch.bfloat16)
    f = with_gradients(case.run)
    try:
        reference = Reference(f, args)
    except (RuntimeError, TypeError):
        pytest.skip("one device has no bf16 kernel, or will not mix dtypes")
    traced = Traced(f, args)
    assert not reference.check(traced.run(planned(case, traced, LAYOUTS[1])))


@pytest.mark.parametrize("name", sorted(FALLBACK))
def test_a_fallback_is_an_error_under_strict(name):
    case = CASES[name]
    traced = Traced(with_gradients(case.run), case.inputs())
    with pytest.raises(fs.ShardingError, match=f"(?s){LINE}.*`.*shard_map"):
        traced.plan(PLAIN.mesh, PLAIN.specs(case), strict=True)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusals_name_the_op_and_the_line(name):
    case = CASES[name]
    with pytest.raises(fs.ShardingError, match=rf"(?s){LINE}.*`?\w+"):
        traced = Traced(case.run, case.inputs())
        traced.plan(PLAIN.mesh, PLAIN.specs(case))


def test_the_table_is_large_and_little_is_refused():
    assert len(CASES) >= 700
    assert len(REFUSED) <= 0.03 * len(CASES)
    assert FALLBACK | set(REFUSED) | set(ROUGH_IN_BF16) <= set(CASES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mse_mean", "ce_ignored_mean", "norm_all", "conv2d", "layer_norm", "batch_norm"])
def test_the_check_sees_a_sum_over_ranks_that_became_a_mean(name, dtype, monkeypatch):
    """What DTensor's rules got wrong: off by the number of ranks, or a mean of means."""
    case, args = CASES[name], CASES[name].inputs(dtype)
    f = with_gradients(case.run)
    reference, traced = Reference(f, args), Traced(f, args)
    local, _ = traced.plan(PLAIN.mesh, PLAIN.specs(case))
    assert not reference.check(traced.run(local))
    total = lockstep.REDUCE["sum"]
    monkeypatch.setitem(lockstep.REDUCE, "sum", lambda xs: total(xs) / math.sqrt(1 + 0.1 * len(xs)))
    assert reference.check(traced.run(local))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ACCEPTED)), ids=ACCEPTED.__getitem__)
def test_on_every_layout(number):
    """Every layout in fp32, other variants on one each. ``python tests/conformance.py`` runs the full product."""
    assert not run_all(CASES[ACCEPTED[number]], rotate=number)
