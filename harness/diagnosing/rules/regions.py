"""A part of a tensor that holds the numbers of another part: an offset that is left out, or another rank's.

Each rank's own blocks are held against the truth at the places where other ranks' blocks begin. So parts of unequal
size, and a last one that is shorter, are looked at too.
"""

from collections.abc import Sequence

from torch import Tensor

from harness.checking.evidence import Evidence
from harness.diagnosing.rules.causes import Cause, claimed
from harness.diagnosing.rules.patterns import CLOSE
from harness.diagnosing.rules.places import blocks_of, comparable
from harness.diagnosing.rules.proofs import Explained, share_left
from harness.outcome.blocks import Block

OVERLAP = 0.5
"""Share of a part that must lie inside the tensor at the other place."""


def from_regions(evidence: Evidence, name: str) -> list[Cause]:
    """Whether every wrong block of a tensor holds what belongs to another place along one dim."""
    if not comparable(evidence, name):
        return []
    blocks = [(rank, block) for rank, of_rank in blocks_of(evidence, name).items() for block in of_rank]
    truth = evidence.truth[name].double()
    for dim in range(truth.dim()):
        starts = sorted({block.region[dim][0] for _, block in blocks})
        wrong = [(rank, block) for rank, block in blocks if _wrong(block, truth)]
        places = [there for _, block in wrong if (there := _elsewhere(block, truth, dim, starts))]
        if len(starts) > 1 and wrong and len(places) == len(wrong):
            (rank, block), (start, _) = wrong[0], places[0]
            words = (
                f"along dim {dim} rank {rank} holds what lies at {start}, where {block.region[dim][0]} is meant: "
                "another rank's part, or an offset that is left out"
            )
            return claimed("other_shard", words, *(moved for _, moved in places))
    return []


def _at(block: Block, truth: Tensor) -> Tensor:
    return truth[tuple(slice(a, b) for a, b in block.region)]


def _wrong(block: Block, truth: Tensor) -> bool:
    true = _at(block, truth)
    return float((block.local.double() - true).norm()) > share_left(block.local) * float(true.norm())


def _elsewhere(block: Block, truth: Tensor, dim: int, starts: Sequence[int]) -> tuple[int, Explained] | None:
    """Where along a dim the numbers of this block lie in truth, of these places; None when at none of them."""
    (own, end), cut = block.region[dim], [slice(a, b) for a, b in block.region]
    for start in starts:
        size = min(end - own, truth.shape[dim] - start)
        if start == own or size < OVERLAP * (end - own):
            continue
        cut[dim] = slice(start, start + size)
        there, here = truth[tuple(cut)], _at(block, truth).narrow(dim, 0, size)
        distinct = float((there - here).norm()) > CLOSE * float(there.norm()) > 0
        moved = Explained(value=block.local.narrow(dim, 0, size), truth=here, guess=there)
        if distinct and moved.holds:
            return start, moved
    return None
