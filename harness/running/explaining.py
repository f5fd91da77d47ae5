"""Explains a failed case: further runs, then a diagnosis and six lines for every failed check.

Cases of another size show whether a wrong factor is a size of the case: a factor of 1/2 with tp=2 may be a mean over tp
or a constant, and a case with tp=3 shows which. Each size in question is changed by itself.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from shardproof.harness.checking.checks import run_checks
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import is_state, kind_of, step_of
from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.causes.places import update_in_doubt
from shardproof.harness.diagnosing.diagnosis import (
    Diagnosis,
    Explanation,
    diagnose,
    diagnose_ended_case,
    explanation_of,
    faults_of,
    wrong_names,
)
from shardproof.harness.diagnosing.explained import failed_check, failed_run, repeat_command
from shardproof.harness.diagnosing.tracebacks import whole_traceback
from shardproof.harness.errors import ShardproofError, error_text
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.protocols import CaseLike, without_saving
from shardproof.harness.running.locating.beginnings import with_beginnings
from shardproof.harness.running.locating.drawn import with_drawn_numbers
from shardproof.harness.running.locating.later_activations import with_later_activations
from shardproof.harness.running.locating.wrong_module import with_wrong_module
from shardproof.harness.running.trials.runs import judge_case, record_case, repeat_plainly
from shardproof.harness.running.trials.trial import EXPLAINED_IN, Trial
from shardproof.harness.subject import refusal
from shardproof.harness.verdicts.facts import FailedCheck, Where
from shardproof.harness.verdicts.verdict import FAIL

MOST_RANKS = 8
"""The most ranks of a case of another size."""
_SHARED = frozenset({"grad", "param", "param_after", "exp_avg_after", "grad_norm", "tokens", "act", "loss"})
"""Kinds of wrong tensors that the gradients of micro-batches, or values before the first step, may explain."""
_WORDS = {"all ranks": "dp", "wdp": "dp", "tokens of the step": "micro"}
"""A size that no word of a case sets -> the word that changes it. `wdp` are the ranks that share a shard of weights."""


def with_explanations(
    trial: Trial, evidence: Evidence, findings: Mapping[str, Finding]
) -> tuple[Evidence, Mapping[str, Finding]]:
    """The evidence with further runs for these findings, and every finding that explains the failure.

    The run is repeated if that was not done yet, since the failure may be a difference between two runs alone.
    """
    trial.budget.begin(EXPLAINED_IN * trial.timeout_s)
    evidence = replace(evidence, repeats=evidence.repeats or repeat_plainly(trial, evidence.run))
    with trial.time_part("checks"):
        # activations are now compared too; findings that used control runs stay
        context: Mapping[str, Finding] = {**run_checks(evidence), **findings}
    wrong = {name for finding in context.values() if finding.verdict == FAIL for name in finding.names}
    evidence = with_beginnings(trial, _with_shares(trial, evidence, wrong), wrong)
    evidence = with_drawn_numbers(trial, evidence, wrong)
    evidence = with_wrong_module(trial, evidence, wrong)
    first = wrong_names(evidence.run, evidence.truth, faults_of(evidence.run, context)[0])
    evidence = evidence.with_found(earlier=_ended_earlier(trial, evidence, first))
    evidence, context = with_later_activations(trial, evidence, context, first)
    return _with_other_sizes(trial, evidence, context), context


def _ended_earlier(
    trial: Trial, evidence: Evidence, wrong: Sequence[str]
) -> tuple[Evidence, Mapping[str, Finding]] | None:
    """The evidence and findings of the case stopped after a step whose update may be wrong; None if no update may be.

    A subject that returns parameters only after the last step shows such an update in no other way.
    """
    if not wrong or evidence.search.located is not None:
        return None
    steps = update_in_doubt(evidence.run, evidence.truth, wrong[0], wrong, tried=True) + 1
    if not steps or not trial.has_time("elsewhere"):
        return None
    try:
        case = trial.case.but(steps=steps, **without_saving(trial.case))
        if refusal(case, trial.subject):
            return None
        other = trial.of_case(case)
        with trial.time_part("elsewhere"):
            seen, findings = judge_case(other, record_case(other))
            failed = any(finding.verdict == FAIL for finding in findings.values())
            return with_explanations(other, seen, findings) if failed else (seen, findings)
    except Exception:  # a case that cannot be run says nothing about the update
        return None


def _with_other_sizes(trial: Trial, evidence: Evidence, findings: Mapping[str, Finding]) -> Evidence:
    """The evidence with that of one further case for each size (tp, dp, micro) that equals a wrong factor."""
    try:
        shared = explanation_of(evidence, findings)
    except Exception:  # `diagnose_findings` meets this error again and records it
        return evidence
    sizes = (size for cause in shared.causes for size in cause.follows)
    first, steps, others = shared.first.name, evidence.run.case.steps, []
    # states after a later step differ in every case of another size
    later = steps > 1 if kind_of(first) == "param" else is_state(first) and step_of(first) > 0
    later = later or evidence.search.observed != (0, 0)  # and so do later activations
    for word in () if later else dict.fromkeys(_WORDS.get(size, size) for size in sizes):
        cases = _of_other_size(evidence.run.case, word, steps=max(step_of(first), 0) + 1)
        others += list(islice((seen for case in cases if (seen := _elsewhere(trial, case))), 1))
    return evidence.with_found(others=tuple(others))


def diagnose_findings(
    evidence: Evidence, findings: Mapping[str, Finding], context: Mapping[str, Finding], subject: str, options: str
) -> tuple[dict[str, Diagnosis], dict[str, FailedCheck]]:
    """The diagnoses of the failed checks and their records. A failure that cannot be explained remains a failure."""
    case, diagnoses = evidence.run.case, dict[str, Diagnosis]()
    failures: dict[str, FailedCheck] = {}
    every = {**context, **findings}
    faults: list[Mapping[str, Finding]] = []
    shared: dict[int, Explanation] = {}
    for check, finding in findings.items():
        if finding.verdict == FAIL:
            try:
                faults = faults or faults_of(evidence.run, every)
                place = next(place for place, fault in enumerate(faults) if check in fault)
                shared[place] = shared.get(place) or explanation_of(evidence, faults[place])
                diagnosis = diagnose(evidence, faults[place], check, shared[place])
            except Exception as problem:
                failures[check] = FailedCheck(
                    where=Where(mode=case.mode, world_size=case.world_size),
                    repeat=repeat_command(case, subject, options),
                    problem=f"{type(problem).__name__}: {problem}",
                )
            else:
                failures[check] = failed_check(diagnosis, finding, evidence.run, subject, options)
                diagnoses[check] = diagnosis
    return diagnoses, failures


def explain_end(
    case: CaseLike, subject: str, error: ShardproofError, options: str
) -> tuple[FailedCheck, Diagnosis, str]:
    """The record of a case without an outcome, its diagnosis, and the whole traceback."""
    return failed_run(case, subject, error, options), diagnose_ended_case(error), whole_traceback(error)


def _with_shares(trial: Trial, evidence: Evidence, wrong: Collection[str]) -> Evidence:
    """The evidence with the dense model's gradients by micro-batch."""
    model = trial.reference.model
    if model is None or not {kind_of(name) for name in wrong} & _SHARED or not trial.has_time("explained"):
        return evidence
    try:
        return evidence.with_found(shares=trial.dense(model.shares, part="explained"))
    except Exception as problem:  # the failure stands with less of an explanation, which is noted
        trial.problems["explanation"] = f"the dense model raised while a cause was looked for: {error_text(problem)}"
        return evidence


def _elsewhere(trial: Trial, case: CaseLike) -> Evidence | None:
    """The evidence of the same subject in another case; None if the case is refused or cannot be run."""
    other = trial.of_case(case)
    if not trial.has_time("elsewhere"):
        return None
    try:
        if refusal(case, trial.subject):
            return None
        with trial.time_part("elsewhere"):
            seen = record_case(other)
            return seen.with_found(shares=other.dense(model.shares) if (model := trial.reference.model) else {})
    except Exception:  # a case that cannot be run says nothing about the factor
        return None


def _of_other_size(case: CaseLike, word: str, steps: int) -> Iterator[CaseLike]:
    """Legal cases of this many steps, on few ranks, in which the word is larger by one, doubled, or 1."""
    now = case.micro if word == "micro" else split_axes(case).get(word, 1)
    for value in dict.fromkeys((now + 1, 2 * now, 1)):
        try:
            other = case.but(**{word: value, "steps": steps, **without_saving(case)})
        except (ValueError, TypeError):  # ValueError: no legal case; TypeError: an axis that no word of the case sets
            continue
        if value != now and other.world_size <= MOST_RANKS:
            yield other
