"""Torch's own tools over the chosen steps of a program: what they saw is in the run folder's `traces/`, rank by rank.

They watch from the first forward of the first step to that of the step after the last one, and write then. The
profiler makes a Kineto trace, which names the rank and the groups (`distributedInfo`), as HolisticTraceAnalysis needs;
beside it stands torch's own log of the same calls (its Flight Recorder), which alone knows groups and dtypes on gloo
(harness.witnesses). The ExecutionTraceObserver slows a step down more: it watches the first two of these steps alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from harness.programs.session import ProgramSession
from harness.programs.stated import EXECUTION_SUFFIX
from harness.torch_internals.tracing import distributed_header, flight_record
from harness.witnesses.torch_trace import FLIGHT_SUFFIX, TRACE_SUFFIX

OPERATOR_STEPS = 2
"""Steps of an execution trace: what the first leaves in memory is read, or overwritten, in the second."""


class Window:
    """The tools of one rank; it does nothing unless the session wants one."""

    def __init__(self, session: ProgramSession, rank: int) -> None:
        stem = Path(session.folder) / "traces" / f"rank{rank}"
        first, end = session.steps or (0, 0)
        self._waiting: list[tuple[int, int, _Tool]] = []
        if "torch" in session.profile:
            self._waiting.append((first, end, _Profiler(stem)))
        if "et" in session.profile:
            self._waiting.append((first, min(end, first + OPERATOR_STEPS), _Observer(stem)))
        self._running: list[tuple[int, int, _Tool]] = []

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


class _Tool(Protocol):
    """Started once and stopped once."""

    def start(self) -> None:
        """Watch from now on."""

    def step(self) -> None:
        """A step begins while it watches."""

    def stop(self) -> None:
        """Watch no more, and write what was seen."""


class _Profiler:
    """The torch profiler, with the groups that there are, and the Flight Recorder's entries of the same stretch."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._header: Mapping[str, Any] = {}

    def start(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._before = max((int(entry["record_id"]) for entry in flight_record()), default=-1)
        self._tool = torch.profiler.profile(activities=kinds, record_shapes=True)
        self._tool.start()

    def step(self) -> None:
        self._header = distributed_header(self._tool)  # what it wrote at its start lacks the groups made since

    def stop(self) -> None:
        header = distributed_header(self._tool) or self._header  # the world may be destroyed by now
        self._tool.add_metadata_json("distributedInfo", json.dumps(header))
        self._tool.stop()
        entries = [entry for entry in flight_record() if int(entry["record_id"]) > self._before]
        self._stem.parent.mkdir(exist_ok=True)
        self._tool.export_chrome_trace(f"{self._stem}{TRACE_SUFFIX}")
        Path(f"{self._stem}{FLIGHT_SUFFIX}").write_text(json.dumps({"entries": entries}), encoding="utf-8")


class _Observer:
    """Torch's ExecutionTraceObserver, which writes as it watches."""

    def __init__(self, stem: Path) -> None:
        self._place = Path(f"{stem}{EXECUTION_SUFFIX}")

    def start(self) -> None:
        self._place.parent.mkdir(exist_ok=True)
        self._tool = torch.profiler.ExecutionTraceObserver().register_callback(str(self._place))
        self._tool.start()

    def step(self) -> None:
        """It needs nothing at a step."""

    def stop(self) -> None:
        self._tool.stop()
        self._tool.unregister_callback()
