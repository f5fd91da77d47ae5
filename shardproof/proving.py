"""`prove` and `run` as users call them: a case as text, an engine by its word; the rest is the harness's own.

`prove` runs one case and returns its verdicts, `run` any number of cases and writes a run folder.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from shardproof.harness.engines.engine import Engine
from shardproof.harness.protocols import CaseLike, Subject
from shardproof.harness.running import proof
from shardproof.harness.running import run as running
from shardproof.harness.running.engines import engine_named
from shardproof.harness.running.request import Request
from shardproof.harness.running.result import CaseResult
from shardproof.harness.running.run_result import RunResult
from shardproof.harness.subject import case_of, cases_of, resolve_subject


def prove(
    case: str | CaseLike,
    subject: str | Subject,
    engine: str | Engine = "inproc",
    *,
    truth: str = "",
    device: str = "cpu",
    timeout_s: float = 60.0,
) -> CaseResult:
    """Run one case on a subject, a callable or its name "module:object", and check it against the dense model.

    `truth`: "module:object" of a dense model of its own, or "alone" for the subject itself on one rank. Without it the
    subject's attribute `truth` counts, or our decoder. `engine`: a word of `shardproof run --engine`, or an open
    engine, which stays open. `result.verdict` is the worst of `result.verdicts`; `result.events` is the ledger. Nothing
    is written. Raises RequestError when the case, the subject or the engine is wrong; whatever the subject does wrong
    is a failed verdict.
    """
    given = resolve_subject(subject, truth)
    known = case_of(case, given) if isinstance(case, str) else case
    with engine_named(engine) if isinstance(engine, str) else nullcontext(engine) as opened:
        return proof.prove(known, given, opened, device=device, timeout_s=timeout_s)


def run(
    cases: Sequence[str],
    subject: str,
    *,
    truth: str = "",
    engine: str = "inproc",
    device: str = "cpu",
    out: str | Path = "runs",
    timeout_s: float = 60.0,
) -> RunResult:
    """Run cases on the subject of this name, check each against the dense model and write a run folder below `out`.

    `result.path` is the folder, for `load` and `shardproof show`; `result.exit_status` that of `shardproof run`. Raises
    RequestError before anything runs when a case, the subject, the engine or the folder is wrong.
    """
    given = resolve_subject(subject, truth)
    return running.run_request(
        Request(
            cases=cases_of(cases, given),
            subject=given,
            engine=engine,
            device=device,
            out=Path(out),
            timeout_s=timeout_s,
            command=tuple(sys.argv),
        )
    )
