"""The stack of a process that does not answer: printed by itself, from a signal handler, behind its board.

faulthandler needs neither the interpreter's lock nor memory, so a rank prints where it is also while native code keeps
the lock. Frames are innermost first. Times are seconds.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from harness.callers import is_user, shortened
from harness.engines.processes import rank_program as rank_process
from harness.engines.processes.flight_recorder import BOARD_BYTES

__all__ = ["Frame", "ask", "offer", "user_line"]

_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)")
_PROGRAM_FILE = rank_process.__file__
"""What calls a rank's program; the frames from there on are ours and tell nothing."""
_STEP_S = 0.01


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{shortened(self.file)}:{self.line} in {self.function}"


def offer(board: int) -> None:
    """In the process: print the stacks of all threads behind the board whenever the signal comes."""
    faulthandler.register(_SIGNAL, file=board, all_threads=True)


def ask(processes: Sequence[tuple[int, int, int]], limit_s: float) -> list[tuple[Frame, ...]]:
    """The stacks of some processes, given as (pid, board, thread); () for one that does not answer within the limit."""
    for pid, board, _ in processes:
        os.ftruncate(board, BOARD_BYTES)
        os.lseek(board, BOARD_BYTES, os.SEEK_SET)
        with suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)
    until_s = time.monotonic() + limit_s
    sizes: list[int] = []
    while time.monotonic() < until_s:
        time.sleep(_STEP_S)
        before, sizes = sizes, [os.fstat(board).st_size for _, board, _ in processes]
        if sizes == before and min(sizes, default=0) > BOARD_BYTES:
            break
    return [
        _frames(os.pread(board, 1 << 20, BOARD_BYTES).decode(errors="replace"), ident) for _, board, ident in processes
    ]


def user_line(stack: Sequence[Frame]) -> str:
    """The innermost line of the user's code, as "file:line in function"; "" when there is none."""
    return next((str(frame) for frame in stack if is_user(frame.file)), "")


def _frames(text: str, ident: int) -> tuple[Frame, ...]:
    """The frames of one thread in what faulthandler printed."""
    found: list[Frame] = []
    mine = False
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            mine = int(thread["ident"], 16) == ident
        elif mine and (frame := _LINE.match(line)):
            found.append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    ours = next((i for i, frame in enumerate(found) if frame.file == _PROGRAM_FILE), len(found))
    return tuple(found[:ours])
