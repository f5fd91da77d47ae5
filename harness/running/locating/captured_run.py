"""Runs whose modules are captured call by call: a subject on all ranks of an engine, a dense model in this thread."""

from collections.abc import Callable
from contextlib import chdir
from typing import Any

import torch

from harness.engines.engine import Engine
from harness.engines.rank_environment import rank_device
from harness.protocols import CaseLike, Subject
from harness.recording.capturing.module_calls import CallCapture, ModuleCalls
from harness.resolve import resolve
from harness.running.ranks.execution import RankTask, sendable
from harness.subject import called, kept_per_rank, session


def calls_of_ranks(task: RankTask, engine: Engine, timeout_s: float) -> list[ModuleCalls]:
    """Run the subject once on all ranks; by rank, what its modules were given and returned.

    Raises what the engine raises, and RequestError when the task cannot be sent to the processes of the ranks.
    """
    size, seed = task.case.world_size, task.case.seed
    if engine.remote:
        return engine.run(_alone, sendable(task), world_size=size, seed=seed, timeout_s=timeout_s)
    device, subject = torch.device(task.device), _subject(task)
    with CallCapture() as capture, chdir("."), session(subject):
        return engine.run(
            _beside,
            subject,
            task.case,
            capture,
            device,
            world_size=size,
            seed=seed,
            timeout_s=timeout_s,
            per_rank=kept_per_rank(subject),
        )


def calls_of_truth(truth: Callable[[CaseLike, torch.device], object], case: CaseLike, device: str) -> ModuleCalls:
    """Run the dense model once in this thread; what its modules were given and returned, nothing when it has none."""
    with CallCapture() as capture, capture.on_rank(0):
        truth(case, torch.device(device))
        return capture.calls(0)


def _alone(rank: int, task: RankTask) -> ModuleCalls:
    """The program of a rank that has its process for itself."""
    subject = _subject(task)
    with CallCapture() as capture, session(subject):
        return _beside(rank, subject, task.case, capture, rank_device(task.device, rank))


def _beside(rank: int, subject: Subject, case: CaseLike, capture: CallCapture, device: torch.device) -> ModuleCalls:
    """The program of a rank where all ranks share the capture."""
    with capture.on_rank(rank):
        called(subject, case, device)
        return capture.calls(rank)


def _subject(task: RankTask) -> Any:
    return resolve(task.subject) if isinstance(task.subject, str) else task.subject
