"""Prints of one rank in one run: its lines, which the process around it shows once (harness.running.ranks.output)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

Line = tuple[int, str]
"""The place of a stream among the two, and the text."""


class Written(Protocol):
    """A stream that a rank writes to."""

    def write(self, text: str) -> int:
        """Take a text."""
        ...


class Printed:
    """Prints of one rank in one run: how often each line, and the lines that are not over, by stream."""

    def __init__(self) -> None:
        self.lines: Counter[Line] = Counter()
        self.open: dict[int, tuple[Written, str]] = {}


PRINTED: ContextVar[Printed | None] = ContextVar("shardproof_rank_output", default=None)
"""Prints of the rank of this thread, None outside of a rank."""


@contextmanager
def rank_output() -> Iterator[None]:
    """This thread runs a rank's program until the context is left."""
    mine = Printed()
    token = PRINTED.set(mine)
    try:
        yield
    finally:
        for stream, _text in list(mine.open.values()):
            stream.write("\n")
        PRINTED.reset(token)
