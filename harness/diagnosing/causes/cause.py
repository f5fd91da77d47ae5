"""Likely causes: the stable ids that tables and tests rely on, each with what it states of one failure.

The id says which kind of mistake numbers or calls show, for any subject; the fact says it for one tensor, axis and
group. A cause carries its predictions (`causes.proofs`), and cannot be made if the numbers contradict them. Hypotheses
make causes by `claim_cause`. Sources: the mechanisms of the bugs that real systems had.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardproof.harness.diagnosing.causes.proofs import Proof, Seen
from shardproof.harness.verdicts.facts import Fact

CAUSES: Mapping[str, str] = {
    # calls beside the expectation, and beside their waits
    "missing_call": "an expected call is left out",
    "extra_call": "a call too many",
    "wrong_group": "the right call over other ranks",
    "wrong_call": "a call with another operator, reduction, size or dtype, or in another phase or module",
    "not_waited": "an asynchronous call that nothing waits for",
    # sums and means
    "not_summed": "ranks whose values add up to the truth: a sum that was not taken, or not of all of them",
    "not_averaged": "ranks whose mean is the truth",
    "unequal_shares": "micro-batches or data ranks that do not count once each",
    "size_factor": "the truth times or divided by a size of the case, or its square",
    "constant_factor": "the truth times a number that belongs to no size of the case",
    "norm_members": "a norm of one rank's parts alone, or that leaves something out or counts it too often",
    # a whole tensor
    "nan": "not a number or infinite",
    "zero": "zero throughout",
    "stale": "the truth of another step",
    "permuted": "the right numbers in another order",
    "other_part": "another rank's part of the tensor, or another tensor's",
    "shorter_dtype": "the truth, rounded to a shorter dtype on its way",
    "replicas_drift": "replicas that all are right, but not bit for bit the same",
    # updates
    "never_updated": "parameters as they were before a step, or before the first one",
    "not_zeroed": "an update that holds the first step's gradient once more",
    "optimizer_state": "a moment or an update that is a sum of the right one and another tensor of the optimizer",
    # what ranks and truth begin with
    "other_samples": "other samples of a step than the truth reads, or others on ranks of one tp group",
    "other_start": "initial values of another rank, or of another model",
    "other_numbers": "numbers or masks that are drawn otherwise than in the truth, on other ranks, or in forward",
    # what a check or the end of a run says by itself
    "layout": "parts of ranks that are not those of the full tensor",
    "stated": "what the check states",
    "raised": "the subject raised, or ended the process of a rank",
    "desynchronised": "ranks issued different calls, or no further one in time",
    "machine": "the machine failed or the time was up",
    "witness": "witnesses of the calls that do not agree",
}
"""Id -> its meaning, for any tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A likely cause of a failure. Raises ValueError for a cause whose `proof` fails, or that has none.

    `follows`: sizes of the case that equal its factor. A case of another size shows whether the factor comes from it.
    """

    id: str
    fact: Fact
    proof: tuple[Proof, ...] = field(repr=False, compare=False)
    follows: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The fact in words."""
        return self.fact.text

    @property
    def explains(self) -> frozenset[str]:
        """The tensors that its proofs explain."""
        return frozenset(name for proof in self.proof for name in proof.names)

    @property
    def fitted(self) -> int:
        """How many numbers its proofs take from the wrong tensors."""
        return sum(proof.fitted for proof in self.proof)

    def __post_init__(self) -> None:
        if not self.proof or not all(proof.holds for proof in self.proof):
            raise ValueError(f"cause id={self.id}: {self.words!r} must hold of the numbers that it speaks of")


def claim_cause(id: str, fact: Fact, *proof: Proof, follows: tuple[str, ...] = ()) -> list[Cause]:
    """The cause of this id if its predictions hold; empty if the numbers contradict it."""
    _check_id(id)
    if not proof or not all(one.holds for one in proof):
        return []
    return [Cause(id=id, fact=fact, proof=proof, follows=follows)]


def report_cause(id: str, fact: Fact, what: object) -> Cause:
    """The cause of this id that is shown without numbers, namely by a call, a flaw, a finding or an exception."""
    _check_id(id)
    return Cause(id=id, fact=fact, proof=(Seen(what=what),))


def _check_id(id: str) -> None:
    """Raise ValueError for an id that is in no table."""
    if id not in CAUSES:
        raise ValueError(f"cause id={id}: is not a known cause; legal: {' '.join(CAUSES)}")
