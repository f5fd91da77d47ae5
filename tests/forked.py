"""Programs in processes of their own that need not import torch again: each is forked from one that has imported it.

A process that a shell starts takes two to three seconds of a processor for its imports; a forked one takes some
milliseconds. A forked process has its own group, standard output and error in files, and ends without the exit
functions of `atexit`.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = (
    "shardproof.parallel.subject",
    "shardproof.reports.commands.run",
    "shardproof.harness.engines.processes.forked.pool",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """A process that was started; `out` and `err` are what it has printed so far."""

    process: ForkServerProcess
    folder: Path

    @property
    def pid(self) -> int:
        """The process and its group."""
        return self.process.pid or 0

    @property
    def out(self) -> str:
        """Standard output."""
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        """Standard error."""
        return (self.folder / "stderr").read_text()

    def send(self, signum: int) -> None:
        """A signal to the process alone."""
        os.kill(self.pid, signum)

    def ended(self, timeout_s: float = 60.0) -> int:
        """Its exit status, or the negative number of the signal that killed it. Raises TimeoutError, and kills it."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.send(signal.SIGKILL)
            raise TimeoutError(f"no end within {timeout_s:.0f} s: {self.out}{self.err}")
        return self.process.exitcode


def started(
    program: Callable[..., int | None], *words: object, folder: Path, environment: dict[str, str] | None = None
) -> Forked:
    """Call a program, a function of a module, in a process whose current folder is `folder`; more words of environment.

    Its return value is the exit status.
    """
    _CONTEXT.set_forkserver_preload(list(_IMPORTED))
    logs = folder / f"process-{len(list(folder.glob('process-*')))}"
    logs.mkdir(parents=True)
    process = _CONTEXT.Process(target=_be, args=(program, words, folder, logs, environment or {}))
    process.start()
    return Forked(process=process, folder=logs)


def _be(
    program: Callable[..., int | None], words: tuple[object, ...], folder: Path, logs: Path, environment: dict[str, str]
) -> None:
    os.setpgid(0, 0)
    os.chdir(folder)
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    sys.exit(program(*words))
