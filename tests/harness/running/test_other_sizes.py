"""Cases of another size decide whether a factor comes from a size: planted constants and planted means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from harness.engines.threads.inproc import InprocEngine
from harness.running.proof import CaseResult, prove
from parallel.subject import subject
from reference.case import Case

SMALL = "layers=1 hidden=16 heads=4 kv_heads=4 ffn=16 vocab=128 seq=8 steps=1 lr=0.1"
TEXT = f"mode=tp tp=2 micro=2 {SMALL}"


def proved(engine: InprocEngine, text: str, factor: Callable[[Case], float], **attributes: Any) -> CaseResult:
    """The case on our subject with a factor on the norms' gradients, which all ranks hold whole."""

    def scaled(case: Case, device: torch.device) -> Mapping[str, Any]:
        outcome: dict[str, Any] = dict(subject(case, device))
        for name in [name for name in outcome if name.startswith("grad/") and name.endswith("norm.weight")]:
            outcome[name] = outcome[name] * factor(case)
        return outcome

    for name in ("expected", "activations", "axes"):
        setattr(scaled, name, getattr(subject, name, None))
    for name, value in attributes.items():
        setattr(scaled, name, value)
    return prove(Case.parse(text), scaled, engine)


def causes(result: CaseResult) -> list[tuple[str, str]]:
    assert result.diagnosis is not None
    return [(cause.id, cause.words) for cause in result.diagnosis.causes]


def test_a_factor_that_follows_a_size_comes_from_it(engine: InprocEngine) -> None:
    ((known, words),) = causes(proved(engine, TEXT, lambda case: 1 / case.tp))
    assert (known, "0.3333 where tp" in words or "0.25 where tp=4" in words) == ("averaged", True)
    ((known, words),) = causes(proved(engine, TEXT, lambda case: 1 / case.micro))
    assert (known, "micro=2: divided by it once more" in words) == ("constant_factor", True)
    assert "0.3333 where micro=3" in words


def test_a_factor_that_stays_is_a_constant(engine: InprocEngine) -> None:
    ((known, words),) = causes(proved(engine, TEXT, lambda case: 0.5))
    assert (known, words.startswith("all are 0.5 x the truth: a constant factor is wrong (0.5 where")) == (
        "constant_factor",
        True,
    )


def test_a_factor_that_changes_otherwise_is_told_nothing_of(engine: InprocEngine) -> None:
    assert causes(proved(engine, TEXT, lambda case: 2.0**-case.tp * 2 if case.micro == 2 else 0.3)) == []


def test_other_cases_that_the_subject_refuses_or_cannot_run_decide_nothing(engine: InprocEngine) -> None:
    both = ["averaged", "constant_factor"]
    refused = proved(
        engine, TEXT, lambda case: 0.5, refuses=lambda case: "" if (case.tp, case.micro) == (2, 2) else "not this one"
    )
    ran: list[str] = []

    def once(case: Case) -> float:
        ran.append(str(case))
        if (case.tp, case.micro) != (2, 2):
            raise RuntimeError("no such case")
        return 0.5

    for result in (refused, proved(engine, TEXT, once)):
        assert [known for known, _ in causes(result)] == both
    assert any("micro=3" in case for case in ran)  # they were tried
