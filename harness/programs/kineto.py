"""The torch profiler over the chosen steps of a program: what it saw is in the run folder's `traces/`, rank by rank.

The profiler watches from the first forward of the first step to that of the step after the last one, and writes then. A
Kineto trace names the rank and the groups (`distributedInfo`), as HolisticTraceAnalysis needs. torch's own log of the
same calls (its Flight Recorder) alone knows groups and dtypes on gloo (harness.witnesses).
"""

from pathlib import Path

import torch

from shardproof.harness.programs.session import ProgramSession
from shardproof.harness.witnesses.chosen import TorchTrace
from shardproof.harness.witnesses.torch_trace import FLIGHT_SUFFIX, TRACE_SUFFIX


class Window:
    """The torch profiler of one rank with all groups, and the Flight Recorder's entries of the same stretch.

    Nothing is done unless the session wants it.
    """

    def __init__(self, session: ProgramSession, rank: int) -> None:
        self._stem = Path(session.folder) / "traces" / f"rank{rank}"
        self._steps = range(*session.steps) if session.steps and "torch" in session.profile else range(0)
        self._trace: TorchTrace | None = None

    def step(self, number: int) -> None:
        """A step begins."""
        if self._trace is not None:
            self._trace.note_groups()
        if self._trace is not None and number >= self._steps.stop:
            self.close()
        elif self._trace is None and number in self._steps:
            self._trace = TorchTrace(cuda=torch.cuda.is_available())
            self._trace.__enter__()

    def close(self) -> None:
        """Watch no more, and write what was seen."""
        trace, self._trace, self._steps = self._trace, None, range(0)
        if trace is not None:
            trace.__exit__()
            self._stem.parent.mkdir(exist_ok=True)
            trace.write(Path(f"{self._stem}{TRACE_SUFFIX}"), Path(f"{self._stem}{FLIGHT_SUFFIX}"))
