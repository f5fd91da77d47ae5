"""Where the dense model overflows in a dtype too, nothing follows from a result that does; elsewhere it is wrong."""

from __future__ import annotations

import math

import pytest
import torch

from harness.checking.evidence import FAIL, UNKNOWN
from harness.checking.measures.tolerance import Measured, measure
from harness.diagnosing.rules.optimizer.moved import fitted
from harness.engines.threads.inproc import InprocEngine
from harness.running.proof import CaseResult, prove
from parallel.subject import subject
from parallel.training import step as step_
from reference.case import Case

OVERFLOWS = "tp=2 layers=1 steps=3 lr=6.0 dtype=float16"
"""In the third step logits are beyond 65504, the largest number of float16."""
DEAD = math.inf, -math.inf, math.nan


def proved(text: str) -> CaseResult:
    with InprocEngine() as engine:
        return prove(Case.parse(text), subject, engine)


def test_a_step_that_overflows_in_the_dense_model_too_is_unknown() -> None:
    result = proved(OVERFLOWS)
    told = {verdict.check: verdict for verdict in result.verdicts if verdict.verdict != "pass"}
    assert result.verdict == UNKNOWN
    assert {verdict.verdict for verdict in told.values()} == {UNKNOWN}
    assert told.keys() == {"forward", "gradient_norm", "update"}
    forward = told["forward"]
    assert forward.message.startswith("loss/2 is not finite") and "legal: a smaller lr" in forward.message
    assert "loss/2" in forward.unchecked and "loss/1" not in forward.unchecked


def test_a_bug_in_a_step_before_still_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right, steps = step_.made_optimizer, iter(range(9))

    def bugged(case: Case, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = right(case, parameters)
        plain = optimizer.step

        def halved() -> None:
            if next(steps) < case.world_size:  # the first step of every rank
                for parameter in parameters:
                    parameter.grad = parameter.grad * 0.5 if parameter.grad is not None else None
            plain()

        monkeypatch.setattr(optimizer, "step", halved, raising=False)
        return optimizer

    monkeypatch.setattr(step_, "made_optimizer", bugged)
    assert proved(OVERFLOWS).verdict == FAIL


@pytest.mark.parametrize("bad", DEAD)
def test_what_overflows_is_wrong_unless_a_control_run_does_too(bad: float) -> None:
    truth = torch.linspace(1.0, 2.0, 30, dtype=torch.float64)
    spoiled, near = truth.clone(), truth * (1 + 1e-4)
    spoiled[7] = bad

    def measured(value: torch.Tensor, *controls: torch.Tensor) -> Measured:
        return measure("loss/0", value, truth, dtype="float16", controls=controls)

    alone, both = measured(spoiled, near, near), measured(spoiled, near, spoiled)
    assert (alone.right, alone.overflows, alone.wrong) == (False, False, True)
    assert (both.right, both.overflows, both.wrong) == (False, True, False)
    finite = measured(near, spoiled)
    assert (finite.right, finite.decidable, finite.wrong) == (True, False, False)


@pytest.mark.parametrize("bad", DEAD)
def test_no_sum_of_updates_explains_what_is_not_finite(bad: float) -> None:
    one, other = torch.linspace(1.0, 2.0, 30, dtype=torch.float64), torch.linspace(3.0, -1.0, 30, dtype=torch.float64)
    spoiled = one.clone()
    spoiled[3] = bad
    for value, truth, before in ((spoiled, one, other), (one * 2, spoiled, other), (one * 2, one, spoiled)):
        assert fitted(value, truth, before) is None
    assert fitted(2 * one + other, one, other) == pytest.approx((2, 1))
