"""The recorder inside one rank of a program: it writes what it observes to the rank's files, and never fails the
program.

An exception in the recorder is reported once on standard error and in the rank's `end.json`, and recording ends. The
program never sees it. Nothing here waits for another rank, and no collective is issued.

Asynchronous calls that the program drops without waiting for them are recorded. The program holds the works of its
backend, and the recorder has weak references alone, so that it keeps none alive. The methods of torch's class that
amount to a wait are wrapped. Only works that Python code gets are followed: C++ code waits for the calls that it issues
(DDP's reducer, functional collectives).

The torch profiler runs from the first forward of the first chosen step to that of the step after the last one, and then
writes to `traces/` in the run folder. A Kineto trace names the rank and the groups (`distributedInfo`), as
HolisticTraceAnalysis needs. On gloo only torch's own log of the same calls (its Flight Recorder) has groups and dtypes
(harness.witnesses).
"""

import atexit
import json
import os
import resource
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardproof.harness.engines.calls.callers import Caller
from shardproof.harness.engines.calls.operators import MESSAGES, OperatorCall
from shardproof.harness.engines.interposer import Interposer
from shardproof.harness.ledger import Call
from shardproof.harness.programs.part import MODE, Part, Silence, shared_file
from shardproof.harness.programs.session import ProgramSession, boot_id, call_at_end, report_failure
from shardproof.harness.programs.stream import EventStream, PastCall
from shardproof.harness.recording.observations import read_observation
from shardproof.harness.recording.ranges import attached_ranges
from shardproof.harness.recording.recorder import Recorded
from shardproof.harness.recording.watch import Watch
from shardproof.harness.run_folder import LAYOUT
from shardproof.harness.running.store import environment
from shardproof.harness.torch_internals.backends import waits_of_works
from shardproof.harness.witnesses.chosen import TorchTrace
from shardproof.harness.witnesses.torch_trace import FLIGHT_SUFFIX, TRACE_SUFFIX

Place = tuple[str, str, str]
"""Op, axis and caller of a call."""


class Handles:
    """While it is entered, `dropped` counts by place the works that were never waited for."""

    def __init__(self) -> None:
        self.dropped: Counter[Place] = Counter()
        self._open: dict[int, tuple[Place, weakref.ref[Any]]] = {}
        self._local = threading.local()
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(waits_of_works(self._note_wait))

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def follow(self, work: Any, place: Place) -> None:
        """Follow a work that is about to be given to the program, in this thread."""
        self._local.newest = work  # nothing else holds it yet
        self._open[id(work)] = place, weakref.ref(work, partial(self._on_drop, id(work)))

    def release_last(self) -> None:
        """The program holds what was last followed in this thread, or has dropped it."""
        self._local.newest = None

    def close(self) -> None:
        """The program has ended: it never waited for the works that it still holds."""
        self.release_last()
        while self._open:
            self.dropped[self._open.popitem()[1][0]] += 1

    def _note_wait(self, work: int) -> None:
        self._open.pop(work, None)

    def _on_drop(self, work: int, _reference: object) -> None:
        if (found := self._open.pop(work, None)) is not None:
            self.dropped[found[0]] += 1


def is_given(issued: OperatorCall, caller: FrameType | None) -> bool:
    """Whether Python code gets the work of a call that the code of this frame issued.

    Users of torch's own functions do, except for messages on a GPU, for which batch_isend_irecv waits together.
    """
    from_python = caller is not None and caller.f_code.co_filename == distributed_c10d.__file__
    return from_python and (issued.call.op not in MESSAGES or issued.call.device == "cpu")


class Window:
    """The torch profiler of one rank with all groups, and the Flight Recorder's entries of the same time.

    Does nothing unless the session wants it.
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
        """Stop, and write what was recorded."""
        trace, self._trace, self._steps = self._trace, None, range(0)
        if trace is not None:
            trace.__exit__()
            self._stem.parent.mkdir(exist_ok=True)
            trace.write(Path(f"{self._stem}{TRACE_SUFFIX}"), Path(f"{self._stem}{FLIGHT_SUFFIX}"))


def begin(session: ProgramSession) -> None:
    """Record this process from now on, as the rank that torch.distributed says it is.

    Raises FileExistsError if another process has recorded as this rank, OSError if the folder cannot be written,
    MachineError if this torch cannot be observed.
    """
    of = Recorded(case=_name_of_program(), mode=MODE, world_size=dist.get_world_size(), rank=dist.get_rank())
    boot = boot_id()
    about = {"host": socket.gethostname(), "pid": os.getpid(), "clock": boot}
    folder = Path(session.folder)
    part = Part(folder, of.rank, about)
    row = {"case": of.case, "mode": MODE, "world_size": of.world_size, "skipped": "no case: nothing is checked"}
    shared_file(folder / "cases.jsonl", json.dumps(row) + "\n")
    about_run = {"program": of.case, "steps": "" if session.steps is None else "{}:{}".format(*session.steps)}
    env = {"layout": LAYOUT, "program": True, "stated": session.stated, **environment(session.command, about_run)}
    shared_file(folder / "env.json", json.dumps(env, indent=2) + "\n")
    RankRecorder(session, of, part, session.origin_s if boot == session.boot else time.perf_counter()).start()


def _name_of_program() -> str:
    """The name of the program: its module, or its file name."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name).removesuffix(".__main__")
    return Path(sys.argv[0] or "python").name


class RankRecorder:
    """Observes calls (harness.ledger.Observer) and logs them (harness.engines.interposer.CallLog).

    This process is observed while the recorder is entered; `start` enters it until the process ends.
    """

    def __init__(self, session: ProgramSession, of: Recorded, part: Part, origin_s: float) -> None:
        self._rank, self._case, self._part, self._on = of.rank, of.case, part, True
        self._session, self._world_size = session, of.world_size
        self._failed = ""
        self._local = threading.local()
        self._window = Window(session, of.rank)
        self._stream = EventStream(
            of=of,
            session=session,
            on_event=part.event,
            on_step=part.step,
            on_begin=self._window.step,
            origin_s=origin_s,
        )
        self._silence = Silence(session, of, self._stream, part)
        self._ranges = attached_ranges()
        self._draw = None if self._ranges is None else self._ranges.of(of.rank)
        self._watch = Watch(lambda _rank: self._emit, ends=self._ranges is not None)
        self._handles = Handles()
        self._entered = ExitStack()
        self._interposer = Interposer(self, log=self, let_go=self._let_go)

    def __enter__(self) -> Self:
        for observing in (self._watch, self._handles, self._interposer):
            self._entered.enter_context(observing)
        self._watch.lane(self._rank)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def start(self) -> None:
        """Observe this process until it ends."""
        self.__enter__()
        if self._ranges is not None:
            drawn = self._ranges.on_rank(self._rank, case=self._case, world_size=dist.get_world_size())
            drawn.__enter__()
            atexit.register(lambda: drawn.__exit__(None, None, None))
        self._window.step(0)
        self._silence.start()
        call_at_end(self._end)
        os.register_at_fork(after_in_child=self._be_silent)

    def on_enter(self, issued: OperatorCall) -> None:
        """A call is about to be issued."""
        self._local.issued = issued
        self._local.given = is_given(issued, sys._getframe(1).f_back)  # None in a thread that autograd started

    def on_exit(self) -> None:
        """The call entered last is complete."""

    def follow(self, work: Any, outputs: Sequence[Any], waited: Callable[[], None]) -> Any:
        """The work of the asynchronous call entered last. It is followed until it is waited for."""
        del outputs, waited
        try:
            past: PastCall | None = self._local.past
            if self._on and self._local.given and past is not None:
                place = "" if past.caller is None else Caller(*past.caller).place
                self._handles.follow(work, (past.issued.call.op, past.axis, place))
        except Exception as problem:
            self._let_go(problem)
        return work

    def on_issue(self, _rank: int, call: Call) -> int:
        """Record the call in the ledger's words. Returns its index on the rank, -1 if nothing is recorded."""
        if not self._on:
            return -1
        try:
            return self._watch.lane(self._rank).issue(call, sys._getframe(1))
        except Exception as problem:
            self._let_go(problem)
            return -1

    def on_completion(self, _rank: int, ticket: int) -> None:
        """The call has completed."""
        if not self._on or ticket < 0:
            return
        try:
            self._stream.on_completion(ticket)
            if self._ranges is not None:
                self._ranges.on_completion(self._rank, ticket)
        except Exception as problem:
            self._let_go(problem)

    def _emit(self, plain: tuple[Any, ...]) -> None:
        if not self._on:
            return
        try:
            self._handles.release_last()
            issued, self._local.issued = getattr(self._local, "issued", None), None
            self._local.past = self._stream.feed(plain, issued)
            if self._draw is not None:
                self._draw(read_observation(plain))
        except Exception as problem:
            self._let_go(problem)

    def _let_go(self, problem: Exception) -> None:
        """The recorder has failed: report it once, and leave the program alone."""
        if not self._on:
            return
        self._on = False
        self._failed = report_failure(f"rank {self._rank} is not recorded any further", problem)
        self._write_end()

    def _be_silent(self) -> None:
        self._on = False

    def _end(self) -> None:
        """The interpreter exits normally."""
        if not self._on:
            return
        self._silence.stop()
        try:
            self._window.close()
            self._handles.close()
            self._stream.close()
            self._write_end()
            if not self._rank:
                sys.stderr.write(f"shardproof: {self._describe_counts()}\n")
        except Exception as problem:
            self._let_go(problem)
        self._on = False

    def _describe_counts(self) -> str:
        """A sentence on what this rank recorded, and the command that shows it."""
        stream, steps = self._stream, self._session.steps
        if not stream.recorded and steps is not None and stream.calls:
            reached = f"the program ended in step {stream.step}, after {stream.calls} calls"
            asked = f"--steps {steps[0]}:{steps[1]}"
            return f"no call was recorded: {reached}, and {asked} was asked for; next: --steps 0:{stream.step + 1}"
        counts = f"{stream.steps} steps and {stream.recorded} calls, which handed over"
        place = os.path.relpath(self._session.folder)
        place = self._session.folder if place.startswith("..") else place
        size = f"{stream.recorded_bytes:,} bytes"
        return f"rank 0 of {self._world_size} recorded {counts} {size}; next: shardproof show {place}"

    def _write_end(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        on_device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
        with suppress(OSError):
            self._part.replace(
                "end.json",
                {
                    "calls": self._stream.calls,
                    "doubts": list(self._stream.doubts),
                    "peak_host_bytes": usage.ru_maxrss * 1024,
                    "peak_device_bytes": on_device,
                    "failed": self._failed,
                    "unwaited": [[*place, number] for place, number in self._handles.dropped.items()],
                },
            )
