"""The tree of errors, and where every rank stood when a run ended badly.

    ShardproofError
    |-- RequestError        2  the request was wrong: a case, a name, a size, a path
    |-- ProgramError        1  the program under test failed
    |   |-- RankRaised         a rank raised; its exception is __cause__, type and traceback kept
    |   |-- NotComputed        it issued an operator of torch that the engine does not know: nothing is known of it
    |   |-- RankCrashed        a rank ended its own process: a crash in native code, os._exit
    |   |-- NoNumbers          it looked at a number on an engine that has shapes alone: nothing is known of it
    |   |-- Desynchronised     the ranks do not issue the same calls: mismatch | skipped | deadlock
    |   |-- Stalled            a rank does not come to its next call, and all others wait for it or have ended
    |   `-- Raced              a rank changed a tensor of a call in flight
    `-- MachineError        3  the machine failed
        |-- TimeLimit          the run did not end in time; says which rank ran, and at which line
        `-- RankDied           the process of a rank was ended from outside

The numbers are the exit statuses of the command line. A message starts with the root cause, then one line a rank.
"""

import copyreg
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

_LISTED = 32
"""The most ranks whose positions a message prints; `positions` always holds all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where one rank stood.

    `state`: "waits in" a call, "passed" the call in which ranks disagree, "finished", "raised", "died", "not started".
    Outside of calls it is "runs", or "is stopped" by a signal. `number` counts this rank's calls in `group` from 0 (-1:
    in no call); point-to-point calls are counted apart. `detail` is what the call says (reduce op, dtype, shape), or
    the exception's text. `caller` is "file:line in function" of the user's code; `stack` all such lines of a process,
    innermost first.
    """

    rank: int
    state: str
    op: str = ""
    number: int = -1
    group: str = ""
    detail: str = ""
    caller: str = ""
    stack: tuple[str, ...] = ()

    @property
    def call(self) -> str:
        """The call in words, "" outside of calls: all_reduce #3 of tp (0 1)."""
        return f"{self.op} #{self.number} of {self.group}" if self.op else ""

    def __str__(self) -> str:
        text = f"rank {self.rank}: {self.state}"
        if self.op:
            text += f" {self.call}"
        if self.detail:
            text += f": {self.detail}"
        return text + (f", at {self.caller}" if self.caller else "")


class ShardproofError(Exception):
    """Every error that this package raises on purpose. `exit_status` is that of the command line."""

    exit_status: ClassVar[int] = 3


class RequestError(ShardproofError):
    """The request was wrong. The message names the field, the value, the rule and a legal value."""

    exit_status = 2


@contextmanager
def guard_file(
    what: str, legal: str, *, failed: str = "cannot be written", kind: type[RequestError] = RequestError
) -> Iterator[None]:
    """Use a file or folder in the body. Raises `kind`, with `what` it is and the reason, if the system refuses."""
    try:
        yield
    except OSError as problem:
        raise kind(f"{what}: {failed} ({problem.strerror or problem}); legal: {legal}") from problem


class _RunError(ShardproofError):
    """A run that ended badly: `cause` in one line, `ranks` that are to blame, `positions` of all ranks by rank.

    `site`: step (from 0, -1 if unknown), phase and module where the program was, "" as far as they are unknown.
    """

    site: tuple[int, str, str] = (-1, "", "")

    def __init__(self, cause: str, *, ranks: Sequence[int] = (), positions: Sequence[Position] = ()) -> None:
        self.cause = cause
        self.ranks = tuple(ranks)
        self.positions = tuple(positions)
        lines = [cause, *(f"  {position}" for position in self.positions[:_LISTED])]
        if len(self.positions) > _LISTED:
            lines.append(f"  and {len(self.positions) - _LISTED} more ranks")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as it is: the words of __init__ are no positional arguments."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ProgramError(_RunError):
    """The program under test failed."""

    exit_status = 1


class RankRaised(ProgramError):
    """A rank raised; `__cause__` is its exception. `ranks` lists every rank that raised, the first one first."""


class RankCrashed(ProgramError):
    """The program ended the process of a rank too early: by a crash in native code, or `os._exit`."""


class NoNumbers(ProgramError):
    """A rank read a value on an engine whose tensors have none: it cannot be run dry, and may well be right."""


class NotComputed(ProgramError):
    """A rank issued an operator of torch that the engine does not know and cannot compute: it may well be right."""


class Desynchronised(ProgramError):
    """The ranks do not issue the same calls.

    `kind`: "mismatch" (they meet in one call and say different things), "skipped" (a rank ended without a call in which
    others wait). "deadlock": every rank waits for another one.
    """

    def __init__(self, cause: str, *, kind: str, ranks: Sequence[int], positions: Sequence[Position]) -> None:
        self.kind = kind
        super().__init__(cause, ranks=ranks, positions=positions)


class Stalled(ProgramError):
    """A rank ran, slept or was stopped until the time limit, and all others waited for it or had ended.

    No rank had issued a call in the second half of the limit.
    """


class Raced(ProgramError):
    """A rank changed a tensor of an asynchronous call before it waited for the call."""


class MachineError(_RunError):
    """The machine failed: nothing is known about the program's correctness."""

    exit_status = 3


class TimeLimit(MachineError):
    """The run did not end in time. `abandoned` lists ranks that could not be interrupted."""

    def __init__(
        self,
        cause: str,
        *,
        ranks: Sequence[int] = (),
        positions: Sequence[Position] = (),
        abandoned: Sequence[int] = (),
    ) -> None:
        self.abandoned = tuple(abandoned)
        super().__init__(cause, ranks=ranks, positions=positions)


class RankDied(MachineError):
    """The process of a rank was ended from outside too early: killed, out of memory, gone."""


def error_text(error: BaseException) -> str:
    """An exception in one line: its type and the first line of its text, with " ..." if more lines follow.

    A first line that ends in a colon is joined to the next one. A user's exception may raise in its own `str`; then
    that error's text is returned. Characters that no file can hold (half of a surrogate pair) are written as escapes.
    """
    try:
        message = str(error).encode("utf-8", "backslashreplace").decode("utf-8")
        lines = [line for line in message.splitlines() if line.strip()]
    except Exception as problem:
        lines = [f"(what it says cannot be read: its __str__ raised {type(problem).__name__})"]
    while len(lines) > 1 and lines[0].endswith(":"):
        lines[:2] = [f"{lines[0]} {lines[1].strip()}"]
    return type(error).__name__ + (f": {lines[0]}" if lines else "") + (" ..." if len(lines) > 1 else "")


def install_text(error: BaseException) -> str:
    """Advice after an import that failed because a package is missing; "" for any other exception."""
    name = str(error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    try:
        missing = name.isidentifier() and name not in sys.modules and importlib.util.find_spec(name) is None
    except (ImportError, ValueError, AttributeError):  # a module that is half imported
        missing = False
    return f"the package {name} is not installed here; legal: pip install the package that has it" if missing else ""


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as messages print them, in the given order: "0 1 3"; more than four in a row as "0-7"."""
    words: list[str] = []
    start = 0
    while start < len(ranks):
        end = start
        while end + 1 < len(ranks) and ranks[end + 1] == ranks[end] + 1:
            end += 1
        run = ranks[start : end + 1]
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 4 else map(str, run)
        start = end + 1
    return " ".join(words)


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks with the word before them: "rank 3", "ranks 0 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"
