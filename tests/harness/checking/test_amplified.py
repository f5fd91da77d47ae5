"""Rounding that training amplifies, overflows, and a relu that flips raise no false alarm, and hide no bug.

A subject that returns the state of every step is compared one step at a time, any other beside control runs.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardproof.harness.checking.measures.measured import FLOAT64_ALLOWED, Measured
from shardproof.harness.checking.measures.tolerance import FLOAT64_CEILING, measure
from shardproof.harness.checking.measuring import compare_with_truth
from shardproof.harness.checking.numeric_checks import make_numeric_check
from shardproof.harness.running.result import CaseResult
from shardproof.harness.running.trials import rounding
from shardproof.harness.running.trials.trial import Reference, decoder
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from tests.harness.checking.test_one_step import planted
from tests.harness.noted import names_of
from tests.harness.proofs import contradicted, failed, proved, told, verdict_of
from tests.harness.toy_evidence import case as case_of
from tests.harness.toy_evidence import evidence
from tests.harness.toy_subjects import Changed

CASE = Case.parse("layers=1 steps=7")
"""With the default learning rate, 1, rounding alone changes the logits of the fifth step by more than 1e-9."""


LINE = torch.linspace(1.0, 2.0, 50, dtype=torch.float64)


def stateless(case: Case, device: torch.device) -> dict[str, Any]:
    """The outcome of our subject, without the states between steps."""
    return {name: value for name, value in subject(case, device).items() if "_after/" not in name}


def most_allowed(result: CaseResult) -> float:
    return max(verdict.worst.allowed for verdict in result.verdicts if verdict.worst)


@pytest.mark.deep("four CPU seconds")
def test_noise_that_training_amplifies_is_no_failure() -> None:
    result = proved(stateless, CASE)
    assert result.verdict == "pass", told(result)
    assert FLOAT64_ALLOWED < most_allowed(result) < 10 * FLOAT64_CEILING, "a control run was made"


def test_with_states_a_small_error_beside_that_noise_is_the_only_one() -> None:
    nudged = Changed(subject, lambda case, outcome: {"loss/4": outcome["loss/4"] * (1 + 1e-5)})
    result = proved(nudged, CASE, explain=False)
    assert failed(result) == {"forward"} and verdict_of(result, "forward").worst.name == "loss/4"
    assert most_allowed(result) == FLOAT64_ALLOWED


@pytest.mark.parametrize(
    ("dtype", "factor", "noise", "found"),
    [
        ("float64", 1 + 0.7e-9, 0.0, "right"),
        ("float64", 1 + 1.1e-9, 1e-10, "wrong"),
        ("float64", 1 + 5e-8, 1e-8, "right"),
        ("float64", 1 + 7e-8, 1e-8, "wrong"),
        ("float64", 1 + 1e-5, 5e-5, "undecided"),
        ("bfloat16", 1.9, 0.08, "wrong"),  # 0.48 is allowed
        ("bfloat16", 3.0, 0.1, "undecided"),
        ("bfloat16", 10.0, 0.1, "wrong"),
        ("bfloat16", math.inf, 0.1, "wrong"),
    ],
)
def test_control_runs_widen_a_limit_up_to_orders_of_magnitude(
    dtype: str, factor: float, noise: float, found: str
) -> None:
    one = measure("grad_norm/1", LINE * factor, LINE, dtype=dtype, controls=[LINE * (1 + noise)])
    assert (one.right, one.right and one.decidable) == (found != "wrong", found == "right")


def test_what_an_optimizer_makes_of_gradients_leaps_where_these_do() -> None:
    old, step = LINE, LINE.flip(0)

    def moments(factor: float) -> dict[str, torch.Tensor]:
        """The moments after a step whose gradient is the right one times this factor."""
        mean, square = 0.01 * old + 0.1 * factor * step, 0.1 * old.square() + 1e-3 * (factor * step) ** 2
        return {"exp_avg_after/5/w": mean, "exp_avg_sq_after/5/w": square}

    def wrong(got: dict[str, torch.Tensor], control: float, norm: dict[str, torch.Tensor] | None = None) -> list[str]:
        case, controls = case_of("steps=6 micro=1 dtype=bfloat16"), (moments(control) | (norm or {}),)
        seen = evidence(got, truth=got | moments(1.0), controls=controls, case=case)
        return [name for name in got if compare_with_truth(seen.run, seen.truth, name, 1.0).wrong]

    assert wrong(moments(6.0), 1.0) == ["exp_avg_after/5/w", "exp_avg_sq_after/5/w"]
    assert not wrong(moments(6.0), 1.2), "rounding alone may change the gradient by half"
    assert wrong(moments(6.0), 1.05), "and here it may not"
    norm = {"grad_norm/5": torch.tensor(2.0)}
    assert not wrong(moments(1.5) | norm, 1.02, norm={"grad_norm/5": torch.tensor(2.4)}), "the norm of all is undecided"
    assert wrong(moments(1.5) | norm, 1.02, norm={"grad_norm/5": torch.tensor(2.02)}), "and here it is not"
    spoiled = moments(6.0)
    spoiled["exp_avg_sq_after/5/w"] *= 100
    assert wrong(spoiled, 1.2) == ["exp_avg_sq_after/5/w"], "by orders of magnitude"


OVERFLOWS = "tp=2 layers=1 steps=3 micro=1 lr=6.0 dtype=float16"
"""A case whose logits in the third step are beyond 65504, the largest number of float16."""
DEAD = -math.inf, math.nan


def test_a_step_that_overflows_in_the_dense_model_too_is_unknown() -> None:
    result = proved(subject, OVERFLOWS)
    assert result.verdict == UNKNOWN
    assert failed(result) == {"forward", "gradient_norm", "update"} and not contradicted(result)
    forward = verdict_of(result, "forward")
    assert forward.message.startswith("loss/2 is not finite") and "legal: a smaller lr" in forward.message
    assert "loss/2" in names_of(forward) and "loss/1" not in names_of(forward)


def test_a_bug_in_a_step_before_still_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(optimizer: torch.optim.Optimizer, number: int, step: Callable[[], Any]) -> None:
        for parameter in optimizer.param_groups[0]["params"] if number == 0 else ():
            parameter.grad.mul_(0.5)
        step()

    assert planted(OVERFLOWS, monkeypatch, halved).verdict == FAIL


@pytest.mark.parametrize("bad", DEAD)
def test_what_overflows_is_wrong_unless_a_control_run_does_too(bad: float) -> None:
    spoiled, near = LINE.clone(), LINE * (1 + 1e-4)
    spoiled[7] = bad

    def measured(value: torch.Tensor, *controls: torch.Tensor) -> Measured:
        return measure("loss/0", value, LINE, dtype="float16", controls=controls)

    alone, both = measured(spoiled, near, near), measured(spoiled, near, spoiled)
    assert (alone.right, alone.overflows, alone.wrong) == (False, False, True)
    assert (both.right, both.overflows, both.wrong) == (False, True, False)
    finite = measured(near, spoiled)
    assert (finite.right, finite.decidable, finite.wrong) == (True, False, False)


BESIDE_A_KINK = Case.parse(
    "mode=mtp family=internlm2 hidden=36 heads=6 kv_heads=2 activation=relu ffn=16 vocab=346 tied=true seq=7 "
    "head=gather cross_entropy=fused recompute=selective overlap=false lr=0.1 label_smoothing=0.1 dtype=bfloat16 "
    "seed=2455"
)
"""Found by `bench.clean`: one element of a relu's input is so near zero that only the control runs of FURTHER_PARTS
give it the sign that the ranks give it.
"""


@pytest.mark.parametrize("reference", [decoder(), dataclasses.replace(decoder(), model=None)])
def test_the_side_of_an_element_within_rounding_of_zero_is_no_failure_and_a_factor_is_one(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "FURTHER_PARTS", ())
    result = proved(subject, BESIDE_A_KINK, reference=reference, explain=False)
    assert result.verdict == (PASS if reference.model else FAIL)
    found, name = result.evidence, "grad/layers.1.mlp.w1.weight"
    assert found is not None
    merged = found.run.merged
    doubled = dataclasses.replace(merged, tensors={**merged.tensors, name: 2 * merged.tensors[name]})
    run = dataclasses.replace(found.run, merged=doubled)
    gradients = make_numeric_check("parameter_gradients")(run, found.truth, found.claims)
    assert gradients is not None and gradients.verdict == FAIL
    assert name in gradients.names
