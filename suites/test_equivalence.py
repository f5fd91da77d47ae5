"""Mode equivalence: all modes that take a case compute the same tensors from it, up to rounding."""

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.harness.outcome.merging import merge_outcomes
from shardproof.harness.protocols import CaseLike
from shardproof.harness.running.ranks.execution import execute
from shardproof.suites.session.prover import Prover
from shardproof.suites.session.request import chosen_modes

APART = 1e-11
"""The most by which two modes may differ, as a share of the largest element: float64 noise, far below known bugs."""
EXAMPLES = max(1, settings().max_examples // 5)
"""An example runs every mode, so fewer are drawn."""


def outcomes(prover: Prover, case: CaseLike, modes: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Mode -> its merged outcome, of the modes that take the case."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    run = prover.subject.call
    for mode in modes:
        try:
            alike = case.but(mode=mode)
        except ValueError:  # CaseLike.but of a word that this mode does not know: such cases are drawn for others
            continue
        if prover.reason_of_refusal(alike):
            continue
        merged = merge_outcomes(
            execute(alike, run, prover.engine, text=str(alike), timeout_s=prover.timeout_s).outcomes
        )
        assert merged.flaws == ()
        found[mode] = dict(merged.tensors)
    return found


def apart(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """The names of both outcomes whose values differ by more than APART."""
    names = sorted(first.keys() & second.keys())
    return [name for name in names if _gap(first[name], second[name]) > APART]


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    scale = max(float(a.abs().max()), 1e-3)
    return float((a - b).abs().max()) / scale


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_all_modes_compute_the_same(prover: Prover, data: st.DataObject) -> None:
    modes = list(chosen_modes(prover.subject, "all"))
    if len(modes) == 1:
        pytest.skip(f"{prover.subject.name} claims {modes[0]} alone, so there is no mode to compare it with")
    mode = "tp-sp" if "tp-sp" in modes else modes[0]
    case = prover.draw_case(
        data, mode, where_known={"delivery": "tensors", "packed": False}
    )  # packs are delivered otherwise
    by_mode = outcomes(prover, case, modes)
    if len(by_mode) < 2:
        reason = f"case {case}: {prover.subject.name} takes it in one mode, and this test compares two"
        if prover.only is not None:
            pytest.skip(reason)
        prover.refusals.append(reason)
        hypothesis.reject()
    first, *others = by_mode
    for other in others:
        assert apart(by_mode[first], by_mode[other]) == [], f"{first} and {other} part on {case}"
