"""Subjects that a test interrupts: slow in one case, and slow when a failure is shrunk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from reference.case import Case
from tests.harness import toy_subjects

STARTED = Path("started")
"""Made in the current folder when the slow part begins; it holds the id of the process."""


def slow_second(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The case of seed 1 does not end by itself."""
    if case.seed == 1:
        _wait()
    return toy_subjects.right(case, device)


def slow_shrink(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Wrong as it is; the smaller case of one layer, which a script is looked for in, does not end by itself."""
    if case.layers == 1:
        _wait()
    return toy_subjects.wrong(case, device)


def _wait() -> None:
    STARTED.write_text(str(os.getpid()))
    time.sleep(40)
