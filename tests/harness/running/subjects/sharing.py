"""Subjects whose library keeps state that a process has once; right on processes, wrong where ranks are threads."""

from typing import Any

import torch
import torch.distributed as dist

from tests.harness.running.subjects import shared_groups
from tests.harness.running.subjects.stateless import Summing


def _summed(case: Any, rank: int, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """The sum of what the samples of all ranks give, and of which ones."""
    numbers = [n + 1 for micro in range(case.micro) for n in case.samples(0, micro, case.axis_rank("dp", rank), 1)]
    total = factor * torch.tensor(numbers, dtype=getattr(torch, case.dtype)).mul(0.37).square().sum()
    dist.all_reduce(total)
    return {"loss/0": total}


class Mixing(Summing):
    """Takes the samples of the rank that its library knows: of threads the last one that entered."""

    def __call__(self, case: Any, device: torch.device) -> dict[str, torch.Tensor]:
        shared_groups.enter()
        dist.barrier()
        return _summed(case, shared_groups.place())


class Wrong(Summing):
    """Wrong on processes too, though it calls a library that keeps state."""

    def __call__(self, case: Any, device: torch.device) -> dict[str, torch.Tensor]:
        """Twice the sum where there is more than one rank."""
        shared_groups.enter()
        return _summed(case, dist.get_rank(), float(dist.get_world_size()))


mixing, wrong = Mixing(1.0), Wrong(1.0)
