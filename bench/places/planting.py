"""One bug planted, proved, and the place that its failure names."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

import torch

import shardproof
from bench.places.bugs import Bug
from bench.places.dense import REFERENCE
from bugs.planting import planted, replaced
from harness.diagnosing.diagnosis import Diagnosis
from harness.engines.engine import Engine
from harness.engines.named import engine_named
from harness.running.proof import CaseResult, prove
from harness.running.truth.reference import REFERENCE as OURS
from reference.case import Case

__all__ = ["diagnosed", "found", "found_in_megatron", "is_right", "wordless"]

Place = tuple[str, str]


def wordless(subject: Callable[..., Any]) -> Callable[..., Any]:
    """The same subject without any attribute: it declares no layout."""

    def bare(case: Case, device: torch.device) -> Any:
        return subject(case, device)

    return bare


def diagnosed(bug: Bug, engine: Engine) -> CaseResult:
    """The case of a bug proved on a subject that has it."""
    wrong = planted(replaced(bug.module, bug.old, bug.new), bug.subject)
    if bug.module.startswith("suites.subjects."):
        return shardproof.prove(bug.case, wrong, engine, truth=f"{bug.module}:truth")
    reference = OURS if bug.subject.startswith("parallel.") else REFERENCE
    return prove(Case.parse(bug.case), wordless(wrong), engine, reference=reference)


def found(bug: Bug) -> Place | None:
    """Phase and module of the first place of a bug, None when nothing failed."""
    with engine_named("inproc") as engine:
        return _place(diagnosed(bug, engine).diagnosis)


def found_in_megatron(name: str) -> Place | None:
    """The same of a patch of Megatron."""
    from bench.places import megatron  # noqa: PLC0415  (needs the extra `peers`)

    with engine_named("inproc") as ranks, megatron.planted(name):
        return _place(shardproof.prove(megatron.CASE, "suites.subjects.megatron:subject", ranks).diagnosis)


def is_right(place: Place | None, phase: str, module: str) -> bool:
    """Whether this is one of the phases and modules that are right for a bug."""
    if place is None:
        return False
    return place[0] in phase.split("|") and any(fnmatch.fnmatch(place[1], right) for right in module.split("|"))


def _place(diagnosis: Diagnosis | None) -> Place | None:
    return None if diagnosis is None else (diagnosis.first.phase, diagnosis.first.region)
