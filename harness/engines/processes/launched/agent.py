"""The agent of a rank, as in torch elastic: the launched process keeps a child that runs the programs, and monitors it.

The rank's program runs in a child process, so that one that hangs can be ended and one that dies is reported, while
the launched process stays and the next run gets a fresh child. `relay` passes messages on without reading them:

    from rank 0's engine     START number   RUN order   WHERE number   LEAVE   KILL   END
    to it                    ANSWERED answer    DIED exit status

Times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from harness.engines.processes.launched.environment import Launched
from harness.interpreter import spawned

START, RUN, WHERE, LEAVE, KILL, END = b"S", b"R", b"W", b"L", b"K", b"E"
"""START and WHERE are both answered with the rank's position; START makes a child where there is none. A rank that has
ended keeps its groups until LEAVE, for others may still be reading what it sent."""
ANSWERED, DIED = b"S", b"D"
_JOIN_S = 5.0
"""How long a child that was killed may take to end."""

Life = Callable[[Connection, Launched], None]


@dataclass(slots=True, eq=False)
class _Child:
    """A child process and our end of its pipe."""

    process: BaseProcess
    pipe: Connection

    @classmethod
    def start(cls, life: Life, place: Launched) -> _Child:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=spawned(life), args=(theirs, place), name=f"rank {place.rank}", daemon=True)
        process.start()
        theirs.close()  # so that a dead child shows as the end of its pipe
        return cls(process, ours)

    def end(self) -> int:
        """End the child whatever it does; its exit code."""
        self.process.kill()
        self.process.join(_JOIN_S)
        self.pipe.close()
        return self.process.exitcode or 0


def relay(link: Connection, life: Life, place: Launched) -> bool:
    """Serve rank 0's engine until it ends; True when it sent END, False when it vanished."""
    child: _Child | None = None
    try:
        while True:
            ready = wait([link] if child is None else [link, child.pipe])
            if child is not None and child.pipe in ready:
                child = _pass_on(link, child)
            if link in ready:
                order = link.recv_bytes()
                if order[:1] == END:
                    return True
                child = _carry_out(order, child, life, place)
    except (EOFError, OSError):  # rank 0 is gone
        return False
    finally:
        if child is not None:
            child.end()
        link.close()


def _carry_out(order: bytes, child: _Child | None, life: Life, place: Launched) -> _Child | None:
    """Carry out an order: end the child, or pass the order to it, to a new one where there is none."""
    if order[:1] == KILL:
        if child is not None:
            child.end()
        return None
    if child is None and order[:1] == START:
        child = _Child.start(life, place)
    if child is not None:
        with suppress(OSError):  # it has just died, and the end of its pipe will show it
            child.pipe.send_bytes(order)
    return child


def _pass_on(link: Connection, child: _Child) -> _Child | None:
    """Send rank 0 the answer of the child, or that it died."""
    try:
        answer = child.pipe.recv_bytes()
    except (EOFError, OSError):
        child.process.join(_JOIN_S)
        link.send_bytes(DIED + str(child.end()).encode())
        return None
    link.send_bytes(ANSWERED + answer)
    return child
