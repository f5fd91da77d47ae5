"""Output of ranks: a line that several of them print, or one of them in every run of a case, is shown once.

    with shown_once():              # in the process, around a case
        with rank_output():         # in the thread of each rank, around its program
            print("loss 0.5")

A line is shown as soon as the first rank prints it. At the end one line counts the repeated lines and how often they
were. A line that one rank prints three times is shown three times. Text without a line feed at its end is shown when it
is flushed, and all is shown under a debugger. Ranks in processes of their own print as they do.
"""

import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from typing import Any

_Line = tuple[int, str]
"""The place of a stream among the two, and the text."""


class _Printed:
    """Prints of one rank in one run: how often each line, and the lines that are not over, by stream."""

    def __init__(self) -> None:
        self.lines: Counter[_Line] = Counter()
        self.open: dict[int, tuple[_Stream, str]] = {}


_PRINTED: ContextVar[_Printed | None] = ContextVar("shardproof_rank_output", default=None)
"""Prints of the rank of this thread, None outside of a rank."""


@contextmanager
def shown_once() -> Iterator[None]:
    """In the body, lines that ranks repeat on standard output and error are counted in place of being shown again."""
    shown, lock = _Shown(), threading.Lock()
    out, err = (_Stream(place, under, shown, lock) for place, under in enumerate((sys.stdout, sys.stderr)))
    handlers = [handler for handler in _handlers() if handler.stream in (out.under, err.under)]
    for handler in handlers:
        handler.setStream(out if handler.stream is out.under else err)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield
    finally:
        for handler in handlers:
            handler.setStream(handler.stream.under)
        if summary := shown.summary():
            err.under.write(f"{summary}\n")


def _handlers() -> list[Any]:
    """The handlers of all loggers that write to a stream that they took when they were made.

    logging's last resort, and handlers of libraries, look for sys.stderr at each line; their stream cannot be set.
    """
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    handlers = {id(handler): handler for logger in loggers for handler in logger.handlers}
    return [each for each in handlers.values() if isinstance(each, logging.StreamHandler) and "stream" in vars(each)]


class _Shown:
    """The lines of a case: how often each was shown, and how often it was not."""

    def __init__(self) -> None:
        self.shown: Counter[_Line] = Counter()
        self.repeated: Counter[_Line] = Counter()

    def is_new(self, line: _Line, times: int) -> bool:
        """Count a line that a rank prints for the n-th time; whether no rank has in any run so far."""
        new = times > self.shown[line]
        (self.shown if new else self.repeated)[line] += 1
        return new

    def summary(self) -> str:
        """How much was repeated, and how often: "" when nothing was."""
        times = [(self.shown[line] + count) // self.shown[line] for line, count in self.repeated.items() if line[1]]
        if not times:
            return ""
        lines = f"{len(times)} line{'s' if len(times) > 1 else ''}"
        often = f"{min(times)} to {max(times)}" if min(times) < max(times) else f"{max(times)}"
        return f"(what the ranks repeated is shown once: {lines}, {often} times)"


class _Stream:
    """Stands for a text stream; what it does not change is the stream's own."""

    def __init__(self, place: int, under: Any, shown: _Shown, lock: threading.Lock) -> None:
        self.under = under
        self._place, self._shown, self._lock = place, shown, lock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.under, name)

    def write(self, text: str) -> int:
        """Write what is new among the lines of a rank, and whatever others write."""
        mine = _PRINTED.get()
        if mine is None or sys.gettrace() is not None:
            self.under.write(text)
            return len(text)
        before = mine.open.pop(self._place, (self, ""))[1]
        *lines, rest = (before + text).split("\n")
        with self._lock:
            for line in lines:
                mine.lines[self._place, line] += 1
                if self._shown.is_new((self._place, line), mine.lines[self._place, line]):
                    self.under.write(f"{line}\n")
        if rest:
            mine.open[self._place] = self, rest
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write one after the other."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Show what a rank has begun, and flush."""
        mine = _PRINTED.get()
        if mine is not None:
            self.under.write(mine.open.pop(self._place, (self, ""))[1])
        self.under.flush()


@contextmanager
def rank_output() -> Iterator[None]:
    """This thread runs a rank's program until the context is left."""
    mine = _Printed()
    token = _PRINTED.set(mine)
    try:
        yield
    finally:
        for stream, _text in list(mine.open.values()):
            stream.write("\n")
        _PRINTED.reset(token)
