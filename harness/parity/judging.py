"""The verdicts on two recorded launches.

Limits come from the first launch itself: its control runs are further runs in which every operator's result is moved by
rounding, and a second run without changes. They are made only if something is beyond the smallest limit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.measures.tolerance import FLOAT64_CEILING
from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.causes.places import order_by_time
from shardproof.harness.parity import alive, samples
from shardproof.harness.parity.comparison import (
    LISTED,
    LaunchComparison,
    add_control,
    compare_modules,
    judge_numbers,
    prepare_comparison,
    wrong_starts,
)
from shardproof.harness.parity.explaining import explain_findings
from shardproof.harness.parity.modules import count_targets
from shardproof.harness.parity.quantities import READINGS, Reading
from shardproof.harness.parity.recorded import Launch
from shardproof.harness.parity.undecided import (
    check_determinism,
    spreads_of,
    undecided_by_chance,
    undecided_by_draws,
    undecided_by_samples,
    undecided_by_starts,
    undecided_without_controls,
)
from shardproof.harness.running.result import CaseResult
from shardproof.harness.verdicts.facts import Note, NoteKind, notes_about, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

_RUNS, _MOST_RUNS = 3, 8
"""How many perturbed runs are behind a limit, and the most if something is just beyond it: three may be lucky."""
NEAR = 10.0
"""A tensor of less than this many limits is just beyond its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Further:
    """Further runs of the first launch, made on request: `again` without changes, `perturbed` by rounding.

    Each may be None if there is no such run. `perturbed` takes the number of the run, from 1.
    """

    again: Callable[[], Launch | None] = lambda: None
    perturbed: Callable[[int], Launch | None] = lambda _: None


def judge_launches(first: Launch, second: Launch, *, repeat: str = "", further: Further = Further()) -> CaseResult:
    """The result of comparing the second launch with the first one.

    `repeat` is the command that compares them again. Raises RequestError if a recorded tensor cannot be read.
    """
    seen = prepare_comparison(first, second)
    evidence, findings = judge_numbers(seen)
    stated = {samples.CHECK: samples.check_samples(seen.steps), alive.CHECK: alive.check_alive(first, second)}
    if any(finding.verdict == FAIL for finding in (*findings.values(), *stated.values())):
        if (again := further.again()) is not None:
            stated["determinism"] = check_determinism(seen, again)
            if any(spreads_of(seen, again)):
                add_control(seen, again)
                evidence, findings = judge_numbers(seen)
        if stated[samples.CHECK].verdict != FAIL and not wrong_starts(seen, findings):
            evidence, findings = _with_limits(seen, evidence, findings, further)
    evidence, findings = _with_reading(seen, evidence, findings)
    findings = {"partners": check_partners(seen, evidence), **stated, **findings}
    unknown = (undecided_by_samples, undecided_by_starts, undecided_by_draws, undecided_by_chance)
    for undecided in (*unknown, undecided_without_controls):
        findings = undecided(seen, findings)
    return explain_findings(seen, evidence, findings, repeat)


def _with_limits(
    seen: LaunchComparison, evidence: Evidence, findings: dict[str, Finding], further: Further
) -> tuple[Evidence, dict[str, Finding]]:
    """Evidence and findings by the limits of as many perturbed runs of the first launch as are needed."""
    for number in range(1, _MOST_RUNS + 1):
        enough = number > _RUNS and not 1 < furthest_ratio(findings) <= NEAR
        if enough or not _may_be_rounding(seen, findings) or (launch := further.perturbed(number)) is None:
            break
        add_control(seen, launch)
        if number >= _RUNS:
            evidence, findings = judge_numbers(seen)
    return judge_numbers(seen) if 0 < len(seen.controls) < _RUNS else (evidence, findings)


def _may_be_rounding(seen: LaunchComparison, findings: Mapping[str, Finding]) -> bool:
    """Whether rounding may explain the first errors: in float64 only those as small as noise."""
    errors = {one.name: one.error for finding in findings.values() for one in finding.wrong}
    torn = findings["replicas"].names if "replicas" in findings else ()
    first = next(
        iter(order_by_time([name for name in seen.tensors if name in errors or name in torn], seen.case.steps)), ""
    )
    return first in errors and (seen.case.dtype != "float64" or errors[first] < FLOAT64_CEILING)


def furthest_ratio(findings: Mapping[str, Finding]) -> float:
    """The largest error in units of its limit; 0 if none is beyond it."""
    return max((one.ratio for finding in findings.values() for one in finding.wrong), default=0.0)


def _with_reading(
    seen: LaunchComparison, evidence: Evidence, findings: dict[str, Finding]
) -> tuple[Evidence, dict[str, Finding]]:
    """Another reading of the losses, if only losses are wrong and it makes them right.

    Gradients belong to the objective of the default reading. If they are wrong too, the loss is wrong itself.
    """
    forward, gradients = findings.get("forward"), findings.get("parameter_gradients")
    if forward is None or forward.verdict != FAIL or gradients is None or gradients.verdict != PASS:
        return evidence, findings
    kept = seen.reading
    for reading in (*READINGS, *_by_targets(seen)):
        seen.reading = replace(reading, received=kept.received)
        other, found = judge_numbers(seen)
        if found["forward"].verdict == PASS:
            return other, found
    seen.reading = kept
    return evidence, findings


def _by_targets(seen: LaunchComparison) -> Iterator[Reading]:
    """The reading that averages losses by their numbers of targets, if these are known in every step."""
    counts: dict[tuple[int, int], list[int]] = {}
    for step in range(seen.case.steps if seen.steps else 0):
        losses = {(rank.rank, row.number) for rank, row in seen.second.rows("loss", step)}
        found = count_targets(compare_modules(seen, step), len(losses))
        if not found:
            return
        counts |= {(step, rank): own for rank, own in found.items()}
    yield Reading(calls="mean by targets", ranks="mean by targets", counts=counts)


def check_partners(seen: LaunchComparison, evidence: Evidence) -> Finding:
    """Whether there is something to compare, and what both launches lack."""
    parameters = [name.removeprefix("init/") for name in seen.tensors if name.startswith("init/")]
    alone = seen.without_partner
    common = len(parameters) > len(alone)
    strange = tuple(dict.fromkeys(name for _, name in seen.partners.unplaced))
    silent = sorted({*range(seen.second.world_size)} - {rank.rank for rank in seen.second.ranks})
    left = (*seen.first.left_out(), *seen.second.left_out())
    reasons = (f"left out by the budget: {name}" for name in left[:LISTED])
    notes = (
        *notes_about(not_returned=tuple(alone), not_in_truth=strange, undecided=seen.lost),
        *(Note(kind=NoteKind.UNCHECKED, reason=reason) for reason in reasons),
        *(Note(kind=NoteKind.UNCHECKED, reason=reason) for reason in _list_remarks(seen)[:LISTED]),
    )
    kinds = {"loss": "loss", "grad": "gradient", "param_after": "parameter after a step"}
    missing = [words for kind, words in kinds.items() if not any(kind_of(name) == kind for name in seen.tensors)]
    unseen = [
        name
        for name in seen.tensors
        if kind_of(name) in kinds and name not in evidence.run.returned and not _is_part_of(name, (*alone, *left))
    ]
    failed = [
        state_fact("recorder_failed", rank=rank.rank, launch=word, problem=problem.strip().splitlines()[-1])
        for word, launch in (("A", seen.first), ("B", seen.second))
        for rank in launch.ranks
        if (problem := str(rank.about.get("failed") or "").strip())
    ]
    problems = [
        *([state_fact("nothing_common")] if not common else []),
        *([state_fact("without_partner", names=alone)] if common and alone else []),
        *([state_fact("partner_of_none", names=strange)] if common and strange else []),
        *([state_fact("launch_without", launch="A", missing=missing)] if missing else []),
        *([state_fact("second_without", names=unseen)] if unseen else []),
        *([state_fact("silent_ranks", ranks=silent)] if silent else []),
        *([state_fact("no_full_tensor", names=seen.lost)] if seen.lost else []),
        *failed,
    ]
    facts = [state_fact("partners", placed=len(parameters) - len(alone), parameters=len(parameters))]
    if seen.second.world_size > 1:
        facts.append(state_fact("loss_reading", calls=seen.reading.calls, ranks=seen.reading.ranks))
    return Finding(verdict=UNKNOWN if problems else PASS, facts=(*facts, *problems), notes=notes)


def _is_part_of(name: str, parameters: Sequence[str]) -> bool:
    """Whether a name is that of a value of one of these parameters."""
    return any(name.endswith(f"/{parameter.rpartition('/')[2]}") for parameter in parameters)


def _list_remarks(seen: LaunchComparison) -> list[str]:
    """What stayed in a narrower dtype, or kept initial values of its own, against the user's request."""
    found: list[str] = []
    for rank in (*seen.first.ranks, *seen.second.ranks):
        narrow, own = (dict(rank.about.get(word) or {}) for word in ("narrow", "same_init"))
        found += [f"below float64: {name} ({dtype})" for name, dtype in narrow.items()]
        found += [f"without launch A's initial values: {name} ({why})" for name, why in own.items()]
    return list(dict.fromkeys(found))
