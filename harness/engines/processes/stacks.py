"""Where a rank stands that does not answer: its process prints its stack from a signal handler.

faulthandler needs neither the interpreter's lock nor memory, so a rank prints where it is also while native code keeps
the lock. Frames are innermost first. Times are seconds.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shardproof.harness.engines.calls.callers import is_user
from shardproof.harness.engines.processes import rank_program
from shardproof.harness.engines.processes.flight_recorder import RECORDER_BYTES
from shardproof.harness.engines.processes.messages import Standing
from shardproof.harness.engines.processes.waits import is_waiting
from shardproof.harness.engines.processes.workers import STACK_SIGNAL, StackLine, Worker
from shardproof.harness.torch_internals.compiler import is_compiler

_PROGRAM_FILE = rank_program.__file__
"""File that calls a rank's program; the frames from there on are the engine's."""
_STEP_S = 0.01


def standings(workers: Sequence[Worker], limit_s: float) -> list[Standing]:
    """Where some ranks stand; unknown after the limit."""
    pids, files = [worker.pid for worker in workers], [worker.memory for worker in workers]
    for pid, file in zip(pids, files, strict=True):
        os.ftruncate(file, RECORDER_BYTES)
        os.lseek(file, RECORDER_BYTES, os.SEEK_SET)
        _signal(pid, STACK_SIGNAL)
    stopped = [pid for pid in pids if _is_stopped(pid)]
    for pid in stopped:
        _signal(pid, signal.SIGCONT)  # a stopped process prints nothing
    until_s = time.monotonic() + limit_s
    sizes: list[int] = []
    while time.monotonic() < until_s:
        time.sleep(_STEP_S)
        before, sizes = sizes, [os.fstat(file).st_size for file in files]
        if sizes == before and min(sizes, default=0) > RECORDER_BYTES:
            break
    for pid in stopped:
        _signal(pid, signal.SIGSTOP)
    stacks = [worker.stack(f"hread 0x{worker.recording.thread():016x}", _PROGRAM_FILE) for worker in workers]
    return [_standing(stack, pid in stopped) for stack, pid in zip(stacks, pids, strict=True)]


def _standing(stack: Sequence[StackLine], stopped: bool) -> Standing:
    return Standing(
        bool(stack) and is_waiting(stack[0].file),
        next((str(frame) for frame in stack if is_user(frame.file)), ""),
        tuple(map(str, stack)),
        stopped,
        any(is_compiler(frame.file) for frame in stack),
    )


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process; False where the system does not say it."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


def _signal(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)
