"""`shardproof run --emit-repro FILE`: the simplest failing case, shrunk and written as a script that stands alone."""

from __future__ import annotations

from pathlib import Path

from harness.checking.evidence import FAIL
from harness.diagnosing.six_lines import line_of
from harness.engines.named import engine_named
from harness.protocols import CaseLike, case_text
from harness.running.request import Request
from harness.running.run import RunResult
from reports.options.script_file import writing


def write_script(result: RunResult, request: Request, file: str) -> str:
    """Write the script; returns one line that names it, or why it was not written.

    The case is shrunk on threads of this process, whatever engine found the failure. Raises RequestError when the file
    cannot be written.
    """
    from harness.reproducing.repro import emit, shown_name  # noqa: PLC0415  (imports DTensor: half a second)

    failed = {verdict.case: line_of(verdict.message, "when") for verdict in result.verdicts if verdict.verdict == FAIL}
    if not failed:
        return f"{file} was not written: no case failed"
    with engine_named("inproc") as engine:
        first = min((case for case in request.cases if case_text(case) in failed), key=_simplicity)
        text = emit(first, request.subject, engine, failed[case_text(first)])
    if text is None:
        return (
            f"{file} was not written: no returned tensor is wrong and the subject finishes, so a script shows nothing"
        )
    with writing(file):
        Path(file).write_text(text, encoding="utf-8")
    return f"{file} repeats {shown_name(text) or 'how the subject ends'}: run it with python {file}"


def _simplicity(case: CaseLike) -> tuple[float, ...]:
    """The order in which failures are shown."""
    from reports.stored.bugs import simplicity  # noqa: PLC0415  (loads pandas)

    words = {name: getattr(case, name) for name in ("dtype", "world_size", "steps", "micro")}
    return simplicity({**words, "case": case_text(case)})
