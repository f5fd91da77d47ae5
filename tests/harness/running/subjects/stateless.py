"""Subjects that reach no module that keeps state: one right, one wrong."""

from typing import Any

import torch
import torch.distributed as dist


class Summing:
    """Sums what the samples of all ranks give, times a factor where there is more than one rank."""

    words: Any = {"micro": 1}
    cases: Any = ("dp=2",)
    truth = "alone"

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def place(self) -> int:
        """The rank whose samples are summed."""
        return dist.get_rank()

    def __call__(self, case: Any, device: torch.device) -> dict[str, torch.Tensor]:
        rank = case.axis_rank("dp", self.place())
        numbers = [n + 1 for micro in range(case.micro) for n in case.samples(0, micro, rank, 1)]
        total = torch.tensor(numbers, dtype=getattr(torch, case.dtype)).mul(0.37).square().sum()
        dist.all_reduce(total)
        return {"loss/0": total * (self._factor if dist.get_world_size() > 1 else 1.0)}


right, wrong = Summing(1.0), Summing(2.0)
