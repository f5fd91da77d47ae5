"""Parts of a tensor that hold the numbers of another part: an offset that is left out, or another rank's.

Each rank's own blocks are held against the truth at the places where other ranks' blocks begin. So parts of unequal
size, and a last one that is shorter, are looked at too. Then flat memory that is read at another place than it was
written: what lies flat is what a rank holds. Offsets are counted in elements.
"""

from collections.abc import Sequence

from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import kind_of
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


def _wrong(block: Block, truth: Tensor) -> bool:
    true = block.part_of(truth)
    return float((block.local.double() - true).norm()) > share_left(block.local) * float(true.norm())


def _elsewhere(block: Block, truth: Tensor, dim: int, starts: Sequence[int]) -> tuple[int, Explained] | None:
    """Where along a dim the numbers of this block lie in truth, of these places; None when at none of them."""
    (own, end), cut = block.region[dim], [slice(a, b) for a, b in block.region]
    for start in starts:
        size = min(end - own, truth.shape[dim] - start)
        if start == own or size < OVERLAP * (end - own):
            continue
        cut[dim] = slice(start, start + size)
        there, here = truth[tuple(cut)], block.part_of(truth).narrow(dim, 0, size)
        distinct = float((there - here).norm()) > CLOSE * float(there.norm()) > 0
        moved = Explained(value=block.local.narrow(dim, 0, size), truth=here, guess=there)
        if distinct and moved.holds:
            return start, moved
    return None


FURTHEST = 8
"""Offsets beyond this many elements are not looked for."""
LEFT = 1e-4
"""Share of the error that may be left between elements that are taken for the same."""
DISTINCT = 1e-2
"""Share of the truth by which it must differ from its own neighbours, or any offset would fit."""
LOOKED_AT = 8
"""Wrong gradients that are looked at, the first ones."""


def from_offsets(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """Whether a wrong gradient holds on every rank the right elements at an offset."""
    names = [name for name in wrong if kind_of(name) == "grad" and name in evidence.truth]
    for name in names[:LOOKED_AT]:
        truth = evidence.truth[name].double()
        blocks = [block for of_rank in blocks_of(evidence, name).values() for block in of_rank]
        pairs = [(block.local.double().flatten(), block.part_of(truth).flatten()) for block in blocks]
        for offset in (sign * places for places in range(1, FURTHEST + 1) for sign in (1, -1)):
            late = "late" if offset > 0 else "early"
            words = f"its elements stand {abs(offset)} too {late} in flat memory: a buffer walked from another place"
            slid = [_slid(x, t, offset) for x, t in pairs]
            if causes := claimed("flat_offset", words, *(one for one in slid if one)) if all(slid) else []:
                return causes
    return []


def _slid(x: Tensor, t: Tensor, offset: int) -> Explained | None:
    """The block as elements of the truth `offset` places on; None where it would hold of any offset."""
    if x.shape != t.shape or len(t) < 2 * FURTHEST:
        return None
    if offset < 0:
        x, t, offset = x.flip(0), t.flip(0), -offset
    kept, here = t[:-offset], t[offset:]
    power = float(kept.norm())
    distinct = float((here - kept).norm()) > DISTINCT * power > 0
    return Explained(value=x[offset:], truth=here, guess=kept, left=LEFT) if distinct else None
