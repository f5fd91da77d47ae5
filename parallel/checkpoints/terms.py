"""The calls of a save: one, when every rank has written its part (`parallel.checkpoints.saving`). A load has none."""

from __future__ import annotations

from collections.abc import Iterator

from parallel.communication.expectation import ITEM_BYTES, CompleteTerm
from reference.case import Case

__all__ = ["checkpoint_terms"]


def checkpoint_terms(case: Case) -> Iterator[CompleteTerm]:
    """The term of a case that saves a checkpoint; none of one that does not, or runs on one rank."""
    if case.save and case.world_size > 1:
        yield CompleteTerm(
            phase="checkpoint",
            region="",
            op="all_reduce",
            reduce_op="max",
            axis="checkpoint",
            group_size=case.world_size,
            dtype="int64",
            payload_bytes=ITEM_BYTES["int64"],
            calls=1,
        )
