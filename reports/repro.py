"""`shardproof run --emit-repro FILE`: the first failing case, shrunk and written as a script that stands alone."""

from __future__ import annotations

from pathlib import Path

from harness.diagnosing.repro import emit, shown_name
from harness.errors import RequestError
from harness.evidence import FAIL
from harness.run import RunResult, engine_named, parse_cases

__all__ = ["write_script"]


def write_script(result: RunResult, subject: str, file: str) -> str:
    """Write the script and say so in one line, or say why it was not written.

    The case is shrunk on threads of this process, whatever engine found the failure. Raises RequestError when the file
    cannot be written.
    """
    failed = next((verdict.case for verdict in result.verdicts if verdict.verdict == FAIL), "")
    if not failed:
        return f"{file} was not written: no case failed"
    with engine_named("inproc") as engine:
        text = emit(parse_cases([failed])[0], subject, engine)
    if text is None:
        return (
            f"{file} was not written: no returned tensor is wrong and the subject finishes, so a script shows nothing"
        )
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise RequestError(
            f"emit-repro={file}: cannot be written ({reason}); legal: a file in a folder with write permission"
        ) from problem
    return f"{file} repeats {shown_name(text) or 'how the subject ends'}: run it with python {file}"
