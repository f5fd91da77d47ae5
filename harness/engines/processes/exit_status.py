"""How the process of a rank ended, in words, and whether the program that it ran ended it.

A crash (SIGSEGV, SIGABRT, ...) and an exit status come from the program that the process ran. Any other signal comes
from outside: SIGKILL as the system sends it when memory runs out, SIGTERM from a launcher.
"""

import signal
from typing import NamedTuple

OUR_STATUS = 70
"""The exit status of a rank's process that a bug of this package has ended: EX_SOFTWARE of sysexits.h."""
_CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"})


class ProcessEnd(NamedTuple):
    """How a process ended, in `words`; `by_program`: whether the program that it ran ended it."""

    words: str
    by_program: bool = False


def process_end(code: int) -> ProcessEnd:
    """The end of a process with this code, as subprocess has it: its exit status, or minus the signal's number."""
    if code >= 0:
        return ProcessEnd(f"its process ended with exit status {code}", code != OUR_STATUS)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    words = f"killed by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")
    return ProcessEnd(words, name in _CRASHES)
