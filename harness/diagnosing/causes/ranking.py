"""Tries all hypotheses of a kind, and reports the one whose cause explains most.

The cause that explains the first wrong tensor comes first, then the one that explains most wrong tensors, then the one
that fits fewest numbers to them. A cause that leaves more of a wrong tensor than its check allows is dropped.
"""

from collections.abc import Iterable

from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.measures.tolerance import own_share
from shardproof.harness.checking.measuring import compare_with_truth, sizes_of
from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.causes.cause import Cause
from shardproof.harness.diagnosing.causes.hypothesis import Failure, Hypothesis
from shardproof.harness.diagnosing.causes.proofs import Explained


def select_best(
    failure: Failure, hypotheses: Iterable[Hypothesis], left_out: frozenset[str] = frozenset()
) -> list[Cause]:
    """The causes of the hypothesis that explains most. Causes of equal rank are alternatives, and all are returned.

    Causes whose ids are `left_out` do not count.
    """
    tried = [one.causes(failure) for one in hypotheses if failure.kind in one.kinds]
    counted = [[cause for cause in causes if cause.id not in left_out] for causes in tried]
    found = [causes for causes in (within_limits(failure.evidence, causes) for causes in counted) if causes]
    top = max((_rank_of_cause(failure, causes[0]) for causes in found), default=None)
    alternatives = [cause for causes in found if _rank_of_cause(failure, causes[0]) == top for cause in causes]
    return [*{(cause.id, cause.words): cause for cause in alternatives}.values()]


def _rank_of_cause(failure: Failure, cause: Cause) -> tuple[bool, int, int]:
    explained = cause.explains & set(failure.numbers)
    return failure.first in explained, len(explained), -cause.fitted


def within_limits(evidence: Evidence, causes: Iterable[Cause]) -> list[Cause]:
    """The causes whose prediction leaves no more of a wrong tensor than its check allows.

    The first merged tensor of a cause decides, since later ones were computed from wrong values.
    """
    return [cause for cause in causes if _is_residual_allowed(evidence, cause)]


def _is_residual_allowed(evidence: Evidence, cause: Cause) -> bool:
    """Whether the tensor would pass if the residual of the prediction were its error.

    True for causes that speak of one rank's part or of a step's movement, and for a truth of 0, which has no size to
    compare with. Also true for predictions with a limit of their own (`Explained.left`).
    """
    tensors = evidence.run.tensors
    whole = (proof for proof in cause.proof if isinstance(proof, Explained) and proof.left is None)
    spoken = ((name, proof) for proof in whole for name in proof.names if name in tensors)
    name, proof = next(((n, p) for n, p in spoken if p.value.shape == tensors[n].shape), ("", None))
    if proof is None or not bool(proof.truth.any()):
        return True
    truth, guess = evidence.truth.tensors[name].double(), proof.guess.double()
    left = proof.value.double() - guess
    left = left.where(left.abs() > own_share(evidence.run.dtype_of(name)) * guess.abs(), 0.0)
    corrected = truth + left / max(1.0, float(guess.norm() / truth.norm()))
    run = evidence.run.with_tensors({**tensors, name: corrected.to(proof.value.dtype)})
    alike = [other for other in evidence.truth.tensors if kind_of(other) == kind_of(name)]
    size = sizes_of(run, evidence.truth, alike).get(kind_of(name), 0.0)
    return compare_with_truth(run, evidence.truth, name, size).right
