"""Subjects whose library keeps state that a process has once; right on processes, wrong where ranks are threads."""

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


mixing, wrong = Mixing(1.0), Wrong(2.0)
