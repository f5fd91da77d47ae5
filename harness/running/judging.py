"""The findings of a run: what first looks wrong is looked at again by all that is known of rounding, then judged.

In float64 every tensor is first compared with training from the start, which rounding leaves alone (1e-13) unless
training amplifies it. Where the first step agrees and a later one does not:

1. Every step is compared with the dense model's step from the subject's own state before it, with what Adam may make
   of gradients within rounding of zero. What is beyond that is wrong.
2. When nothing is, training from the start still counts for every tensor for which it is well conditioned: control runs
   of it allow no more than CONDITIONED. With Adam it never is: full steps are made out of rounding.

In lower precision every step is compared from the subject's own state at once. No error that
rounding may explain is called wrong before more control runs were made.

Where all errors of a float64 case are as small as float32 may make them, the ranks are run once more and looked at: do
they compute with a lower precision somewhere (an island)? If the subject does so on one rank too, it belongs to the
model: its limits hold, and the findings say where it is. If on several ranks alone, it is part of what is proved, and
wrong. Where there is no such case on one rank, nobody can know, and what its limits would admit is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.checking.checks import CHECKS, LAWS, Check, examine
from harness.checking.evidence import PASS, UNKNOWN, Evidence, Finding
from harness.checking.measures.tolerance import CONTROL_FACTOR, Measured, distance, epsilon, is_state, step_of
from harness.checking.numeric_checks import NUMERIC_KINDS
from harness.errors import MachineError, ProgramError, RequestError
from harness.protocols import CaseLike, case_text
from harness.recording.capturing.islands import Float32Probe, Island, Probed
from harness.running.ranks.execution import execute
from harness.running.trials.one_function import with_first_forward
from harness.running.trials.rounding import control_run, controlled, doubtful, measured_apart, stepwise
from harness.running.trials.trial import Trial
from harness.running.truth.own_truth import one_rank
from harness.subject import refusal, truth_of

__all__ = ["CONDITIONED", "judged"]

CONDITIONED = 1e-8
"""Training from the start is well conditioned for a tensor for which control runs of it allow no more than this."""

_ISLAND = 1e-3
"""The largest error for which a lower precision inside a float64 case is looked for."""
_PARTS = (1, 2, 3, 5)
"""Into how many partial sums the control runs of that precision cut theirs."""

Found = tuple[Evidence, dict[str, Finding]]


def judged(trial: Trial, evidence: Evidence, checks: Mapping[str, Check] = CHECKS) -> Found:
    """What these checks find, and the evidence with every control run that they came to need."""
    if evidence.torn:
        return evidence, examine(evidence, checks)
    found = _judged(trial, evidence, checks)
    return _with_islands(trial, found, checks) if evidence.case.dtype == "float64" else found


def _judged(trial: Trial, evidence: Evidence, checks: Mapping[str, Check]) -> Found:
    if evidence.case.dtype != "float64":
        evidence = stepwise(trial, evidence)
        evidence = with_first_forward(trial, evidence) if "truth" in checks else evidence
    findings = examine(evidence, checks)
    wrong = _wrong(findings)
    if doubtful(evidence, wrong):
        evidence = measured_apart(trial, evidence)
    if evidence.states is not None or not wrong or any(_in_first_step(measured.name) for measured in wrong):
        return _doubted(trial, evidence, findings, checks)
    stepped = stepwise(trial, evidence)
    if stepped.states is None:
        return _doubted(trial, evidence, findings, checks)
    one_step = _doubted(trial, stepped, _again(stepped, findings, checks), checks)
    if (
        _wrong(one_step[1])
        or stepped.slack
        or not any(_conditioned(trial, evidence, measured.name) for measured in wrong)
    ):
        return one_step
    from_start = _doubted(trial, evidence, findings, checks)
    return from_start if any(m.allowed <= CONDITIONED for m in _wrong(from_start[1])) else one_step


def _with_islands(trial: Trial, found: Found, checks: Mapping[str, Check]) -> Found:
    """The findings by the limits of the lowest precision that the ranks compute with, where that may explain them."""
    evidence, findings = found
    wrong = _wrong(findings)
    if not wrong or max(measured.error for measured in wrong) > _ISLAND or _stored_shorter(evidence, wrong):
        return found
    constants = not _same_constants(trial)
    islands, dense = _islands(trial, trial.case, constants), None
    if islands:
        dense = _on_one_rank(trial, constants)
    own = [island for island in islands if dense is None or island.dtype in dense]
    if not islands:
        return found
    lowest = max(own or islands, key=lambda island: epsilon(island.dtype))
    lower = evidence.case.but(dtype=lowest.dtype)
    controls = [trial.computed(trial.reference.control, lower, part="control", parts=parts) for parts in _PARTS]
    seen = replace(evidence, precision=lowest.dtype, controls=tuple(controls), far={})
    unseen = f"errors below those of {lowest.dtype} (the float64 case uses {lowest})"
    again, changed = _again(seen, findings, checks), {}
    if not own:
        return (evidence if _wrong(again) else replace(evidence, island=str(lowest))), findings
    for name, finding in again.items():
        if finding is findings[name]:
            changed[name] = finding
        elif dense is None and finding.verdict == PASS != findings[name].verdict:
            rule = f"within the limits of {lowest}; no case on one rank shows whether the model has it too"
            changed[name] = Finding(verdict=UNKNOWN, message=f"{findings[name].message}, {rule}")
        else:
            changed[name] = replace(finding, unchecked=(*finding.unchecked, unseen))
    return seen, changed


def _stored_shorter(evidence: Evidence, wrong: Sequence[Measured]) -> bool:
    """Whether the first step is right in float64 and a state behind it was rounded to float32 as it was stored: each of
    its numbers is one of float32, and the truth's are not. No arithmetic of the model explains that.
    """
    states = [measured.name for measured in wrong if is_state(measured.name) or measured.name.startswith("param/")]
    if any(_in_first_step(measured.name) and measured.name not in states for measured in wrong):
        return False
    pairs = [(evidence.merged.tensors[name], evidence.truth[name]) for name in states if name in evidence.truth]
    return any(own.equal(own.float().to(own)) and not truth.equal(truth.float().to(truth)) for own, truth in pairs)


def _on_one_rank(trial: Trial, constants: bool) -> set[str] | None:
    """The lower precisions that the subject computes with on one rank, None where it has no such case."""
    try:
        case = one_rank(trial.case, trial.subject)
        return None if refusal(case, trial.subject) else {each.dtype for each in _islands(trial, case, constants)}
    except RequestError:
        return None


def _islands(trial: Trial, case: CaseLike, constants: bool) -> list[Island]:
    """Where the ranks of a case compute with a lower precision; none where they cannot be looked at.

    `constants`: whether numbers count that were not computed from float64.
    """
    try:
        run = execute(
            case,
            Probed(trial.subject, constants=constants),
            trial.engine,
            text=case_text(case),
            record=False,
            device=trial.device,
            timeout_s=trial.timeout_s,
        )
    except (ProgramError, MachineError):  # a program that a dispatch mode disturbs: its errors stand
        return []
    return [Island.read(name) for name in dict.fromkeys(name for outcome in run.outcomes for name in outcome)]


def _same_constants(trial: Trial) -> bool:
    """Whether constants of a lower precision are those of the truth: the subject's own code, or a dense model that
    has such ones too.
    """
    dense = truth_of(trial.subject)
    if dense is None or isinstance(dense, str):
        return dense is not None
    with Float32Probe() as probe:
        trial.computed(trial.reference.truth)
    return bool(probe.found)


def _wrong(findings: Mapping[str, Finding]) -> list[Measured]:
    return [measured for finding in findings.values() for measured in finding.wrong]


def _in_first_step(name: str) -> bool:
    """Whether a tensor is of the first step, before the optimizer: neither states nor training come into it."""
    named = name.startswith(("act/", "act_grad/", "grad/"))
    return named or (step_of(name) == 0 and not is_state(name))


def _conditioned(trial: Trial, evidence: Evidence, name: str) -> bool:
    """Whether the first control run of training from the start stays near enough for this tensor."""
    control = control_run(trial).get(name)
    if control is None:
        return False
    return CONTROL_FACTOR * distance(control, evidence.truth[name]).frobenius <= CONDITIONED


def _doubted(trial: Trial, evidence: Evidence, findings: dict[str, Finding], checks: Mapping[str, Check]) -> Found:
    """The findings with more control runs, where rounding may explain what is wrong."""
    wrong = _wrong(findings)
    if not doubtful(evidence, wrong):
        return evidence, findings
    evidence = controlled(trial, evidence, wrong)
    return evidence, _again(evidence, findings, checks)


def _again(evidence: Evidence, findings: Mapping[str, Finding], checks: Mapping[str, Check]) -> dict[str, Finding]:
    """The findings with those that compare numbers made anew; of large tensors those that found something wrong."""
    numbers = {name: checks[name] for name in findings if name in NUMERIC_KINDS or name in LAWS}
    if evidence.far:
        numbers = {name: check for name, check in numbers.items() if findings[name].wrong}
    return {**findings, **examine(evidence, numbers)}
