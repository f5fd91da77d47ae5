"""One case of a subject proved, and what its verdicts say."""

from __future__ import annotations

from typing import Any

from harness.engines.threads.inproc import InprocEngine
from harness.running.proof import CaseResult, prove
from harness.subject import case_of, named


def proved(subject: Any, text: str, engine: InprocEngine) -> CaseResult:
    given = named(subject)
    return prove(case_of(text, given), given, engine)


def unchecked(result: CaseResult) -> set[str]:
    return {name for verdict in result.verdicts for name in verdict.unchecked}


def told(result: CaseResult) -> str:
    return "\n".join(f"{one.check}: {one.verdict}: {one.message}" for one in result.verdicts if one.verdict != "pass")
