"""Where a process stands that does not answer: it prints its stack from a signal handler, behind its flight recorder.

faulthandler needs neither the interpreter's lock nor memory, so a rank prints where it is also while native code keeps
the lock. Frames are innermost first. Times are seconds.
"""

import faulthandler
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardproof.harness.engines.calls.callers import is_user, shortened
from shardproof.harness.engines.processes import rank_program
from shardproof.harness.engines.processes.flight_recorder import RECORDER_BYTES
from shardproof.harness.engines.processes.forked.fork_server import Worker
from shardproof.harness.engines.processes.messages import Standing
from shardproof.harness.engines.processes.waits import is_waiting
from shardproof.harness.torch_internals.compiler import is_compiler

_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)")
_PROGRAM_FILE = rank_program.__file__
"""File that calls a rank's program; the frames from there on are the engine's."""
_STEP_S = 0.01


class _Frame(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{shortened(self.file)}:{self.line} in {self.function}"


def print_on_signal(recorder_file: int) -> None:
    """In the process: print the stacks of all threads behind the flight recorder whenever the signal comes."""
    faulthandler.register(_SIGNAL, file=recorder_file, all_threads=True)


def standings(workers: Sequence[Worker], limit_s: float) -> list[Standing]:
    """Where some workers stand; unknown after the limit."""
    files = [worker.recorder_file for worker in workers]
    for worker, file in zip(workers, files, strict=True):
        os.ftruncate(file, RECORDER_BYTES)
        os.lseek(file, RECORDER_BYTES, os.SEEK_SET)
        with suppress(ProcessLookupError):
            os.kill(worker.pid, _SIGNAL)
    stopped = [_is_stopped(worker.pid) for worker in workers]
    _signal(workers, stopped, signal.SIGCONT)  # a stopped process prints nothing
    until_s = time.monotonic() + limit_s
    sizes: list[int] = []
    while time.monotonic() < until_s:
        time.sleep(_STEP_S)
        before, sizes = sizes, [os.fstat(file).st_size for file in files]
        if sizes == before and min(sizes, default=0) > RECORDER_BYTES:
            break
    _signal(workers, stopped, signal.SIGSTOP)
    printed = (os.pread(file, 1 << 20, RECORDER_BYTES).decode(errors="replace") for file in files)
    stacks = [_frames(text, worker.recording.thread()) for text, worker in zip(printed, workers, strict=True)]
    return [
        Standing(
            bool(stack) and is_waiting(stack[0].file),
            next((str(frame) for frame in stack if is_user(frame.file)), ""),
            tuple(map(str, stack)),
            halted,
            any(is_compiler(frame.file) for frame in stack),
        )
        for stack, halted in zip(stacks, stopped, strict=True)
    ]


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process; False where the system does not say it."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


def _signal(workers: Sequence[Worker], chosen: Sequence[bool], signum: int) -> None:
    for worker, is_chosen in zip(workers, chosen, strict=True):
        if is_chosen:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signum)


def _frames(text: str, ident: int) -> tuple[_Frame, ...]:
    """The frames of one thread in what faulthandler printed."""
    frames: list[_Frame] = []
    mine = False
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            mine = int(thread["ident"], 16) == ident
        elif mine and (frame := _LINE.match(line)):
            frames.append(_Frame(frame["file"], int(frame["line"]), frame["function"]))
    ours = next((i for i, frame in enumerate(frames) if frame.file == _PROGRAM_FILE), len(frames))
    return tuple(frames[:ours])
