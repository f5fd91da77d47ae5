"""The torch profiler over the chosen steps of a program: one Kineto trace a rank in the run folder's `traces/`.

It watches from the first forward of the first step to that of the step after the last one, and writes the trace then.
The trace names the rank and the groups (`distributedInfo`), as HolisticTraceAnalysis needs. Beside it stands torch's
own log of the same calls (its Flight Recorder), which alone knows groups and dtypes on gloo (harness.witnesses).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from harness.programs.session import ProgramSession
from harness.torch_internals.tracing import distributed_header, flight_record
from harness.witnesses.torch_trace import FLIGHT_SUFFIX, TRACE_SUFFIX

__all__ = ["Window"]


class Window:
    """The profiler of one rank; it does nothing unless the session wants it."""

    def __init__(self, session: ProgramSession, rank: int) -> None:
        self._steps = session.steps if "torch" in session.profile else None
        self._stem = Path(session.folder) / "traces" / f"rank{rank}"
        self._running: torch.profiler.profile | None = None
        self._before = -1
        self._header: Mapping[str, Any] = {}

    def step(self, number: int) -> None:
        """A step begins."""
        if self._steps is None:
            return
        if self._running is not None:  # what it wrote at its start lacks the groups made since
            self._header = distributed_header(self._running)
        if number >= self._steps[1]:
            self.close()
        elif number >= self._steps[0] and self._running is None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._before = max((int(entry["record_id"]) for entry in flight_record()), default=-1)
            self._running = torch.profiler.profile(activities=kinds, record_shapes=True)
            self._running.start()

    def close(self) -> None:
        """The steps are over, or the program is."""
        if self._running is not None:
            running, self._running, self._steps = self._running, None, None
            self._header = distributed_header(running) or self._header  # the world may be destroyed by now
            running.add_metadata_json("distributedInfo", json.dumps(self._header))
            running.stop()
            entries = [entry for entry in flight_record() if int(entry["record_id"]) > self._before]
            self._stem.parent.mkdir(exist_ok=True)
            running.export_chrome_trace(f"{self._stem}{TRACE_SUFFIX}")
            Path(f"{self._stem}{FLIGHT_SUFFIX}").write_text(json.dumps({"entries": entries}), encoding="utf-8")
