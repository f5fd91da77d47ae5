"""Recomputation in every form: the dense model's training, what is issued again by formula, and what is saved."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from harness.engines.shapes.dry import DryEngine
from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import merge
from harness.predicting.clusters import PRESETS
from harness.predicting.figures import EQUAL
from harness.predicting.forecast import forecast
from harness.running.ranks.execution import execute
from parallel.subject import subject
from reference.case import Case


def again(mode: str, form: str, layers: int = 6) -> Counter[str]:
    """Calls of one micro-batch in phase recompute, by op; bias-free linears, wqkv and w1 are the column linears."""
    words = f"mode={mode} tp=2 heads=4 kv_heads=2 hidden=16 seq=8 layers={layers} micro=3 steps=2 recompute=full {form}"
    found = Counter[str]()
    for term in subject.expected(Case.parse(words)):
        if term.phase == "recompute":
            found[term.op] += term.calls
    return Counter({op: calls // 6 for op, calls in found.items()})


@pytest.mark.parametrize(("size", "stops"), [(1, False), (2, False), (3, True), (6, True)])
def test_uniform_units(size: int, stops: bool) -> None:
    """Megatron repeats 2 Ls sums, torch's early stop one less for each of Ls/k units (around.md 16)."""
    form, sums = f"recompute_layers={size} early_stop={str(stops).lower()}", 12 - stops * 6 // size
    assert again("tp", form) == {"all_reduce": sums}
    assert again("tp-sp", form) == {"all_gather": 12, "reduce_scatter": sums}
    assert again("tp", f"{form} distribute_saved=true") == {"all_reduce": sums, "all_gather": 6 // size}


@pytest.mark.parametrize("size", [1, 4, 9])
def test_the_first_layers_of_every_stage(size: int) -> None:
    form = f"recompute_method=block recompute_layers={size}"
    assert again("mtp", form) == {"all_reduce": 2 * min(size, 6)}
    assert again("isp", form) == {"all_to_all": 3 * min(size, 6)}
    for stage in ({"pp": 0}, {"pp": 1}):
        case = Case.parse(f"tp=2 pp=2 layers=6 micro=1 steps=1 recompute=full {form}")
        terms = [term for term in subject.expected(case) if term.phase == "recompute" and term.at == stage]
        assert sum(term.calls for term in terms) == 2 * min(size, 3)


FORMS = (
    "recompute=none",
    *(f"recompute=full recompute_method=block recompute_layers={layers}" for layers in (1, 3)),
    "recompute=full",
    "recompute=full distribute_saved=true",
)
"""From the most that is saved to the least."""


@cache
def saved(form: str) -> int:
    case = Case.parse(f"mode=tp tp=2 layers=4 heads=4 kv_heads=2 hidden=32 seq=64 batch=3 dtype=bfloat16 {form}")
    with DryEngine() as engine:
        told = forecast(case, subject, PRESETS["8xH100-NVLink-IB400"], engine)
    assert told.ledger == EQUAL
    return int(told.memory.saved)


def test_less_is_saved_the_more_is_computed_again() -> None:
    found = [saved(form) for form in FORMS]
    assert found == sorted(set(found), reverse=True)
    assert 2 * (found[0] - found[1]) == found[1] - found[2]
    assert found[-2] - found[-1] == 4 * 3 * 64 * 32  # of four inputs in bfloat16 halves are left


def test_a_deep_model_is_measured_where_its_layers_repeat() -> None:
    """In whole units, and behind the first layers of their own kind."""
    case = Case.parse("tp=2 heads=4 kv_heads=2 hidden=8 seq=4 recompute=full recompute_layers=2 layers=12")
    with DryEngine() as engine:
        told = forecast(case, subject, PRESETS["8xH100-NVLink-IB400"], engine)
    assert (told.ledger, told.depths) == (EQUAL, (6, 10))
    assert Case.parse("layers=9 recompute=full recompute_method=block recompute_layers=4").repeating_layers == (4, 1)


def test_gradients_are_bit_for_bit_those_without() -> None:
    sizes = "tp=2 layers=4 heads=4 kv_heads=2 hidden=16 ffn=24 vocab=40 seq=6 steps=1 micro=3"
    with InprocEngine() as engine:

        def trained(form: str) -> dict[str, torch.Tensor]:
            run = execute(Case.parse(f"{sizes} {form}"), subject, engine, text=form)
            return dict(merge(run.outcomes).tensors)

        plain = trained("")
        for form in FORMS[2:]:
            other = trained(form)
            assert all(torch.equal(plain[name], other[name]) for name in plain), form
