"""Output of ranks: a line that several of them print, or one of them in every run of a case, is shown once.

    with shown_once():              # in the process, around a case
        with rank_output():         # in the thread of each rank, around its program
            print("loss 0.5")

A line is shown as soon as the first rank prints it. At the end one line says how many lines were repeated, and how
often. A line that one rank prints three times is shown three times. Lines of torch's log count as equal whatever rank,
time and process they name. An unfinished line is shown when it is flushed, and under a debugger everything is shown.
What ranks in processes of their own print is left as it is.

A case shows its first 10,000 lines and its last 100; between them lines are counted and not kept.
"""

import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from typing import Any

from shardproof.harness.engines.processes.workers import handlers_of

_Line = tuple[int, str]
"""The number of a stream (standard output, error) and the text."""
_FIRST, _LAST = 10_000, 100
"""The most lines of a case that are shown as they come, and at its end."""
_CHARACTERS = 4_000_000
"""The most characters of the first lines together."""
_LONGEST = 4_000
"""The most characters of an unfinished line that are held back, and of each of the last lines."""
_LOGGED = re.compile(r"^(?:\[rank\d+\]:)?([VDIWEC])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ")
"""The beginning of a line of torch's log: rank, level and day, time, process. File, line and message follow."""


class _Printed:
    """What one rank prints in one run: how often it printed each line, and its unfinished lines, by stream."""

    def __init__(self) -> None:
        self.lines: Counter[_Line] = Counter()
        self.open: dict[int, tuple[_Stream, str]] = {}


_PRINTED: ContextVar[_Printed | None] = ContextVar("shardproof_rank_output", default=None)
"""The prints of the rank of this thread, None outside of a rank."""


@contextmanager
def shown_once() -> Iterator[None]:
    """Inside, lines that several ranks print on standard output or error are counted instead of shown again."""
    shown, lock = _Shown(), threading.Lock()
    out, err = (_Stream(place, under, shown, lock) for place, under in enumerate((sys.stdout, sys.stderr)))
    handlers = handlers_of(out.under, err.under)
    for handler in handlers:
        handler.setStream(out if handler.stream is out.under else err)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield
    finally:
        for handler in handlers:
            handler.setStream(handler.stream.under)
        for line in filter(None, (shown.summary(), shown.left_out())):
            err.under.write(f"{line}\n")
        for place, text in shown.last:
            (out, err)[place].under.write(f"{text}\n")


class _Shown:
    """The lines of a case: how often each was shown and not shown. `last` are those after the first lines."""

    def __init__(self) -> None:
        self.shown: Counter[_Line] = Counter()
        self.repeated: Counter[_Line] = Counter()
        self.last: dict[_Line, None] = {}
        self._characters = self._later = 0

    def is_one_of_the_first(self, line: _Line) -> bool:
        """Whether this line belongs to the first lines. Otherwise it is kept while it is one of the last."""
        if line in self.shown:
            return True
        if len(self.shown) < _FIRST and self._characters + len(line[1]) <= _CHARACTERS:
            self._characters += len(line[1])
            return True
        self._later += 1
        kept = line[0], line[1][:_LONGEST]
        self.last.pop(kept, None)
        self.last[kept] = None
        if len(self.last) > _LAST:
            del self.last[next(iter(self.last))]
        return False

    def left_out(self) -> str:
        """A line that says how many lines came after the first, else ""."""
        if not self._later:
            return ""
        rest = f"{self._later:,} more lines in all runs of the case"
        return f"(the ranks printed {rest}; the last {len(self.last)} different ones follow)"

    def is_new(self, line: _Line, times: int) -> bool:
        """Count the n-th time that a rank prints a line. Returns whether no rank has printed it so often in any run."""
        new = times > self.shown[line]
        (self.shown if new else self.repeated)[line] += 1
        return new

    def summary(self) -> str:
        """A line that says how much was repeated, and how often, else ""."""
        times = [(self.shown[line] + count) // self.shown[line] for line, count in self.repeated.items() if line[1]]
        if not times:
            return ""
        lines = f"{len(times)} lines" if len(times) > 1 else "1 line"
        often = f"{min(times)} to {max(times)}" if min(times) < max(times) else f"{max(times)}"
        return f"({lines} that the ranks printed {often} times {'are' if len(times) > 1 else 'is'} shown once)"


class _Stream:
    """Replaces a text stream. An attribute that it does not define is that of the stream."""

    def __init__(self, place: int, under: Any, shown: _Shown, lock: threading.Lock) -> None:
        self.under = under
        self._place, self._shown, self._lock = place, shown, lock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.under, name)

    def write(self, text: str) -> int:
        """Write the lines that no rank has printed so often in any run, and everything written outside of ranks."""
        mine = _PRINTED.get()
        if mine is None or sys.gettrace() is not None:
            self.under.write(text)
            return len(text)
        before = mine.open.pop(self._place, (self, ""))[1]
        *lines, rest = (before + text).split("\n")
        with self._lock:
            for line in lines:
                key = self._place, _LOGGED.sub(r"\1 ", line)
                if self._shown.is_one_of_the_first(key):
                    mine.lines[key] += 1
                    if self._shown.is_new(key, mine.lines[key]):
                        self.under.write(f"{line}\n")
        if len(rest) > _LONGEST:
            self.under.write(rest)
        elif rest:
            mine.open[self._place] = self, rest
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write one after the other."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Show the unfinished lines of a rank, and flush."""
        mine = _PRINTED.get()
        if mine is not None:
            self.under.write(mine.open.pop(self._place, (self, ""))[1])
        self.under.flush()


@contextmanager
def rank_output() -> Iterator[None]:
    """Mark this thread as running a rank's program."""
    mine = _Printed()
    token = _PRINTED.set(mine)
    try:
        yield
    finally:
        for stream, _text in list(mine.open.values()):
            stream.write("\n")
        _PRINTED.reset(token)
