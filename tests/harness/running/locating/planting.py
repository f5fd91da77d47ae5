"""A planted bug, proved, and the place that its failure names."""

import fnmatch
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch

import shardproof
from shardproof.bugs.anchors import change_sources, find_change
from shardproof.bugs.planting import plant_subject
from shardproof.bugs.record import FOLDER, Bug, Change, read_bugs
from shardproof.harness.diagnosing.diagnosis import Diagnosis
from shardproof.harness.engines.engine import Engine
from shardproof.harness.running.proof import prove
from shardproof.harness.running.result import CaseResult
from shardproof.harness.running.trials.trial import decoder
from shardproof.reference.case import Case
from tests.harness.running.locating.dense import REFERENCE

_OWN = "shardproof.suites.subjects."
"""Subjects with a truth and words of their own."""


def bugs_of(folder: str) -> dict[str, Bug]:
    """Name -> bug, of the files in one folder of `bugs`."""
    return {bug.name: bug for path in sorted((FOLDER / folder).glob("*.txt")) for bug in read_bugs(path, Bug, {})}


def is_foreign(bug: Bug) -> bool:
    """Whether it changes a package of others, which is not imported twice."""
    return not bug.changes[0].module.startswith(("tests.", "shardproof."))


def wordless(subject: Callable[..., Any]) -> Callable[..., Any]:
    """This subject without any attribute: it declares no layout."""

    def bare(case: Case, device: torch.device) -> Any:
        return subject(case, device)

    return bare


def wrong_subject(bug: Bug) -> Callable[..., Any]:
    """The subject that has the bug, of a bug in our own packages."""
    return plant_subject(change_sources(bug.name, bug.changes), bug.system or "shardproof.parallel.subject:subject")


@contextmanager
def patched(name: str, changes: tuple[Change, ...]) -> Iterator[None]:
    """Inside, functions of a package that cannot be imported twice run changed code, in every thread.

    Raises AnchorLost for a bug without a place.
    """
    swaps = []
    for module, text in change_sources(name, changes).items():
        loaded = importlib.import_module(module)
        every = dict(_codes(compile(text, str(loaded.__file__), "exec")))
        for within in {change.within for change in changes if find_change(change).module == module}:
            function: Any = loaded
            for part in within.split("."):
                function = getattr(function, part)
            swaps.append((inspect.unwrap(function), every[within]))
    right = [function.__code__ for function, _ in swaps]
    for function, code in swaps:
        function.__code__ = code
    try:
        yield
    finally:
        for (function, _), code in zip(swaps, right, strict=True):
            function.__code__ = code


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Qualified name and code of everything inside."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one.co_qualname, one
            yield from _codes(one)


def diagnosed(bug: Bug, engine: Engine) -> CaseResult:
    """The case of a bug proved on a subject that has it."""
    if is_foreign(bug):
        with shardproof.cuda_on_cpu(), patched(bug.name, bug.changes):
            return shardproof.prove(bug.case, bug.system, engine)
    wrong = wrong_subject(bug)
    if bug.system.startswith(_OWN):
        return shardproof.prove(bug.case, wrong, engine, truth=bug.system.replace(":subject", ":truth"))
    reference = REFERENCE if bug.system else decoder()
    return prove(Case.parse(bug.case), wordless(wrong), engine, reference=reference)


def is_right(at: tuple[str, str] | None, bug: Bug) -> bool:
    """Whether this is one of the phases and modules that are right for a bug."""
    if at is None:
        return False
    return at[0] in bug.phase.split("|") and any(fnmatch.fnmatch(at[1], right) for right in bug.region.split("|"))


def place(diagnosis: Diagnosis | None) -> tuple[str, str] | None:
    """Phase and module that a diagnosis names."""
    return None if diagnosis is None else (diagnosis.first.phase, diagnosis.first.region)
