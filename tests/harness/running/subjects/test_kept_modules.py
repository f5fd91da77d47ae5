"""On ranks that are processes kept between cases, the modules of `subject.per_rank` are as before after each run."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.running.ranks.execution import RankTask, perform
from reference.case import Case

GROUPS: list[str] = []
"""What a library keeps for a process."""


class Library:
    """Its first call fills what the process has, and it refuses to do that twice, as Megatron does."""

    def __call__(self, case: Case, device: torch.device) -> dict[str, Tensor]:
        """An outcome."""
        if GROUPS:
            raise RuntimeError("already initialized")
        GROUPS.append("tp")
        return {"loss/0": torch.ones(())}


def test_a_process_runs_case_after_case() -> None:
    forgetful, careful = Library(), Library()
    careful.per_rank = (__name__,)  # type: ignore[attr-defined]
    task = RankTask(case=Case.parse("mode=tp tp=2"), subject=careful, device="cpu")
    for _ in range(2):
        assert "loss/0" in perform(0, task).outcomes[0]
        assert not GROUPS
    perform(0, RankTask(case=task.case, subject=forgetful, device="cpu"))
    assert GROUPS == ["tp"], "what is not named stays"
    GROUPS.clear()
