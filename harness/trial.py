"""The runs of one case, from which its evidence is made: the dense model, the subject recorded, the subject unwatched.

Watching (capturing activations) costs another run, so it is done only when a check or a diagnosis asks for it. The
harness imports no model: the reference is named like any subject. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from harness.asking import Unanswered, stated
from harness.checking.exact_checks import same_outcomes
from harness.diagnosis import case_text
from harness.engines.engine import Engine
from harness.errors import RequestError, error_text
from harness.evidence import Evidence, gathered
from harness.execution import execute, execute_captured
from harness.protocols import CaseLike, Subject, TermLike
from harness.resolve import resolve
from harness.tolerance import FLOAT64_CEILING, Measured, kind_of

__all__ = [
    "REFERENCE",
    "Asked",
    "Reference",
    "Trial",
    "controlled",
    "doubtful",
    "expectation_of",
    "explained",
    "recorded",
    "watched",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Names of the dense model's functions (case, device) -> outcome: the truth, and the control runs beside it.

    `kinks` widens limits, so it belongs to its truth: "", none, unless it is named with it.
    `control` and `control_activations` take parts=n too, the number of partial sums in place of their own choice.
    The others are asked when a failure is explained: step 0 taken apart by data rank and micro-batch, and what comes of
    data or weights that are read otherwise (see `reference.what_ifs`) and of other rules of the steps.
    """

    truth: str = "reference.subject:truth"
    true_activations: str = "reference.subject:true_activations"
    control: str = "reference.control:control"
    control_activations: str = "reference.control:control_activations"
    kinks: str = ""
    shares: str = "reference.shares:shares"
    alternatives: str = "reference.what_ifs:alternatives"
    trainings: str = "reference.what_if_training:trainings"


REFERENCE = Reference(kinks="reference.kinks:kinks")
MORE_PARTS = (1, 2, 3, 4, 5, 6, 7, 8)
"""Into how many partial sums the further control runs cut their sums; 1 adds the micro-batches in reverse only."""


Asked = tuple[str, tuple[tuple[str, int], ...]]
"""A function of the reference and the words that it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One case on one subject, and how it is run. `seconds` and `problems` fill up as its runs end.

    `name` is the subject's when it was given as module:object, else "".
    `problems`: what could not be asked of the subject (expectation, activations) -> why.
    `known` fills up with what the reference computed; trials of one case may share it.
    """

    case: CaseLike
    subject: Subject
    engine: Engine
    reference: Reference = REFERENCE
    device: str = "cpu"
    timeout_s: float = 60.0
    name: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    known: dict[Asked, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The case's text."""
        return case_text(self.case)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note how long the body takes, also when it raises."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start_s


def recorded(trial: Trial) -> Evidence:
    """The evidence of one recorded run beside the dense model; nothing is captured and nothing repeated.

    Raises RequestError when the dense model cannot be computed, and what the engine raises.
    """
    case, names = trial.case, trial.reference
    truth = _dense(trial, names.truth)
    controls = [] if case.dtype == "float64" else [_dense(trial, names.control, part="control")]
    with trial.timed("recorded"):
        run = execute(
            case,
            trial.subject,
            trial.engine,
            text=trial.text,
            device=trial.device,
            timeout_s=trial.timeout_s,
            name=trial.name,
        )
    return Evidence(
        case=case,
        outcomes=run.outcomes,
        captured=(),
        merged=gathered(run.outcomes, (), truth),
        truth=truth,
        controls=tuple(controls),
        events=run.events,
        expectation=expectation_of(trial),
        repeats=(),
        unwaited=run.unwaited,
    )


def watched(trial: Trial, evidence: Evidence) -> Evidence:
    """The same evidence with an unrecorded run beside it: activations captured, outcomes to compare bit for bit."""
    case, names = trial.case, trial.reference
    with trial.timed("plain"):
        plain = execute_captured(
            case, trial.subject, trial.engine, device=trial.device, timeout_s=trial.timeout_s, name=trial.name
        )
    if plain.problem:
        trial.problems["activations"] = plain.problem
    repeats = [plain.outcomes]
    if not same_outcomes(evidence.outcomes, plain.outcomes):
        with trial.timed("again"):  # tells a subject that is not deterministic from a recording that disturbs it
            again = execute(
                case,
                trial.subject,
                trial.engine,
                text=trial.text,
                record=False,
                device=trial.device,
                timeout_s=trial.timeout_s,
                name=trial.name,
            )
        repeats.append(again.outcomes)
    truth = {**evidence.truth, **_dense(trial, names.true_activations)}
    controls = [{**run, **_dense(trial, names.control_activations, part="control")} for run in evidence.controls]
    return replace(
        evidence,
        captured=plain.captured,
        merged=gathered(evidence.outcomes, plain.captured, truth),
        truth=truth,
        controls=tuple(controls),
        repeats=tuple(repeats),
        saved_bytes=plain.saved_bytes,
    )


def doubtful(evidence: Evidence, wrong: Collection[Measured]) -> bool:
    """Whether rounding may explain what is wrong: in float64 only where some error is as small as noise can be."""
    exact = evidence.case.dtype == "float64"
    return any(not exact or measured.error < FLOAT64_CEILING for measured in wrong)


def controlled(trial: Trial, evidence: Evidence) -> Evidence:
    """The same evidence with MORE_PARTS control runs more, for one may be lucky, and what a relu's kink may change."""
    more = []
    for parts in MORE_PARTS:
        run = _dense(trial, trial.reference.control, part="control", parts=parts)
        more.append({**run, **_dense(trial, trial.reference.control_activations, part="control", parts=parts)})
    sides = (1, -1) if trial.reference.kinks else ()
    kinks = tuple(_dense(trial, trial.reference.kinks, part="control", side=side) for side in sides)
    return replace(evidence, controls=(*evidence.controls, *more), kinks=kinks)


def explained(trial: Trial, evidence: Evidence, wrong: Collection[str]) -> Evidence:
    """The same evidence with what explains these wrong names: gradients taken apart, data read otherwise."""
    kinds = {kind_of(name) for name in wrong}
    shares: Mapping[str, Tensor] = {}
    what_if: dict[str, Tensor] = {}
    try:
        if kinds & {"grad", "param", "grad_norm", "act"}:
            shares = _dense(trial, trial.reference.shares, part="explained")
        if kinds & {"act", "logits", "loss", "grad"}:
            what_if |= _dense(trial, trial.reference.alternatives, part="explained")
        if "param" in kinds:
            what_if |= _dense(trial, trial.reference.trainings, part="explained")
    except Exception as problem:  # the failure stands; less of it is explained, and that is said
        trial.problems["explanation"] = f"the dense model could not be asked: {error_text(problem)}"
    return replace(evidence, shares=shares, alternatives=what_if)


def _dense(trial: Trial, name: str, *, part: str = "truth", **words: int) -> Mapping[str, Tensor]:
    """What a function of the reference computes, on the CPU; timed as this part."""
    asked = name, tuple(words.items())
    if asked not in trial.known:
        function: Any = resolve(name)
        try:
            with trial.timed(part):
                outcome: Mapping[str, Tensor] = function(trial.case, torch.device(trial.device), **words)
        except (ValueError, OSError) as problem:
            raise RequestError(f"case {trial.text!r}: the dense model cannot compute it: {problem}") from problem
        trial.known[asked] = {key: tensor.detach().cpu() for key, tensor in outcome.items()}
    return trial.known[asked]


def expectation_of(trial: Trial) -> tuple[TermLike, ...] | None:
    """The subject's closed form, None when it states none; a closed form that raises is noted as a problem."""
    try:
        return stated(trial.case, trial.subject)
    except Unanswered as problem:  # no verdict on the run, and it must not read as "none stated"
        trial.problems["expectation"] = str(problem)
        return None
