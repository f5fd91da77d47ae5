"""Buckets as real systems lay them out where that deviates: what `parallel.variants` puts in place of ours.

Sources: torch 2.13 `DistributedDataParallel` (around.md 15.3); Megatron-Core before its commit ba8f2defc5, issue 844
(around.md 13.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from parallel.data_parallel.buckets import Bucket
from parallel.data_parallel.buffers import Buckets
from parallel.data_parallel.words import stage_buckets
from parallel.model.strategy import Rank
from parallel.schedules.stages import Stage
from reference.case import Case

__all__ = ["RebuiltBuckets", "TableAmongOthers"]


class RebuiltBuckets(Buckets):
    """One bucket in the first step, buckets of `bucket=` elements from the second on, as torch rebuilds them."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.but(variant="", bucket=0))
        self._rebuilt = case

    def afterwards(self, rank: Rank) -> None:
        """Round masters into the parameters; after the first step lay the buckets out anew."""
        super().afterwards(rank)
        if self._case is not self._rebuilt:
            self._case = self._rebuilt
            self.lay_out(rank)


class TableAmongOthers(Buckets):
    """A tied token table shares a bucket with other parameters, so that two stages cut it at different elements."""

    def buckets(self, stage: Stage, sizes: Mapping[str, int]) -> tuple[Bucket, ...]:
        """The buckets of a stage's parameters, in the order of registration of an untied model."""
        return stage_buckets(self._case, replace(stage, tied=False), sizes, self._axis.size)
