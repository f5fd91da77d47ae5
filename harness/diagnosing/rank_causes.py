"""Likely causes of what went wrong in one case; none where the evidence does not single one out.

A bug has one first place, and what comes later follows from it. Hypotheses stand in tiers (`TIERS`), by how directly
the evidence shows them. The causes of the first tier that has some are reported, ranked by what they explain
(`causes.ranking`).
"""

from dataclasses import replace

from harness.diagnosing.by_numbers import by_numbers
from harness.diagnosing.causes.cause import Cause, reported
from harness.diagnosing.causes.hypothesis import Failure, Hypothesis
from harness.diagnosing.causes.ranking import best
from harness.diagnosing.hypotheses import calls, losses, masks, stated, what_ifs
from harness.diagnosing.hypotheses.factors import UNDECIDED
from harness.outcome.merging import Merged


def _in_first_module(failure: Failure) -> list[Cause]:
    """The causes that the numbers of the first wrong module show, under any layout that shows one."""
    evidence = failure.evidence
    if (located := evidence.located) is None:
        return []
    if axis := located.summed:
        words = f"the ranks' values add up to the truth over {axis}: each holds one partial sum, never reduced"
        return [reported("not_summed", words, located)]
    name = f"{'act' if located.phase == 'forward' else 'act_grad'}/{located.module}"
    for value, truth in located.shown:
        merged = Merged(tensors={**evidence.merged.tensors, name: value}, flaws=evidence.merged.flaws)
        seen = replace(evidence, truth={**evidence.truth, name: truth}, merged=merged, shares={}, others=())
        if causes := by_numbers(seen, [name]):  # cases of other sizes are not searched for their first wrong module
            return [replace(c, words=f"{c.words}{UNDECIDED}", follows=()) if c.follows else c for c in causes]
    return []


_IN_FIRST_MODULE = Hypothesis(
    predicts="what a hypothesis on numbers predicts of the first wrong module's", causes=_in_first_module
)
_BY_NUMBERS = Hypothesis(
    predicts="what the best hypothesis on the first wrong tensors predicts",
    causes=lambda failure: by_numbers(failure.evidence, failure.numbers) if failure.numbers else [],
)
TIERS: tuple[tuple[Hypothesis, ...], ...] = (
    # what a check states by itself: a group of other ranks, a layout, a handle that was never waited for
    (calls.OVER_OTHER_RANKS,),
    (calls.BEHIND_A_CHECK,),
    (stated.CHECKS,),
    # rounding that several ranks alone do, masks of dropout, numbers drawn on one side alone
    (calls.SENDS_LOWER,),
    (stated.ROUNDED_ON_RANKS,),
    (masks.MASKS,),
    (stated.DRAWN,),
    # the dense model under another rule; a loss over too many classes, or over each rank's part of them
    what_ifs.HYPOTHESES,
    losses.HYPOTHESES,
    # the first wrong module that was found without a declared layout
    (_IN_FIRST_MODULE,),
    # parameters without a gradient, where the first wrong number is made of gradients
    (calls.UNUSED_FIRST,),
    # the first call that parts from the expectation, when it comes before the first wrong tensor
    (calls.BEFORE_THE_NUMBERS,),
    # what the numbers of the first wrong tensors look like: counts, factors, places
    (_BY_NUMBERS,),
    # a call that parts later, where it may be behind the first wrong number: a loss is summed in grad_sync
    (calls.DIFFERS,),
    (calls.UNUSED,),
    # what is usually behind a check that nothing else explains
    (stated.USUAL,),
)
"""Hypotheses that compete with each other, in the order in which their causes are looked for."""


def likely(failure: Failure) -> tuple[Cause, ...]:
    """The causes of a case's failures; several are alternatives that fit equally well."""
    found = (best(failure, tier) for tier in TIERS)
    return tuple(next((causes for causes in found if causes), ()))
