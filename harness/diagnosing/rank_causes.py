"""Likely causes of what went wrong in one case; none where the evidence does not single one out.

A bug has one first place, and what comes later follows from it. Causes are looked for tier after tier (`TIERS`); those
of the first tier that has some are reported. In the tier of numbers, hypotheses compete (`by_numbers`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.causes.cause import Cause, report_cause
from shardproof.harness.diagnosing.causes.hypothesis import Failure, Hypothesis
from shardproof.harness.diagnosing.causes.ranking import select_best, within_limits
from shardproof.harness.diagnosing.hypotheses import (
    calls,
    displaced,
    factors,
    masks,
    norms,
    patterns,
    replicas,
    stated,
    sums,
    updates,
)
from shardproof.harness.verdicts.facts import state_fact

_FILES = (replicas, sums, factors, norms, patterns, displaced, updates)
HYPOTHESES: tuple[Hypothesis, ...] = tuple(one for file in _FILES for one in file.HYPOTHESES)


def by_numbers(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """Causes by the numbers of the first of these wrong tensors."""
    failure = Failure(evidence=evidence, wrong=wrong, numbers=wrong)
    causes = select_best(failure, HYPOTHESES)
    if failure.kind != "init":
        return causes
    return [replace(cause, fact=state_fact("at_start", cause=cause.fact)) for cause in causes]


def _in_first_module(failure: Failure) -> list[Cause]:
    """The causes that the numbers of the first wrong module show under any layout that shows one."""
    evidence = failure.evidence
    if (located := evidence.search.located) is None:
        return []
    if axis := located.summed:
        return [report_cause("not_summed", state_fact("partial_sums", over=axis), located)]
    name = f"{'act' if located.phase == 'forward' else 'act_grad'}/{located.module}"
    for value, truth in located.shown:
        run = evidence.run.with_tensors({**evidence.run.tensors, name: value})
        true = replace(evidence.truth, tensors={**evidence.truth.tensors, name: truth})
        seen = replace(evidence, run=run, truth=true).with_found(shares={}, others=())
        if causes := by_numbers(seen, [name]):  # cases of other sizes are not searched for their first wrong module
            return [_as_undecided(cause) if cause.follows else cause for cause in causes]
    return []


def _as_undecided(cause: Cause) -> Cause:
    """The cause of a factor that is a size of the case, marked as unsure: no case of another size is looked at."""
    return replace(cause, fact=replace(cause.fact, values={**cause.fact.values, "unsure": True}), follows=())


def _by_numbers(failure: Failure) -> list[Cause]:
    """The causes that the numbers of the first wrong tensors show. Later activations have no case of another size."""
    causes = by_numbers(failure.evidence, failure.numbers) if failure.numbers else []
    is_later = failure.evidence.search.observed != (0, 0)
    return [_as_undecided(cause) if is_later and cause.follows else cause for cause in causes]


TIERS: tuple[Callable[[Failure], list[Cause]], ...] = (
    # what a check states by itself: a group of other ranks, a layout, a handle that was never waited for
    calls.over_other_ranks,
    calls.behind_a_check,
    stated.of_checks,
    # rounding that only several ranks do, masks of dropout, samples, numbers and steps that only one side has
    calls.in_lower_precision,
    stated.rounded_on_ranks,
    masks.from_masks,
    stated.guess_wrong_beginnings,
    stated.guess_drawn_numbers,
    stated.taken_where_skipped,
    # the first wrong module that was found without a declared layout
    _in_first_module,
    # parameters without a gradient, where the first wrong number is made of gradients
    calls.unused_before_sums,
    # the first call that parts from the expectation, when it comes before the first wrong tensor
    calls.before_the_numbers,
    # what the numbers of the first wrong tensors look like: counts, factors, places
    _by_numbers,
    # a differing call that comes later but may cause the first wrong number: a loss is summed in grad_sync
    calls.guess_differing_call,
    calls.guess_unused_parameters,
    # what is usually behind a check that nothing else explains
    stated.guess_usual_causes,
)
"""Where causes are looked for, by how directly the evidence shows them."""


def likely_causes(failure: Failure) -> tuple[Cause, ...]:
    """The causes of a case's failures; several are alternatives that fit equally well."""
    found = (within_limits(failure.evidence, causes_of(failure)) for causes_of in TIERS)
    return tuple(next((causes for causes in found if causes), ()))
