"""Right numbers in wrong places: patterns of a whole tensor, and another rank's part.

Each rank's own blocks are held against the truth at the places where other ranks' blocks begin. So parts of unequal
size, and a last one that is shorter, are looked at too.
"""

from collections.abc import Sequence

from torch import Tensor

from shardproof.harness.checking.measures.kinds import is_state, kind_of
from shardproof.harness.checking.records import RecordedRun, Truth
from shardproof.harness.diagnosing.causes.cause import Cause, claim_cause
from shardproof.harness.diagnosing.causes.hypothesis import LATER, STATE, VALUES, Failure, Hypothesis, of_values
from shardproof.harness.diagnosing.causes.places import blocks_of, is_comparable
from shardproof.harness.diagnosing.causes.proofs import Explained, share_left
from shardproof.harness.diagnosing.hypotheses.patterns import CLOSE, from_patterns
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.verdicts.facts import state_fact

OVERLAP = 0.5
"""Share of a part that must lie inside the tensor at the other place."""


def from_regions(run: RecordedRun, truth: Truth, name: str) -> list[Cause]:
    """Whether every wrong block of a tensor holds what belongs to another place along one dim."""
    if not is_comparable(run, truth, name):
        return []
    blocks = [(rank, block) for rank, of_rank in blocks_of(run, name).items() for block in of_rank]
    true = truth.tensors[name].double()
    for dim in range(true.dim()):
        starts = sorted({block.region[dim][0] for _, block in blocks})
        wrong = [(rank, block) for rank, block in blocks if _is_wrong(block, true)]
        places = [there for _, block in wrong if (there := _find_elsewhere(name, block, dim, starts, true))]
        if len(starts) > 1 and wrong and len(places) == len(wrong):
            (rank, block), (start, _) = wrong[0], places[0]
            fact = state_fact("at_other_place", dim=dim, rank=rank, start=start, right=block.region[dim][0])
            return claim_cause("other_part", fact, *(moved for _, moved in places))
    return []


def _is_wrong(block: Block, truth: Tensor) -> bool:
    true = block.part_of(truth)
    return float((block.local.double() - true).norm()) > share_left(block.local) * float(true.norm())


def _find_elsewhere(
    name: str, block: Block, dim: int, starts: Sequence[int], truth: Tensor
) -> tuple[int, Explained] | None:
    """Where along a dim the numbers of this block lie in truth, of these places; None when at none of them."""
    (own, end), cut = block.region[dim], [slice(a, b) for a, b in block.region]
    for start in starts:
        size = min(end - own, truth.shape[dim] - start)
        if start == own or size < OVERLAP * (end - own):
            continue
        cut[dim] = slice(start, start + size)
        there, here = truth[tuple(cut)], block.part_of(truth).narrow(dim, 0, size)
        distinct = float((there - here).norm()) > CLOSE * float(there.norm()) > 0
        moved = Explained(value=block.local.narrow(dim, 0, size), truth=here, guess=there, names=(name,), fitted=1)
        if distinct and moved.holds:
            return start, moved
    return None


def in_other_places(run: RecordedRun, truth: Truth, name: str) -> list[Cause]:
    """Whether the right numbers stand in wrong places."""
    value, axes = run.tensors.get(name), split_axes(run.case)
    if value is None:
        return []
    if kind_of(name) == "logits":
        axes |= {"data ranks and micro-batches": axes.get("dp", 1) * run.case.micro}
    return from_patterns(value, truth.tensors[name], axes, _other_steps(truth, name), name)


def _other_steps(truth: Truth, name: str) -> dict[str, Tensor]:
    """Truths of the same kind and another step: what a stale tensor would equal."""
    kind, _, rest = name.partition("/")
    alike = [other for other in truth.tensors if rest.isdigit() and other != name and kind_of(other) == kind]
    return {other: truth.tensors[other] for other in alike}


def _stale_norm(failure: Failure) -> list[Cause]:
    """Whether a norm is that of another step."""
    value, name = failure.value, failure.first
    if value is None or kind_of(name) != "grad_norm":
        return []
    truth = failure.evidence.truth
    return from_patterns(value, truth.tensors[name], {}, _other_steps(truth, name), name)


def _zero_state(failure: Failure) -> list[Cause]:
    """Whether the first wrong state after a step is zero throughout."""
    value, name = failure.value, failure.first
    if value is None or not is_state(name) or bool(value.any()):
        return []
    return from_patterns(value, failure.evidence.truth.tensors[name], {}, {}, name)


HYPOTHESES = (
    Hypothesis(predicts="a state that is zero throughout", causes=_zero_state, kinds=frozenset({STATE})),
    Hypothesis(
        predicts="the right numbers in other places, those of another step, or zero",
        causes=of_values(lambda evidence, names: in_other_places(evidence.run, evidence.truth, names[0])),
        kinds=VALUES,
    ),
    Hypothesis(
        predicts="every wrong block is what belongs to another place",
        causes=lambda failure: from_regions(failure.evidence.run, failure.evidence.truth, failure.first),
        kinds=VALUES | {STATE},
    ),
    Hypothesis(predicts="the norm of another step", causes=_stale_norm, kinds=frozenset({"grad_norm", LATER})),
)
