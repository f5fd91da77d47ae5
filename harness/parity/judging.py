"""The verdicts on two recorded launches: the first is the truth, the ranks of the second are what is checked.

Limits come from the first launch itself: further runs of it, with every operator's result moved by rounding, are the
control runs, and so is a second run of it as it is. They are made only where something is beyond the smallest limit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardproof.harness.checking.checks import Check, run_checks
from shardproof.harness.checking.coverage import check_layout, check_replicas
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.measures.spreads import run_spreads
from shardproof.harness.checking.measures.tolerance import FLOAT64_CEILING
from shardproof.harness.checking.numeric_checks import check_update, make_numeric_check
from shardproof.harness.checking.records import Calls, Claims, Controls, Evidence, Run, Truth, merged_outcomes
from shardproof.harness.diagnosing.causes.places import order_by_time
from shardproof.harness.diagnosing.diagnosis import Diagnosis
from shardproof.harness.outcome.blocks import localize
from shardproof.harness.parity import alive, samples
from shardproof.harness.parity.adam import adam_bound
from shardproof.harness.parity.axes import axes_of
from shardproof.harness.parity.case import ParityCase
from shardproof.harness.parity.modules import Compared, find_wrong_module
from shardproof.harness.parity.partners import Partners, find_partners
from shardproof.harness.parity.quantities import (
    READINGS,
    Reading,
    control_tensors,
    flat_parameters,
    full_tensors,
    is_clipped,
    outcomes_of,
    with_flat,
)
from shardproof.harness.parity.recorded import Launch
from shardproof.harness.running.explaining import diagnose_findings
from shardproof.harness.running.result import CaseResult, verdict_on
from shardproof.harness.verdicts.facts import FailedCheck, First, Note, NoteKind, notes_about
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

NAME = "parity"
"""What the run, and the first word of its case, is called."""
CHECKS: Mapping[str, Check] = {
    "merge": check_layout,
    "replicas": check_replicas,
    **{
        name: make_numeric_check(name) for name in ("initial_values", "forward", "parameter_gradients", "gradient_norm")
    },
    "update": check_update,
}
"""Checks of numbers, in the order in which training computes them."""
_RUNS, _MOST_RUNS = 3, 8
"""Perturbed runs behind a limit, and how many there may be where something is just beyond it: three may be lucky."""
NEAR = 10.0
"""A tensor that is less than this many times beyond its limit is just beyond it."""
NUMERIC = ("initial_values", "forward", "parameter_gradients", "gradient_norm", "update")
_LISTED = 5
_DENSE, _FIRST = "the dense model", "the first launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Further:
    """Further runs of the first launch, made when they are asked for: `again` as it is, `perturbed` by rounding.

    Each may be None where there is no such run; `perturbed` is asked by the number of the run, from 1.
    """

    again: Callable[[], Launch | None] = lambda: None
    perturbed: Callable[[int], Launch | None] = lambda _: None


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """What is known of two launches while they are judged."""

    first: Launch
    second: Launch
    partners: Partners
    axes: Mapping[str, tuple[tuple[int, ...], ...]]
    case: ParityCase
    steps: list[samples.Samples]
    tensors: Mapping[str, Tensor]
    flat: Mapping[str, bool]
    lost: tuple[str, ...]
    reading: Reading
    controls: list[Launch] = field(default_factory=list)
    control_tensors: list[dict[str, Tensor]] = field(default_factory=list)


def judge_launches(first: Launch, second: Launch, *, repeat: str = "", further: Further = Further()) -> CaseResult:
    """The result of holding the second launch against the first one.

    `repeat` is the command that compares them again. Raises RequestError where a recorded tensor cannot be read.
    """
    seen = _prepare(first, second)
    evidence, findings = _judge(seen)
    stated = {samples.CHECK: samples.check_samples(seen.steps), alive.CHECK: alive.check_alive(first, second)}
    if any(finding.verdict == FAIL for finding in (*findings.values(), *stated.values())):
        if (again := further.again()) is not None:
            stated["determinism"] = _check_determinism(seen, again)
            if any(_spreads(seen, again)):
                _add_control(seen, again)
                evidence, findings = _judge(seen)
        if stated[samples.CHECK].verdict != FAIL and not _wrong_starts(seen, findings):
            evidence, findings = _with_limits(seen, evidence, findings, further)
    evidence, findings = _with_reading(seen, evidence, findings)
    findings = {"partners": _check_partners(seen), **stated, **findings}
    for undecided in (_undecided_by_draws, _undecided_by_chance, _undecided_without_controls):
        findings = undecided(seen, findings)
    return _explained(seen, evidence, findings, repeat)


def _with_limits(
    seen: _Comparison, evidence: Evidence, findings: dict[str, Finding], further: Further
) -> tuple[Evidence, dict[str, Finding]]:
    """Evidence and findings by the limits that perturbed runs of the first launch show, as many as it takes."""
    for number in range(1, _MOST_RUNS + 1):
        enough = number > _RUNS and not 1 < furthest_ratio(findings) <= NEAR
        if enough or not _may_be_rounding(seen, findings) or (launch := further.perturbed(number)) is None:
            break
        _add_control(seen, launch)
        if number >= _RUNS:
            evidence, findings = _judge(seen)
    return _judge(seen) if 0 < len(seen.controls) < _RUNS else (evidence, findings)


def _may_be_rounding(seen: _Comparison, findings: Mapping[str, Finding]) -> bool:
    """Whether rounding may explain what is wrong first: in float64 only errors as small as noise can be."""
    errors = {one.name: one.error for finding in findings.values() for one in finding.wrong}
    torn = findings["replicas"].names if "replicas" in findings else ()
    first = next(
        iter(order_by_time([name for name in seen.tensors if name in errors or name in torn], seen.case.steps)), ""
    )
    return first in errors and (seen.case.dtype != "float64" or errors[first] < FLOAT64_CEILING)


def _wrong_starts(seen: _Comparison, findings: Mapping[str, Finding]) -> list[str]:
    """The parameters that begin with other values than in the first launch."""
    wrong = {name for finding in findings.values() if finding.verdict == FAIL for name in finding.names}
    return [name.removeprefix("init/") for name in seen.tensors if name in wrong and kind_of(name) == "init"]


def furthest_ratio(findings: Mapping[str, Finding]) -> float:
    """How far the furthest wrong tensor is beyond its limit, in units of the limit; 0 where none is."""
    return max((one.ratio for finding in findings.values() for one in finding.wrong), default=0.0)


def _prepare(first: Launch, second: Launch) -> _Comparison:
    count = min(first.steps, second.steps)
    found = [samples.samples_of(first, second, step) for step in range(count)]
    axes = axes_of(second, found[0]) if found else {}
    # One that clips by hand shows gradients behind its clip alone.
    reading = Reading(received=is_clipped(first) != is_clipped(second))
    tensors, flaws = full_tensors(first, reading)
    initial = {n.removeprefix("init/"): tensor for n, tensor in tensors.items() if n.startswith("init/")}
    partners = find_partners(initial, first.aliases, second)
    flat = flat_parameters(second, partners, initial)
    case = ParityCase(name=NAME, world_size=second.world_size, axes=axes, steps=max(count, 1), dtype=first.dtype)
    later = {n for n in tensors if _step_of_later(n) >= count}
    return _Comparison(
        first=first,
        second=second,
        partners=partners,
        axes=axes,
        case=case,
        steps=found,
        tensors=with_flat({n: tensor for n, tensor in tensors.items() if n not in later}, flat),
        flat=flat,
        lost=tuple(flaw.name for flaw in flaws),
        reading=reading,
    )


def _step_of_later(name: str) -> int:
    word = name.partition("/")[2].partition("/")[0]
    return int(word) if word.isdigit() and kind_of(name) not in ("init", "grad") else -1


def _judge(seen: _Comparison) -> tuple[Evidence, dict[str, Finding]]:
    """The evidence, and what the checks of numbers find in it."""
    outcomes = outcomes_of(seen.second, seen.partners, seen.axes, seen.reading)
    known = {name for outcome in outcomes for name in outcome}
    outcomes = [{name: own for name, own in outcome.items() if name in seen.tensors} for outcome in outcomes]
    merged = merged_outcomes(outcomes, (), seen.tensors)
    initial = {name.removeprefix("init/"): t for name, t in seen.tensors.items() if name.startswith("init/")}
    truth = Truth(
        tensors={name: tensor for name, tensor in seen.tensors.items() if name in known},
        initial=initial,
        controls=Controls(
            runs=tuple(seen.control_tensors), adam_bound=adam_bound(seen.tensors, initial, seen.control_tensors)
        ),
    )
    run = Run(calls=Calls(case=seen.case), outcomes=outcomes, merged=merged)
    evidence = Evidence(run=run, claims=Claims(axes=seen.axes), truth=truth)
    return evidence, run_checks(evidence, CHECKS)


def _add_control(seen: _Comparison, launch: Launch) -> None:
    seen.controls.append(launch)
    seen.control_tensors.append(control_tensors(launch, seen.flat, seen.reading))


def _with_reading(
    seen: _Comparison, evidence: Evidence, findings: dict[str, Finding]
) -> tuple[Evidence, dict[str, Finding]]:
    """Another reading of the losses where only the losses are wrong, and it is right.

    Gradients belong to the objective that the default reads. Where they are wrong too, the loss is what is wrong.
    """
    forward, gradients = findings.get("forward"), findings.get("parameter_gradients")
    if forward is None or forward.verdict != FAIL or gradients is None or gradients.verdict != PASS:
        return evidence, findings
    kept = seen.reading
    for reading in READINGS:
        seen.reading = replace(reading, received=kept.received)
        other, found = _judge(seen)
        if found["forward"].verdict == PASS:
            return other, found
    seen.reading = kept
    return evidence, findings


def _check_partners(seen: _Comparison) -> Finding:
    """Whether there is something to compare, and what of both launches is not."""
    parameters = [name.removeprefix("init/") for name in seen.tensors if name.startswith("init/")]
    placed = {name for placement in seen.partners.placements.values() for name in placement.names}
    alone = [name for name in parameters if name not in placed]
    strange = tuple(dict.fromkeys(name for _, name in seen.partners.unplaced))
    silent = sorted({*range(seen.second.world_size)} - {rank.rank for rank in seen.second.ranks})
    left = (*seen.first.left_out(), *seen.second.left_out())
    reasons = (f"left out by the budget: {name}" for name in left[:_LISTED])
    notes = (
        *notes_about(not_returned=tuple(alone), not_in_truth=strange, undecided=seen.lost),
        *(Note(kind=NoteKind.UNCHECKED, reason=reason) for reason in reasons),
        *(Note(kind=NoteKind.UNCHECKED, reason=f"below float64: {name}") for name in _narrow(seen)[:_LISTED]),
    )
    missing = [
        words
        for kind, words in (("loss", "loss"), ("grad", "gradient"), ("param_after", "parameter after a step"))
        if not any(kind_of(name) == kind for name in seen.tensors)
    ]
    problems = [
        *(["the launches have no parameter in common"] if not placed else []),
        *([f"{_list(alone)} of the first launch have no partner" if len(alone) > 1 else
           f"{alone[0]} of the first launch has no partner"] if placed and alone else []),
        *([f"{_list(strange)} of the second launch: no parameter of the first one has the shape or the numbers"]
          if placed and strange else []),
        *([f"of the first launch no {missing[0]} was recorded"] if missing else []),
        *([f"ranks {', '.join(map(str, silent))} of the second launch recorded nothing"] if silent else []),
        *([f"{_list(seen.lost)} of the first launch's ranks make no full tensor"] if seen.lost else []),
    ]  # fmt: skip
    message = f"{len(parameters) - len(alone)} of {len(parameters)} parameters of the first launch have a partner"
    message += f"; a step's loss is {seen.reading.words}" if seen.second.world_size > 1 else ""
    return Finding(verdict=UNKNOWN if problems else PASS, message="; ".join([message, *problems]), notes=notes)


def _narrow(seen: _Comparison) -> list[str]:
    """What stayed in a narrower dtype where float64 was asked for."""
    found = [
        one for launch in (seen.first, seen.second) for rank in launch.ranks for one in rank.about.get("narrow", ())
    ]
    return list(dict.fromkeys(map(str, found)))


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _spreads(seen: _Comparison, again: Launch) -> dict[str, float]:
    """Name -> how far two runs of the first launch are apart, of those tensors that are."""
    second = {
        name: tensor for name, tensor in control_tensors(again, seen.flat, seen.reading).items() if name in seen.tensors
    }
    absent = {name: torch.zeros(0) for name in seen.tensors if name not in second}
    return run_spreads([localize(seen.tensors)], [localize({**second, **absent})])


def _check_determinism(seen: _Comparison, again: Launch) -> Finding:
    """Whether the first launch repeats itself. What differs by more than rounding cannot be judged."""
    spreads = _spreads(seen, again)
    limit = torch.finfo(getattr(torch, seen.case.dtype)).eps ** 0.5
    wide = [name for name, spread in spreads.items() if spread > limit]
    others = (samples.describe_difference(samples.samples_of(seen.first, again, one.step)) for one in seen.steps)
    if words := next(filter(None, others), ""):
        wide, what = [*wide, "sample/0"], f"do not read the same samples: {words}"
    else:
        what = f"differ in {_list(wide)}"
    if wide:
        rule = "what differs between two runs of one launch cannot be judged; legal: a seed for all that it draws"
        return Finding(
            verdict=UNKNOWN,
            message=f"two runs of the first launch {what}: {rule}",
            notes=notes_about(undecided=tuple(wide)),
        )
    how = f"differ by rounding in {len(spreads)} tensors" if spreads else "agree in every bit"
    return Finding(verdict=PASS, message=f"two runs of the first launch {how}")


def _undecided_by_chance(seen: _Comparison, findings: dict[str, Finding]) -> dict[str, Finding]:
    """Findings that are unknown, not failed, since the first launch does not repeat itself."""
    repeated = findings.get("determinism")
    if repeated is None or repeated.verdict == PASS:
        return findings
    return _as_unknown(findings, (samples.CHECK, "replicas", *NUMERIC), "two runs of the first launch differ too")


def _as_unknown(findings: dict[str, Finding], checks: Sequence[str], why: str) -> dict[str, Finding]:
    """The findings, those of these checks unknown where they failed."""
    return {
        check: replace(finding, verdict=UNKNOWN, message=f"{finding.message}, which proves nothing: {why}")
        if check in checks and finding.verdict == FAIL
        else finding
        for check, finding in findings.items()
    }


def _undecided_by_draws(seen: _Comparison, findings: dict[str, Finding]) -> dict[str, Finding]:
    """Findings of numbers that are unknown, not failed, since forward draws numbers (dropout)."""
    drawn = [str(one) for launch in (seen.first, seen.second) for rank in launch.ranks
             for one in rank.about.get("drawn", ())]  # fmt: skip
    if not drawn:
        return findings
    where = _list(list(dict.fromkeys(drawn)))
    why = f"numbers are drawn in {where}, others on each launch; legal: --no-dropout"
    return _as_unknown(findings, ("replicas", *NUMERIC[1:]), why)


def _undecided_without_controls(seen: _Comparison, findings: dict[str, Finding]) -> dict[str, Finding]:
    """Findings of numbers that are unknown, not failed: rounding may be behind them, and no run shows how much.

    Half of the digits of a dtype is more than rounding comes to in a few steps, but for chaotic training.
    """
    if seen.controls or seen.case.dtype == "float64":
        return findings
    limit = torch.finfo(getattr(torch, seen.case.dtype)).eps ** 0.5
    words = "no run of the first launch with its rounding moved says whether rounding is behind it"
    legal = "--control FOLDER (record --values --perturb 1), or --dtype float64"

    def may_be_rounding(finding: Finding) -> bool:
        return finding.verdict == FAIL and bool(finding.wrong) and all(one.error <= limit for one in finding.wrong)

    return {
        check: replace(finding, verdict=UNKNOWN, message=f"{finding.message}, and {words}; legal: {legal}")
        if may_be_rounding(finding)
        else finding
        for check, finding in findings.items()
    }


def _explained(seen: _Comparison, evidence: Evidence, findings: dict[str, Finding], repeat: str) -> CaseResult:
    """The verdicts, those of failed checks with their first place and causes."""
    text, failures = str(seen.case), dict[str, FailedCheck]()
    diagnoses: Mapping[str, Diagnosis] = {}
    if any(finding.verdict == FAIL for finding in findings.values()):
        evidence = _searched(seen, evidence, findings)
        diagnoses, failures = diagnose_findings(evidence, findings, {}, seen.case.name, "")
        begun = findings[samples.CHECK]
        for check, failure in failures.items():
            causes = tuple(replace(cause, words=_in_our_words(cause.words)) for cause in failure.causes)
            first = failure.first
            if begun.verdict == FAIL:
                first = First(phase="data", step=int(begun.names[0].partition("/")[2]), name=begun.names[0])
            failures[check] = replace(failure, repeat=repeat or failure.repeat, causes=causes, first=first)
    verdicts = tuple(
        verdict_on(replace(finding, message=_in_our_words(finding.message)), text, check, failures.get(check))
        for check, finding in findings.items()
    )
    return CaseResult(case=seen.case, text=text, verdicts=verdicts, evidence=evidence, diagnoses=diagnoses)


def _in_our_words(text: str) -> str:
    return text.replace(_DENSE, _FIRST)


def _searched(seen: _Comparison, evidence: Evidence, findings: Mapping[str, Finding]) -> Evidence:
    """The evidence with what stands before the first wrong number: samples, initial values, the first wrong module."""
    if findings[samples.CHECK].verdict == FAIL:
        words = next(filter(None, map(samples.describe_difference, seen.steps)))
        return evidence.with_found(other_samples=words)
    wrong = {name for finding in findings.values() if finding.verdict == FAIL for name in finding.names}
    if begun := _wrong_starts(seen, findings):
        return evidence.with_found(other_start=_words_of_start(seen, begun))
    forward = "loss/0" in wrong
    backward = any(kind_of(name) == "grad" for name in wrong)
    both = Compared(
        first=seen.first,
        second=seen.second,
        partners=seen.partners,
        samples=seen.steps[0],
        axes=seen.axes,
        dtype=seen.case.dtype,
        controls=seen.controls,
    )
    located = find_wrong_module(both, forward=forward, backward=backward) if seen.steps else None
    return evidence.with_found(located=located)


def _words_of_start(seen: _Comparison, names: Sequence[str]) -> str:
    """Which initial values differ, and whether ranks draw them by seeds of their own."""
    counted = sum(name.startswith("init/") for name in seen.tensors)
    placements = seen.partners.placements.items()
    apart = sorted({rank for (rank, _), one in placements if not one.known and {*one.names} & {*names}})
    words = f"{len(names)} of {counted} parameters begin with other values than in the first launch, first {names[0]}"
    right = {rank for (rank, _), _ in placements} - {*apart}
    if right and apart:
        ranks = f"rank{'s' if len(apart) > 1 else ''} {', '.join(map(str, apart))}"
        words += f"; on {ranks} alone, as where every rank has a seed of its own"
    return f"{words}; legal: one seed for both launches, or --same-init"
