"""Causes by the numbers of the first wrong tensors. A bug has one first place, and what comes later follows from it."""

from collections.abc import Sequence
from dataclasses import replace

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.diagnosing.causes.cause import Cause
from shardproof.harness.diagnosing.causes.hypothesis import Failure, Hypothesis
from shardproof.harness.diagnosing.causes.ranking import best
from shardproof.harness.diagnosing.hypotheses import displaced, factors, norms, patterns, replicas, sum_terms, sums
from shardproof.harness.diagnosing.hypotheses.optimizer import steps, updates

_FILES = (replicas, sums, factors, norms, patterns, sum_terms, displaced, steps, updates)
HYPOTHESES: tuple[Hypothesis, ...] = tuple(one for file in _FILES for one in file.HYPOTHESES)


def by_numbers(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """Causes by the first of these wrong tensors.

    Initial values give no `other_shard`: shards that are drawn alike look so too.
    """
    failure = Failure(evidence=evidence, wrong=wrong, numbers=wrong)
    if failure.kind != "init":
        return best(failure, HYPOTHESES)
    causes = best(failure, HYPOTHESES, left_out=frozenset({"other_shard"}))
    return [replace(cause, words=f"initial values, before any step: {cause.words}") for cause in causes]
