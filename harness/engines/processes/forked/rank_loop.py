"""The life of a rank's process in the pool: job after job, each in a world of its own, until the socket closes.

A job is answered as soon as the program has ended; its groups stay until the supervisor says that all ranks have, since
a rank that closed its connections earlier would fail others that are still reading.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed import PrefixStore, TCPStore

from harness.engines.interposer import Interposer
from harness.engines.processes import messages as mailbox
from harness.engines.processes.flight_recorder import Writer
from harness.engines.processes.forked import stacks
from harness.engines.processes.forked.cpu_affinity import Placement
from harness.engines.processes.forked.kept_groups import KeptGroups
from harness.engines.processes.rank_program import Ended, ended, seeded, world
from harness.errors import RequestError, error_text
from harness.torch_internals.modes import not_deterministic

__all__ = ["HOST", "Job", "Reply", "serve"]

HOST = "127.0.0.1"
_FOREVER_S = 86400.0
"""The supervisor's limit is the only one: a rank that gave up by itself would hide who was to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run as one rank is told of it. `program` is the pickled (program, args).

    `link` changes when the processes of a run do: connections made under another one are of no use.
    """

    run: int
    rank: int
    world_size: int
    link: int
    port: int
    seed: int
    folder: str
    path: tuple[str, ...]
    program: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """How a job ended. `refused` says why the program could not be read, `broken` why there was no world to run it in.

    `unwaited` are the places, among the rank's asynchronous calls, of those that nobody waited for. `kept` is how many
    groups are kept; `reusable` is False when the program has left threads behind.
    """

    run: int
    ended: Ended | None = None
    refused: str = ""
    broken: str = ""
    unwaited: tuple[int, ...] = ()
    kept: int = 0
    reusable: bool = True


def serve(link: socket.socket, board: int) -> None:
    """Do what comes over the link until it closes."""
    stacks.offer(board)
    log = Writer(board)
    try:
        with Interposer(log=log) as interposer:
            ranks = _Ranks(link, log, interposer)
            while True:
                job: Job | None = mailbox.unpacked(mailbox.receive(link))
                if job is not None:
                    ranks.work(job)
    except (EOFError, ConnectionError):  # the supervisor has closed the link: this rank is not needed any more
        return


class _Ranks:
    """What stays from job to job: the connection to the store, the kept groups."""

    def __init__(self, link: socket.socket, log: Writer, interposer: Interposer) -> None:
        self._link = link
        self._log = log
        self._interposer = interposer
        self._kept = KeptGroups(log.makes)
        self._placement = Placement()
        self._store: Any = None
        self._port = 0

    def work(self, job: Job) -> None:
        """Run one job and answer it."""
        sys.path[:] = job.path
        os.chdir(job.folder)
        imported = len(sys.modules)
        try:
            program, args = mailbox.unpacked(job.program)
        except Exception as problem:  # whatever importing a user's module raises
            self._answer(Reply(run=job.run, refused=error_text(problem)))
            return
        if len(sys.modules) != imported:
            self._interposer.look_for_more()
        if job.port != self._port:
            self._store = TCPStore(HOST, job.port, is_master=False, timeout=timedelta(seconds=60))
            self._port = job.port
        store = PrefixStore(f"{job.run}/", self._store)
        answered = False
        self._placement.take(job.rank, job.world_size)
        try:
            self._log.begin(job.run)
            with self._kept.used(job.link), world(job.rank, job.world_size, store, _FOREVER_S):
                seeded(job.seed)
                found = ended(job.rank, program, args)
                _restore()
                answered = True
                self._answer(
                    Reply(
                        run=job.run,
                        ended=found,
                        unwaited=self._log.waits.unwaited(),
                        kept=len(self._kept),
                        reusable=threading.active_count() == 1,
                    )
                )
                del program, args, found
                self._wait_for_all()
        except (RuntimeError, ValueError) as problem:
            if not answered:
                self._answer(Reply(run=job.run, broken=error_text(problem)))

    def _answer(self, reply: Reply) -> None:
        try:
            message = mailbox.packed(reply)
        except Exception as problem:  # whatever a user's own pickling raises
            rank = reply.ended.rank if reply.ended is not None else 0
            text = f"the result cannot be sent from the rank's process: {error_text(problem)}"
            failed = Ended(rank=rank, error=RequestError(text), detail=text)
            message = mailbox.packed(Reply(run=reply.run, ended=failed))
        try:
            mailbox.send(self._link, message)
        except ConnectionError:
            _vanish()

    def _wait_for_all(self) -> None:
        """Until the supervisor says that all ranks have ended."""
        try:
            mailbox.receive(self._link)
        except (EOFError, ConnectionError):
            _vanish()


def _vanish() -> NoReturn:
    """End at once: the driver is gone in the middle of a run, and torch, taking its world down, would print at length
    that the store is gone too.
    """
    os._exit(0)


def _restore() -> None:
    """Give torch's switches back that a program may have left changed."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    not_deterministic()
