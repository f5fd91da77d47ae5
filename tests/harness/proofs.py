"""Proof of one case of a subject, and the messages of its verdicts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.running.proof import prove
from shardproof.harness.running.request import Request
from shardproof.harness.running.result import CaseResult
from shardproof.harness.running.run import run_request
from shardproof.harness.running.run_result import RunResult
from shardproof.harness.subject import case_of, resolve_subject
from tests.harness.noted import names_of, reasons_of
from tests.harness.toy_subjects import Changed


def proved(subject: Any, case: Any, engine: Engine | None = None, *, truth: str = "", **how: Any) -> CaseResult:
    """The result of a case, or of its text, on ranks that are threads unless an engine is given."""
    given = resolve_subject(subject, truth)
    read = case_of(case, given) if isinstance(case, str) else case
    if engine is not None:
        return prove(read, given, engine, **how)
    with InprocEngine() as made:
        return prove(read, given, made, **how)


def ran(folder: Path, subject: Any, *cases: Any, **how: Any) -> RunResult:
    """The result of a run of these cases, or of their texts, whose folder is made in this one."""
    given = resolve_subject(subject)
    read = (case_of(case, given) if isinstance(case, str) else case for case in cases)
    return run_request(Request(cases=tuple(read), subject=given, out=folder, **how))


def planted_on_ranks(monkeypatch: pytest.MonkeyPatch, subject: Any, module: Any, name: str, wrong: object) -> Changed:
    """The subject while this name of a module is another on its ranks, and what it was in its truth."""
    right = getattr(module, name)

    def truth(case: Any, device: torch.device) -> Mapping[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, right)
            return dict(subject.truth(case, device))

    monkeypatch.setattr(module, name, wrong)
    return Changed(subject, truth=truth)


def failed(result: Any) -> set[str]:
    """The checks that did not pass."""
    return {verdict.check for verdict in result.verdicts if verdict.verdict != "pass"}


def contradicted(result: Any) -> set[str]:
    """The checks that failed; those that decided nothing are not among them."""
    return {verdict.check for verdict in result.verdicts if verdict.verdict == "fail"}


def verdict_of(result: Any, check: str) -> Any:
    """The verdict of one check."""
    return next(verdict for verdict in result.verdicts if verdict.check == check)


def unchecked(result: CaseResult) -> set[str]:
    """Everything that no check looked at."""
    return {one for verdict in result.verdicts for one in (*names_of(verdict), *reasons_of(verdict))}


def told(result: CaseResult) -> str:
    """Verdicts that did not pass, a line each."""
    return "\n".join(f"{one.check}: {one.verdict}: {one.message}" for one in result.verdicts if one.verdict != "pass")
