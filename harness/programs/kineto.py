"""Torch's own tools over the chosen steps of a program: what they saw is in the run folder's `traces/`, rank by rank.

They watch from the first forward of the first step to that of the step after the last one, and write then. The
profiler makes a Kineto trace, which names the rank and the groups (`distributedInfo`), as HolisticTraceAnalysis needs;
beside it stands torch's own log of the same calls (its Flight Recorder), which alone knows groups and dtypes on gloo
(harness.witnesses). The ExecutionTraceObserver slows a step down more: it watches the first two of these steps alone.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness.programs.session import ProgramSession
from harness.witnesses.chosen import TorchTrace
from harness.witnesses.torch_trace import FLIGHT_SUFFIX, TRACE_SUFFIX

EXECUTION_SUFFIX = ".et.json"
"""How the execution trace of a rank ends, after `traces/rank<r>`."""
OPERATOR_STEPS = 2
"""Steps of an execution trace: what the first leaves in memory is read, or overwritten, in the second."""


class Window:
    """The tools of one rank; it does nothing unless the session wants one."""

    def __init__(self, session: ProgramSession, rank: int) -> None:
        stem = Path(session.folder) / "traces" / f"rank{rank}"
        first, end = session.steps or (0, 0)
        self._waiting: list[tuple[int, int, _Profiler | _Observer]] = []
        if "torch" in session.profile:
            self._waiting.append((first, end, _Profiler(stem)))
        if "et" in session.profile:
            self._waiting.append((first, min(end, first + OPERATOR_STEPS), _Observer(stem)))
        self._running: list[tuple[int, int, _Profiler | _Observer]] = []

    def step(self, number: int) -> None:
        """A step begins."""
        for one in list(self._running):
            one[2].step()
            if number >= one[1]:
                self._running.remove(one)
                one[2].stop()
        for one in list(self._waiting):
            if number >= one[0]:
                self._waiting.remove(one)
                if number < one[1]:
                    one[2].start()
                    self._running.append(one)

    def close(self) -> None:
        """The program is over."""
        self._waiting.clear()
        while self._running:
            self._running.pop()[2].stop()


class _Profiler:
    """The torch profiler, with the groups that there are, and the Flight Recorder's entries of the same stretch."""

    def __init__(self, stem: Path) -> None:
        self._stem, self._trace = stem, TorchTrace(cuda=torch.cuda.is_available())

    def start(self) -> None:
        """Watch from now on."""
        self._trace.__enter__()

    def step(self) -> None:
        """A step begins while it watches."""
        self._trace.note_groups()

    def stop(self) -> None:
        """Watch no more, and write what was seen."""
        self._trace.__exit__()
        self._stem.parent.mkdir(exist_ok=True)
        self._trace.write(Path(f"{self._stem}{TRACE_SUFFIX}"), Path(f"{self._stem}{FLIGHT_SUFFIX}"))


class _Observer:
    """Torch's ExecutionTraceObserver, which writes as it watches."""

    def __init__(self, stem: Path) -> None:
        self._place = Path(f"{stem}{EXECUTION_SUFFIX}")

    def start(self) -> None:
        """Watch from now on."""
        self._place.parent.mkdir(exist_ok=True)
        self._tool = torch.profiler.ExecutionTraceObserver().register_callback(str(self._place))
        self._tool.start()

    def step(self) -> None:
        """It needs nothing at a step."""

    def stop(self) -> None:
        """Watch no more."""
        self._tool.stop()
        self._tool.unregister_callback()
