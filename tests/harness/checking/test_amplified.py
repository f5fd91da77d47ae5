"""Training that leaps about doubles its noise in every step: no false alarm in float64, and no bug is let through.

A subject that returns the state of every step is compared one step at a time; one that does not, beside control runs.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.checking.evidence import Evidence
from harness.checking.measures.tolerance import FLOAT64_ALLOWED, FLOAT64_CEILING, measure
from harness.checking.numeric_checks import held
from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import Merged
from harness.running.proof import prove
from parallel.subject import subject
from reference.case import Case

CASE = Case.parse("layers=1 steps=7")
"""At the default rate of learning, 1, the logits of the fifth step are beyond 1e-9 by rounding alone."""


class _Nudged:
    """Ours, but for a part in a hundred thousand of the loss of this step."""

    modes = subject.modes

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, case: Case, device: torch.device) -> dict[str, Any]:
        outcome: dict[str, Any] = dict(subject(case, device))
        outcome[f"loss/{self.step}"] *= 1 + 1e-5
        return outcome


def stateless(case: Case, device: torch.device) -> dict[str, Any]:
    """Ours, without the states between steps."""
    return {name: value for name, value in subject(case, device).items() if "_after/" not in name}


@pytest.mark.parametrize(("states", "most"), [(True, FLOAT64_ALLOWED), (False, 10 * FLOAT64_CEILING)])
def test_noise_that_training_amplifies_is_no_failure(states: bool, most: float) -> None:
    with InprocEngine() as engine:
        result = prove(CASE, subject if states else stateless, engine)
    assert result.verdict == "pass", [verdict.message for verdict in result.verdicts if verdict.verdict != "pass"]
    allowed = max(verdict.worst.allowed for verdict in result.verdicts if verdict.worst)
    assert allowed == most if states else FLOAT64_ALLOWED < allowed < most, "a control run was made"


def test_a_small_error_beside_that_noise_is_one() -> None:
    with InprocEngine() as engine:
        verdicts = {verdict.check: verdict for verdict in prove(CASE, _Nudged(4), engine).verdicts}
    assert verdicts["forward"].verdict == "fail"
    assert "what:   loss/4 " in verdicts["forward"].message


def test_in_float64_control_runs_widen_the_limit_up_to_where_nothing_is_told() -> None:
    truth = torch.linspace(1.0, 2.0, 50, dtype=torch.float64)

    def measured(error: float, noise: float) -> Any:
        return measure("param/x", truth * (1 + error), truth, dtype="float64", controls=[truth * (1 + noise)])

    assert measured(0.7e-9, 0.0).right and not measured(1.1e-9, 1e-10).right
    near, far = measured(5e-8, 1e-8), measured(7e-8, 1e-8)
    assert (near.right, near.decidable, far.right) == (True, True, False)
    lost = measured(1e-5, 5e-5)
    assert (lost.right, lost.decidable) == (True, False)


def test_in_low_precision_a_leap_is_unchecked_but_for_orders_of_magnitude() -> None:
    truth = torch.linspace(1.0, 2.0, 50, dtype=torch.float64)

    def measured(factor: float, noise: float) -> Any:
        return measure("grad_norm/1", truth * factor, truth, dtype="bfloat16", controls=[truth * (1 + noise)])

    assert not measured(1.9, 0.08).right, "0.48 is allowed"
    leaping = measured(3.0, 0.1)
    assert (leaping.right, leaping.decidable) == (True, False), "unchecked, and named as such"
    assert not measured(10.0, 0.1).right and not measured(math.inf, 0.1).right


def test_what_an_optimizer_makes_of_gradients_leaps_where_these_do() -> None:
    old, step = torch.linspace(1.0, 2.0, 50, dtype=torch.float64), torch.linspace(2.0, 1.0, 50, dtype=torch.float64)

    def moments(factor: float) -> dict[str, torch.Tensor]:
        """After a step whose gradient is this times the right one."""
        mean, square = 0.01 * old + 0.1 * factor * step, 0.1 * old.square() + 1e-3 * (factor * step) ** 2
        return {"exp_avg_after/5/w": mean, "exp_avg_sq_after/5/w": square}

    def wrong(got: dict[str, torch.Tensor], control: float, norm: dict[str, torch.Tensor] | None = None) -> list[str]:
        case: Any = SimpleNamespace(dtype="bfloat16", steps=6, micro=1)
        evidence = Evidence(
            case=case,
            outcomes=(),
            captured=(),
            merged=Merged(tensors=got, flaws=()),
            truth=got | moments(1.0),
            controls=(moments(control) | (norm or {}),),
            events=(),
            expectation=None,
            repeats=(),
        )
        return [name for name in got if held(evidence, name, 1.0).wrong]

    assert wrong(moments(6.0), 1.0) == ["exp_avg_after/5/w", "exp_avg_sq_after/5/w"]
    assert not wrong(moments(6.0), 1.2), "rounding alone may change the gradient by half"
    assert wrong(moments(6.0), 1.05), "and here it may not"
    norm = {"grad_norm/5": torch.tensor(2.0)}
    assert not wrong(moments(1.5) | norm, 1.02, norm={"grad_norm/5": torch.tensor(2.4)}), "the norm of all is undecided"
    assert wrong(moments(1.5) | norm, 1.02, norm={"grad_norm/5": torch.tensor(2.02)}), "and here it is not"
    spoiled = moments(6.0)
    spoiled["exp_avg_sq_after/5/w"] *= 100
    assert wrong(spoiled, 1.2) == ["exp_avg_sq_after/5/w"], "by orders of magnitude"
