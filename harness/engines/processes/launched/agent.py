"""What every process of a launched world does for its rank: keeps a child that runs the programs, and speaks for it.

The rank's program runs in a child process, so that one that hangs can be ended and one that dies is told about, while
the launched process stays and the next run gets a fresh child. `relay` passes bytes on and looks into none of them:

    from rank 0's engine     START number   RUN order   WHERE number   LEAVE   KILL   END
    to it                    SAID answer    DIED exit status

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

__all__ = ["DIED", "END", "KILL", "LEAVE", "RUN", "SAID", "START", "WHERE", "relay"]

START, RUN, WHERE, LEAVE, KILL, END = b"S", b"R", b"W", b"L", b"K", b"E"
"""START and WHERE are both answered with the rank's position; START makes a child where there is none. A rank that has
ended keeps its groups until it is told to LEAVE, for others may still be reading what it sent."""
SAID, DIED = b"S", b"D"
_JOIN_S = 5.0
"""How long a child that was told to end, or killed, may take."""

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
        process = context.Process(target=life, args=(theirs, place), name=f"rank {place.rank}", daemon=True)
        process.start()
        theirs.close()  # so that a dead child shows as the end of its pipe
        return cls(process, ours)

    def end(self) -> int:
        """End the child whatever it does, and say how it ended."""
        self.process.kill()
        self.process.join(_JOIN_S)
        self.pipe.close()
        return self.process.exitcode or 0


def relay(hub: Connection, life: Life, place: Launched) -> bool:
    """Serve rank 0's engine until it ends; whether it said so, rather than vanish."""
    child: _Child | None = None
    try:
        while True:
            ready = wait([hub] if child is None else [hub, child.pipe])
            if child is not None and child.pipe in ready:
                child = _pass_on(hub, child)
            if hub in ready:
                order = hub.recv_bytes()
                if order[:1] == END:
                    return True
                child = _obey(order, child, life, place)
    except (EOFError, OSError):  # rank 0 is gone, so nobody is left to be told
        return False
    finally:
        if child is not None:
            child.end()
        hub.close()


def _obey(order: bytes, child: _Child | None, life: Life, place: Launched) -> _Child | None:
    """End the child, or hand it an order, to a new one where there is none."""
    if order[:1] == KILL:
        if child is not None:
            child.end()
        return None
    if child is None and order[:1] == START:
        child = _Child.start(life, place)
    if child is not None:
        with suppress(OSError):  # it has just died, which the end of its pipe will tell
            child.pipe.send_bytes(order)
    return child


def _pass_on(hub: Connection, child: _Child) -> _Child | None:
    """What the child says, or that it died."""
    try:
        answer = child.pipe.recv_bytes()
    except (EOFError, OSError):
        child.process.join(_JOIN_S)
        hub.send_bytes(DIED + str(child.end()).encode())
        return None
    hub.send_bytes(SAID + answer)
    return child
