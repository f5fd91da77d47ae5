"""Launches of programs whose ranks are threads, in processes forked from one that has imported torch."""

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from shardproof.harness.engines.rank_environment import ONE_THREAD
from shardproof.harness.errors import RequestError
from shardproof.harness.programs.session import ProgramSession
from shardproof.harness.programs.threads.torchrun_words import RanksOfProgram

_START = Path(__file__).with_name("start.py")


class ForkedLaunch:
    """A running launch, with the interface of subprocess.Popen; `pid` leads a process group."""

    def __init__(self, pid: int, answers: IO[str]) -> None:
        self.pid = pid
        self._answers = answers
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, None while the program runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._status

    def wait(self, timeout: float) -> int:
        """The exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self._status is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(_START), timeout)
            self._status = int(self._answers.readline() or "1")
        return self._status


class ThreadLaunches:
    """Starts launches, one at a time: each ends before the next one."""

    def __init__(self) -> None:
        self._servers: dict[str, subprocess.Popen[str]] = {}
        self._said = tempfile.NamedTemporaryFile()  # noqa: SIM115  (closed with the launches)

    def start(self, found: RanksOfProgram, session: ProgramSession, output: Path) -> ForkedLaunch:
        """Start the ranks of a program in the working folder; they print to `output`. Raises RequestError if its Python
        has no torch.
        """
        server = self._server_of(found.python)
        order: dict[str, Any] = {"session": session.text, "ranks": found.ranks, "program": found.program}
        order |= {"folder": os.getcwd(), "environ": {**ONE_THREAD, **os.environ}, "output": str(output.resolve())}
        with suppress(BrokenPipeError):
            print(json.dumps(order), file=server.stdin, flush=True)
        if server.stdout is None or not (answer := server.stdout.readline()):
            raise RequestError(f"engine=inproc: {found.python} does not start: {self._last_words()}")
        return ForkedLaunch(int(answer), server.stdout)

    def close(self) -> None:
        """End the process from which launches are forked."""
        for server in self._servers.values():
            server.kill()  # launches do not die with it: they lead process groups of their own
            server.communicate()
        self._said.close()

    def _server_of(self, python: str) -> "subprocess.Popen[str]":
        if python not in self._servers:
            self._servers[python] = subprocess.Popen(
                [python, str(_START)],
                env={**ONE_THREAD, **os.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
            )
        return self._servers[python]

    def _last_words(self) -> str:
        lines = Path(self._said.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'it ended'}; legal: a Python with torch, numpy and safetensors"


@contextmanager
def launches_of_threads(wanted: bool) -> Iterator[ThreadLaunches | None]:
    """A starter of ranks as threads if that is wanted, else None."""
    launches = ThreadLaunches() if wanted else None
    try:
        yield launches
    finally:
        if launches is not None:
            launches.close()
