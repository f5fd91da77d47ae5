"""`shardproof run --emit-repro FILE`: the first failing case, shrunk and written as a script that stands alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.checking.evidence import FAIL
from harness.errors import RequestError
from harness.protocols import case_text
from harness.reproducing.repro import emit, shown_name
from harness.running.run import Request, RunResult, engine_named

__all__ = ["check_target", "write_script"]


def check_target(file: str) -> None:
    """Raise RequestError unless a file can be written there, before minutes are spent on it; leave no new one."""
    fresh = not os.path.lexists(file)
    with _writing(file):
        # Not blocking: a pipe that nobody reads is an error and no wait without end.
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666))
        if fresh:
            os.unlink(file)


@contextmanager
def _writing(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or str(problem)
        legal = "a file in a folder with write permission"
        raise RequestError(f"emit-repro={file}: cannot be written ({reason}); legal: {legal}") from problem


def write_script(result: RunResult, request: Request, file: str) -> str:
    """Write the script and say so in one line, or say why it was not written.

    The case is shrunk on threads of this process, whatever engine found the failure. Raises RequestError when the file
    cannot be written.
    """
    failed = {verdict.case for verdict in result.verdicts if verdict.verdict == FAIL}
    if not failed:
        return f"{file} was not written: no case failed"
    with engine_named("inproc") as engine:
        first = next(case for case in request.cases if case_text(case) in failed)
        text = emit(first, request.subject, engine)
    if text is None:
        return (
            f"{file} was not written: no returned tensor is wrong and the subject finishes, so a script shows nothing"
        )
    with _writing(file):
        Path(file).write_text(text, encoding="utf-8")
    return f"{file} repeats {shown_name(text) or 'how the subject ends'}: run it with python {file}"
