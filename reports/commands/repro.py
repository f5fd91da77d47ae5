"""`shardproof run --emit-repro`: the first failure of a run, made small, as a script."""

import dataclasses
from pathlib import Path

from shardproof.harness.errors import ShardproofError
from shardproof.harness.protocols import CaseLike, case_text
from shardproof.harness.reproducing import repro
from shardproof.harness.running.engines import engine_named
from shardproof.harness.running.request import Request
from shardproof.harness.running.run_result import INTERRUPTED, RunResult
from shardproof.harness.verdicts.verdict import FAIL
from shardproof.harness.verdicts.words import when_line
from shardproof.reports.options.request import check_writing
from shardproof.reports.stored.failures import simplicity_key


def with_script(result: RunResult, request: Request, file: str) -> RunResult:
    """The result with a note on the script of --emit-repro: where it was written, or why it was not."""
    try:
        if result.exit_status == INTERRUPTED:
            raise KeyboardInterrupt
        note = _write_script(result, request, file)
    except ShardproofError as problem:
        note = str(problem)
    except KeyboardInterrupt:
        note = f"{file} was not written: interrupted"
        result = dataclasses.replace(result, exit_status=INTERRUPTED)
    except Exception as problem:  # an error of the subject while it is shrunk must not lose the verdicts
        note = f"{file} was not written: {type(problem).__name__}: {problem}"
    return dataclasses.replace(result, notes=(*result.notes, note))


def _write_script(result: RunResult, request: Request, file: str) -> str:
    """Write the script. Returns a line that names it, or says why it was not written.

    The case is shrunk on threads of this process, whatever engine found the failure. Raises RequestError if the file
    cannot be written.
    """
    failed = {one.case: one.failure and one.failure.when for one in result.verdicts if one.verdict == FAIL}
    if not failed:
        return f"{file} was not written: no case failed"
    with engine_named("inproc") as engine:
        first = min((case for case in request.cases if case_text(case) in failed), key=_simplicity_key)
        when = failed[case_text(first)]
        text = repro.emit(first, request.subject, engine, when_line(when) if when else "")
    if text is None:
        return (
            f"{file} was not written: no returned tensor is wrong and the subject finishes, so a script shows nothing"
        )
    with check_writing(file):
        Path(file).write_text(text, encoding="utf-8")
    return f"{file} repeats {repro.shown_name(text) or 'how the subject ends'}: run it with python {file}"


def _simplicity_key(case: CaseLike) -> tuple[float, ...]:
    """The order in which failures are shown."""
    words = {name: getattr(case, name) for name in ("dtype", "world_size", "steps", "micro")}
    return simplicity_key({**words, "case": case_text(case)})
