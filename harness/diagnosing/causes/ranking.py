"""The engine of hypotheses: all are tried, and the one that explains most of the wrong tensors is reported.

Of hypotheses that explain as many, that which explains the first wrong tensor comes first, then that which takes fewest
numbers from the tensors. A cause that leaves more of a wrong tensor than its check allows is none.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import kind_of
from harness.checking.measures.many_tensors import kind_rms
from harness.checking.measures.tolerance import own_share
from harness.checking.measuring import compared
from harness.diagnosing.causes.cause import Cause
from harness.diagnosing.causes.hypothesis import Failure, Hypothesis
from harness.diagnosing.causes.proofs import Explained
from harness.outcome.merging import Merged


def best(failure: Failure, hypotheses: Iterable[Hypothesis]) -> list[Cause]:
    """The causes of the hypothesis that explains most; those of others of its rank are alternatives."""
    kind = failure.kind
    tried = [one for one in hypotheses if one.kinds is None or kind in one.kinds]
    found = [(one.rank(failure), within_limits(failure.evidence, one.causes(failure))) for one in tried]
    top = max((rank for rank, causes in found if causes), default=None)
    alternatives = list[Cause]()
    for rank, causes in found:
        known = {cause.id for cause in alternatives}
        alternatives += [cause for cause in causes if rank == top and cause.id not in known]
    return alternatives


def within_limits(evidence: Evidence, causes: Iterable[Cause]) -> list[Cause]:
    """Causes that leave no more of a wrong tensor than its check allows: the last word before they are reported.

    The first merged tensor that a cause speaks of decides: what comes after it was computed from wrong values.
    """
    names = {id(tensor): name for name, tensor in evidence.merged.tensors.items()}
    return [cause for cause in causes if _allowed(evidence, names, cause)]


def _allowed(evidence: Evidence, names: Mapping[int, str], cause: Cause) -> bool:
    """Whether the tensor would pass if the residual of the prediction were its error.

    True for causes of one rank's part, of a step's movement, or of where the truth is 0 and has no size to measure by.
    A prediction that states how much it may leave (`Explained.left`) is one of a rule with a limit of its own.
    """
    spoken = (p for p in cause.proof if isinstance(p, Explained) and p.left is None and id(p.value) in names)
    proof = next(spoken, None)
    if proof is None or not bool(proof.truth.any()):
        return True
    name, tensors = names[id(proof.value)], evidence.merged.tensors
    truth, guess = evidence.truth[name].double(), proof.guess.double()
    left = proof.value.double() - guess
    left = left.where(left.abs() > own_share(evidence.dtype_of(name)) * guess.abs(), 0.0)
    corrected = truth + left / max(1.0, float(guess.norm() / truth.norm()))
    merged = Merged(tensors={**tensors, name: corrected.to(proof.value.dtype)}, flaws=evidence.merged.flaws)
    alike = {other: tensor for other, tensor in evidence.truth.items() if kind_of(other) == kind_of(name)}
    return compared(replace(evidence, merged=merged), name, kind_rms(alike).get(kind_of(name), 0.0)).right
