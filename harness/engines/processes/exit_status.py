"""How the process of a rank ended, in words, and whose doing that was.

A crash (SIGSEGV, SIGABRT, ...) and an exit status come from the program that the process ran. Any other signal comes
from outside: SIGKILL as the system sends it when memory runs out, SIGTERM from a launcher.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["OUR_STATUS", "Ending", "ending", "own_doing", "vanished"]

OUR_STATUS = 70
"""The exit status of a rank's process that a bug of ours has ended: EX_SOFTWARE of sysexits.h."""
_CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"})


class Ending(NamedTuple):
    """`words` say how a process ended; `own`: by the doing of the program that it ran."""

    words: str
    own: bool


def ending(code: int) -> Ending:
    """The end of a process with this code, as subprocess has it: its exit status, or minus the signal's number."""
    if code >= 0:
        return Ending(f"its process ended with exit status {code}", code != OUR_STATUS)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    words = f"killed by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")
    return Ending(words, name in _CRASHES)


def vanished(words: str) -> Ending:
    """The end of a process of which nothing else is known."""
    return Ending(words, False)


def own_doing(endings: Iterable[Ending]) -> bool:
    """Whether the program ended all of these: one rank that was ended from outside may take the others along."""
    return all(one.own for one in endings)
