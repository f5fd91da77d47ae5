"""The file that --emit-repro names: whether it can be written is known before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from harness.errors import RequestError


def check_target(file: str) -> None:
    """Raise RequestError unless a file can be written there, before minutes are spent on it; leave no new one."""
    fresh = not os.path.lexists(file)
    with writing(file):
        # Not blocking: a pipe without a reader is an error and no endless wait.
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666))
        if fresh:
            os.unlink(file)


@contextmanager
def writing(file: str) -> Iterator[None]:
    """Write there. Raises RequestError, naming the file and the reason, when the system refuses."""
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or str(problem)
        legal = "a file in a folder with write permission"
        raise RequestError(f"emit-repro={file}: cannot be written ({reason}); legal: {legal}") from problem
