"""What is known of the cross entropies under test, and cannot be told from a ledger: their maximum is only a shift."""

from __future__ import annotations

from harness.equivalence import Rule
from harness.faults import Fault
from harness.protocols import CaseLike

__all__ = ["shift"]


def shift(case: CaseLike, phase: str) -> Rule:
    """The rule of the maximum over the vocabulary's shards, which a subject takes in this phase.

    exp(x - m) / sum exp(x - m) is the same for any m that all ranks of the group subtract alike, as long as nothing
    overflows: for another reduction, for a maximum of before, for a maximum over more ranks.
    """

    def holds(fault: Fault) -> bool:
        target = fault.target
        if (target.op, target.reduce_op, target.phase) != ("all_reduce", "max", phase) or fault.rank >= 0:
            return False
        own = case.axes.get(target.axis, ())
        together = all(any(set(ranks) <= set(other) for other in fault.groups) for ranks in own)
        return fault.kind in {"op", "stale"} or (fault.kind == "group" and together)

    return Rule(
        proof="softmax is the same for any shift that all ranks subtract alike, the maximum or not", holds=holds
    )
