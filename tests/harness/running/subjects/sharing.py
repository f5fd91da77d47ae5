"""Subjects whose library keeps state that a process has once; right on processes, wrong where ranks are threads."""

from typing import Any

import torch
import torch.distributed as dist

from tests.harness.running.subjects import shared_groups
from tests.harness.running.subjects.stateless import Summing


class Mixing(Summing):
    """Takes the samples of the rank that its library knows: of threads the last one that entered."""

    def place(self) -> int:
        """The rank that the library has noted."""
        shared_groups.enter()
        dist.barrier()
        return shared_groups.place()


class Wrong(Summing):
    """Wrong on processes too, though it calls a library that keeps state."""

    def place(self) -> int:
        """This rank."""
        shared_groups.enter()
        return dist.get_rank()


class Undecided(Mixing):
    """Returns a name too that its truth does not know: no verdict on it is a pass."""

    def __call__(self, case: Any, device: torch.device) -> dict[str, torch.Tensor]:
        outcome = super().__call__(case, device)
        return outcome | ({"loss/1": outcome["loss/0"]} if dist.get_world_size() > 1 else {})


mixing, wrong, undecided = Mixing(1.0), Wrong(2.0), Undecided(1.0)
