"""Flat memory read at another place than it was written: a block's elements stand some places too early or too late.

Looked for in every rank's own block, for what lies flat is what a rank holds. Offsets are counted in elements.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import kind_of
from harness.diagnosing.rules.causes import Cause, claimed
from harness.diagnosing.rules.places import blocks_of
from harness.diagnosing.rules.proofs import Explained

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
        pairs = list(_pairs(evidence, name))
        for offset in (sign * places for places in range(1, FURTHEST + 1) for sign in (1, -1)):
            late = "late" if offset > 0 else "early"
            words = f"its elements stand {abs(offset)} too {late} in flat memory: a buffer walked from another place"
            slid = [_slid(x, t, offset) for x, t in pairs]
            if causes := claimed("flat_offset", words, *(one for one in slid if one)) if all(slid) else []:
                return causes
    return []


def _pairs(evidence: Evidence, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Every rank's blocks beside the truth of their places, both flat."""
    for blocks in blocks_of(evidence, name).values():
        for block in blocks:
            true = evidence.truth[name].double()[tuple(slice(a, b) for a, b in block.region)]
            yield block.local.double().flatten(), true.flatten()


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
