"""Programs in processes of their own that need not import torch again: each is forked from one that has imported it.

A process that a shell starts takes two to three seconds of a processor for its imports; a forked one takes some
milliseconds. A forked process has its own group, standard output and error in files, and ends without the exit
functions of `atexit`.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory

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
        """Send a signal to the process, and not to its children."""
        os.kill(self.pid, signum)

    def ended(self, timeout_s: float = 60.0) -> int:
        """The exit status, or minus the signal that killed it. Kills it, and raises TimeoutError, if it runs on."""
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


_CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"!"], [0, 1, 2])
    server.sendall(json.dumps([os.getcwd(), dict(os.environ), sys.argv]).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(8) or 1))
"""


@contextmanager
def command_served(name: str, program: Callable[[], int | None]) -> Iterator[Path]:
    """A folder for PATH in which lies a command of this name, for what shells run: a program forked for every call."""
    with TemporaryDirectory() as made:  # the path of a socket is short
        folder, address = Path(made), f"{made}/address"
        (folder / name).write_text(_CLIENT.format(python=sys.executable, address=address))
        (folder / name).chmod(0o755)
        server = started(_serve, program, address, folder=folder)
        try:
            while not Path(address).exists() and server.process.is_alive():
                server.process.join(0.01)
            yield folder
        finally:
            server.send(signal.SIGTERM)
            server.process.join()


def _serve(program: Callable[[], int | None], address: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a call but its client
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}~")
        server.listen()
        Path(f"{address}~").rename(address)
        while True:
            call, _ = server.accept()
            if not os.fork():
                _answer(call, program)
            call.close()


def _answer(call: socket.socket, program: Callable[[], int | None]) -> None:
    """Be the command in this process, which ends here."""
    status: object = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, opened, _, _ = socket.recv_fds(call, 1, 3)
        for number, file in enumerate(opened):
            os.dup2(file, number)
        with call.makefile() as words:
            folder, environment, sys.argv = json.load(words)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        status = program()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        call.sendall(str(int(status or 0) if isinstance(status, int | None) else 1).encode())
        os._exit(0)
