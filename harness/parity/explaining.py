"""Explains failed checks of two launches: samples and initial values first, then the first wrong module and number.

The names of gradients and outputs are those of the first step. If that step is right, the first wrong step is judged
again, as the first one of launches that begin there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of, step_of
from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.causes.proofs import is_explained_by
from shardproof.harness.diagnosing.diagnosis import Diagnosis
from shardproof.harness.mesh_axes import PIPELINE, place_of_rank
from shardproof.harness.parity import samples
from shardproof.harness.parity.comparison import (
    LaunchComparison,
    compare_modules,
    comparison_from,
    judge_numbers,
    wrong_starts,
)
from shardproof.harness.parity.modules import find_own_counts, find_wrong_module
from shardproof.harness.parity.quantities import full_tensors, with_flat
from shardproof.harness.running.explaining import diagnose_findings
from shardproof.harness.running.result import CaseResult, verdict_on
from shardproof.harness.verdicts.facts import Fact, FailedCheck, First, LikelyCause, state_fact, state_text
from shardproof.harness.verdicts.verdict import FAIL, PASS

_DENSE, _FIRST = "the dense model", "launch A"


def explain_findings(
    seen: LaunchComparison, evidence: Evidence, findings: dict[str, Finding], repeat: str
) -> CaseResult:
    """The verdicts, with first place and causes of failed checks; `repeat` is the command that compares again."""
    text, failures = str(seen.case), dict[str, FailedCheck]()
    diagnoses: Mapping[str, Diagnosis] = {}
    if any(finding.verdict == FAIL for finding in findings.values()):
        evidence = _with_search(seen, evidence, findings)
        diagnoses, failures = diagnose_findings(evidence, findings, {}, seen.case.name, "")
        begun = findings[samples.CHECK]
        counted = _own_counts(seen, findings)
        misplaced = None if begun.verdict == FAIL else _begun_twice(seen)
        later = None if begun.verdict == FAIL else _in_its_own_step(seen, findings)
        for check, failure in failures.items():
            first, causes = (later.first, later.causes) if later else (failure.first, failure.causes)
            if misplaced is not None:
                first, causes = misplaced
            elif begun.verdict == FAIL:
                first = First(phase="data", step=step_of(begun.names[0]), name=begun.names[0])
            told = _own_draws(seen, first) or counted or causes or _other_buffers(seen, first)
            told = tuple(replace(cause, fact=_in_our_words(cause.fact)) for cause in told)
            failures[check] = replace(failure, repeat=repeat or failure.repeat, causes=told, first=first)
    verdicts = tuple(
        verdict_on(replace(finding, facts=tuple(map(_in_our_words, finding.facts))), text, check, failures.get(check))
        for check, finding in findings.items()
    )
    return CaseResult(case=seen.case, text=text, verdicts=verdicts, evidence=evidence, diagnoses=diagnoses)


def _in_our_words(fact: Fact) -> Fact:
    """The fact of a check or a cause, with the first launch in place of a dense model."""
    return state_text(fact.text.replace(_DENSE, _FIRST)) if _DENSE in fact.text else fact


def _wrong_names(findings: Mapping[str, Finding]) -> set[str]:
    return {name for finding in findings.values() if finding.verdict == FAIL for name in finding.names}


def _in_its_own_step(seen: LaunchComparison, findings: Mapping[str, Finding]) -> FailedCheck | None:
    """The failure of the first wrong step, as if the launches had begun there; None if that is the first step."""
    wrong = _wrong_names(findings)
    step = min((max(step_of(name), 0) for name in seen.tensors if name in wrong), default=0)
    if not step or wrong_starts(seen, findings):
        return None
    there = comparison_from(seen, step)
    evidence, found = judge_numbers(there)
    if not any(finding.verdict == FAIL for finding in found.values()):
        return None
    _, failures = diagnose_findings(_with_search(there, evidence, found), found, {}, seen.case.name, "")
    failure = next(iter(failures.values()))
    causes = failure.causes or _stale_gradients(seen, evidence, found, step)
    return replace(failure, first=replace(failure.first, step=failure.first.step + step), causes=causes)


def _stale_gradients(
    seen: LaunchComparison, evidence: Evidence, found: Mapping[str, Finding], step: int
) -> tuple[LikelyCause, ...]:
    """The cause of wrong gradients that all contain those of the step before."""
    wrong = [name for name in evidence.truth.tensors if kind_of(name) == "grad" and name in _wrong_names(found)]
    values = evidence.run.tensors
    for received in (True, False) if wrong and all(name in values for name in wrong) else ():
        before, _ = full_tensors(seen.first.from_step(step - 1), replace(seen.reading, received=received))
        before = with_flat(before, seen.flat)
        true = evidence.truth.tensors
        known = [name for name in wrong if name in before]
        if known == wrong and all(is_explained_by(true[n] + before[n], values[n], true[n]) for n in wrong):
            return (LikelyCause(id="not_zeroed", fact=state_fact("gradients_kept", step=step - 1)),)
    return ()


def _begun_twice(seen: LaunchComparison) -> tuple[First, tuple[LikelyCause, ...]] | None:
    """The place of a parameter without a partner, because another one of its rank has its place.

    A parameter that the first launch ties to others may have several places.
    """
    alone, tied = seen.without_partner, {*seen.first.aliases.values()}
    holders: dict[str, dict[tuple[int, str], int]] = {}
    for (rank, name), placement in seen.partners.placements.items():
        stage = place_of_rank(seen.axes, PIPELINE, rank)
        for one in placement.names:
            holders.setdefault(one, {}).setdefault((stage, name), rank)
    twice = [(one, own) for one, own in holders.items() if len(own) > 1 and one not in tied]
    if not alone or not twice:
        return None
    name, own = twice[0]
    (_, held), rank = [*own.items()][-1]
    fact = state_fact("begun_twice", names=alone, other=name, rank=rank, held=held)
    first = First(phase="forward", step=0, region=alone[0].rpartition(".")[0], name=f"init/{alone[0]}")
    return first, (LikelyCause(id="other_start", fact=fact),)


def _own_draws(seen: LaunchComparison, first: First) -> list[LikelyCause]:
    """The cause of a first wrong module that draws random numbers in launch B, if launch A draws none."""
    if any(rank.about.get("drawn") for rank in seen.first.ranks):
        return []
    drawn = {rank.rank: [*map(str, rank.about.get("drawn", ()))] for rank in seen.second.ranks}
    ranks = [rank for rank, own in drawn.items() if first.region in {seen.partners.path(rank, name) for name in own}]
    names = list(dict.fromkeys(name for rank in ranks for name in drawn[rank]))
    fact = state_fact("drawn_in_b_alone", names=names, ranks=ranks)
    return [LikelyCause(id="other_numbers", fact=fact)] if ranks else []


def _other_buffers(seen: LaunchComparison, first: First) -> list[LikelyCause]:
    """The causes of a wrong first forward for which a buffer of the same name and shape has other values."""
    if first.phase not in ("forward", "loss") or first.step:
        return []
    true = {row.name: rank.tensor(row) for rank, row in seen.first.rows("buffer") if row.global_shape is None}
    ranks: dict[str, list[int]] = {}
    for rank, row in seen.second.rows("buffer"):
        module, _, leaf = row.name.rpartition(".")
        name = f"{path}.{leaf}" if (path := seen.partners.path(rank.rank, module)) else leaf
        if name in true and true[name].shape == row.shape and not _is_alike(true[name], rank.tensor(row)):
            ranks.setdefault(name, []).append(rank.rank)
    facts = (state_fact("other_buffers", name=name, ranks=own) for name, own in ranks.items())
    return [LikelyCause(id="other_start", fact=fact) for fact in facts]


def _is_alike(true: Tensor, other: Tensor) -> bool:
    """Whether two buffers differ at most by the rounding of the coarser dtype."""
    eps = max(torch.finfo(one.dtype).eps for one in (true, other))
    return torch.allclose(true.double(), other.double(), rtol=eps, atol=0.0, equal_nan=True)


def _own_counts(seen: LaunchComparison, findings: Mapping[str, Finding]) -> tuple[LikelyCause, ...]:
    """The cause of a wrong first loss that is a mean of means over other numbers of targets."""
    if (
        findings[samples.CHECK].verdict != PASS
        or "loss/0" not in _wrong_names(findings)
        or wrong_starts(seen, findings)
    ):
        return ()
    fact = find_own_counts(compare_modules(seen))
    return (LikelyCause(id="unequal_shares", fact=fact),) if fact else ()


def _with_search(seen: LaunchComparison, evidence: Evidence, findings: Mapping[str, Finding]) -> Evidence:
    """The evidence with what comes before the first wrong number: samples, initial values, the first wrong module."""
    if samples.CHECK in findings and findings[samples.CHECK].verdict == FAIL:
        step, how = next((step, how) for step in seen.steps if (how := samples.describe_difference(step)))
        return evidence.with_found(other_samples=samples.describe_own_order(step) or how)
    if begun := wrong_starts(seen, findings):
        return evidence.with_found(other_start=_start_of(seen, begun))
    if not seen.steps:
        return evidence
    wrong = _wrong_names(findings)
    backward = any(kind_of(name) == "grad" for name in wrong)
    return evidence.with_found(
        located=find_wrong_module(compare_modules(seen), forward="loss/0" in wrong, backward=backward)
    )


def _start_of(seen: LaunchComparison, names: Sequence[str]) -> Fact:
    """The initial values that differ, and the ranks on which they do, if not on all."""
    placements = seen.partners.placements.items()
    apart = sorted({rank for (rank, _), one in placements if not one.known and {*one.names} & {*names}})
    right = {rank for (rank, _), _ in placements} - {*apart}
    counted = sum(name.startswith("init/") for name in seen.tensors)
    return state_fact("other_begin", names=names, parameters=counted, ranks=apart if right else [])
