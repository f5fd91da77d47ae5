"""The torch profiler over the chosen steps of a program: one Kineto trace a rank in the run folder's `traces/`.

It watches from the first forward of the first step to that of the step after the last one, and writes the trace then.
The trace names the rank and the groups (`distributedInfo`), as HolisticTraceAnalysis needs.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness.programs.session import Session

__all__ = ["Window"]


class Window:
    """The profiler of one rank; it does nothing unless the session wants it."""

    def __init__(self, session: Session, rank: int) -> None:
        self._steps = session.steps if "torch" in session.profile else None
        self._path = Path(session.folder) / "traces" / f"rank{rank}.trace.json"
        self._running: torch.profiler.profile | None = None

    def step(self, number: int) -> None:
        """A step begins."""
        if self._steps is None:
            return
        if number >= self._steps[1]:
            self.close()
        elif number >= self._steps[0] and self._running is None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = torch.profiler.profile(activities=kinds, record_shapes=True)
            self._running.start()

    def close(self) -> None:
        """The steps are over, or the program is."""
        if self._running is not None:
            running, self._running, self._steps = self._running, None, None
            running.stop()
            self._path.parent.mkdir(exist_ok=True)
            running.export_chrome_trace(str(self._path))
