"""Subjects whose collectives `--faults` disturbs.

`needed` needs what it sums, the result of `blind` is seen by no check, `silent` calls nothing and the ranks of
`parted` part.

They compute the dense model on every rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.shard import Shard
from reference.case import Case
from reference.training import subject as dense


class Needed:
    """Each rank has its part of the loss, and one collective adds them up."""

    modes = ("tp",)

    def refuses(self, case: Case) -> str:
        """Few ranks suffice, for each of them computes everything."""
        return "" if case.world_size == 2 else "takes two ranks"

    def __call__(self, case: Case, device: torch.device) -> dict[str, Any]:
        outcome: dict[str, Any] = dense.subject(case, device)
        return {**outcome, "loss/0": self.loss(outcome["loss/0"])}

    def loss(self, whole: Tensor) -> Tensor:
        """This number from parts of different size."""
        rank, size = dist.get_rank(), dist.get_world_size()
        part = whole * (2 * (rank + 1) / (size * (size + 1)))
        dist.all_reduce(part)
        return part


class _Blind(Needed):
    """Returns the maximum of something that has no counterpart in the dense model."""

    def __call__(self, case: Case, device: torch.device) -> dict[str, Any]:
        outcome = super().__call__(case, device)
        clock = torch.tensor([7.0 + dist.get_rank()])
        dist.all_reduce(clock, dist.ReduceOp.MAX)
        own = Shard(local=clock, offsets=(dist.get_rank(),), global_shape=(case.world_size,))
        return {**outcome, "log/clock": own}


class _Silent(Needed):
    """Issues no collective."""

    def loss(self, whole: Tensor) -> Tensor:
        return whole


class _Parted(Needed):
    """Only rank 0 wants the sum."""

    def loss(self, whole: Tensor) -> Tensor:
        return super().loss(whole) if dist.get_rank() == 0 else whole


needed, blind, silent, parted = Needed(), _Blind(), _Silent(), _Parted()
