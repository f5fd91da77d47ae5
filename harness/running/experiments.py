"""The line `when:` of failed cases: which words of a case its failure needs, found by running it with words changed.

Failures that first show at one place count as one. The simplest case of each is examined, simplest failures first,
for FAILURE_S seconds at most, and RUN_S seconds in all.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.checking.checks import CHECKS, LAWS, Check
from harness.checking.evidence import FAIL, PASS, Verdict
from harness.diagnosing.needed_words import OutOfTime, needed_words
from harness.diagnosing.six_lines import site, with_when
from harness.errors import ShardproofError
from harness.protocols import CaseLike, case_text
from harness.running.proof import NEED_WATCHING, CaseResult
from harness.subject import NamedSubject, domains_of

__all__ = ["FAILURE_S", "RUN_S", "Failed", "examined"]

FAILURE_S, RUN_S = 10.0, 30.0
Proves = Callable[..., CaseResult]
"""Proves a case with these `checks` within `timeout_s`, without explaining what fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A failed case and its verdicts."""

    case: CaseLike
    verdicts: tuple[Verdict, ...]

    @property
    def first(self) -> Verdict:
        """The first failed verdict."""
        return next(verdict for verdict in self.verdicts if verdict.verdict == FAIL)

    @property
    def size(self) -> tuple[object, ...]:
        """What orders failures, the simplest first: float64, few ranks, few words."""
        text = case_text(self.case)
        return self.case.dtype != "float64", self.case.world_size, len(text.split()), text


def examined(failures: Iterable[Failed], subject: NamedSubject, prove: Proves) -> dict[str, tuple[Verdict, ...]]:
    """The verdicts of failed cases, by the text of the case, with the line `when:`."""
    groups: dict[str, list[Failed]] = {}
    for failed in sorted(failures, key=lambda failed: failed.size):
        groups.setdefault(site(failed.first.message), []).append(failed)
    end_s, told = time.monotonic() + RUN_S, {}
    for group in groups.values():
        words = _words(group[0], subject, prove, min(end_s, time.monotonic() + FAILURE_S))
        for failed in group:
            on = "" if failed is group[0] else f" (tried on {case_text(group[0].case)!r})"
            told[case_text(failed.case)] = tuple(with_when(verdict, words + on) for verdict in failed.verdicts)
    return told


def _words(failed: Failed, subject: NamedSubject, prove: Proves, end_s: float) -> str:
    """What the words are that the failure of this case needs."""
    with tempfile.TemporaryDirectory() as folder:
        fails = _Fails(failed, prove, end_s, {"save": f"{folder}/save"} if getattr(failed.case, "save", "") else {})
        return needed_words(failed.case, domains_of(failed.case, subject), fails).text


class _Fails:
    """Whether a case fails as another one did, until `end_s`; None where that cannot be said."""

    def __init__(self, failed: Failed, prove: Proves, end_s: float, words: Mapping[str, Any]) -> None:
        self._ended = failed.first.check == "run"
        self._checks = _checks([verdict.check for verdict in failed.verdicts if verdict.verdict == FAIL])
        self._prove, self._end_s, self._words = prove, end_s, words

    def __call__(self, case: CaseLike) -> bool | None:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise OutOfTime
        try:
            kept = {word: value for word, value in self._words.items() if getattr(case, word)}
            result = self._prove(case.but(**kept) if kept else case, checks=self._checks, timeout_s=left_s)
        except (ShardproofError, ValueError):
            return None
        failed = [verdict.check for verdict in result.verdicts if verdict.verdict == FAIL]
        if failed:
            return True if self._ended or "run" not in failed else None
        return False if result.verdict == PASS else None


def _checks(failed: Sequence[str]) -> Mapping[str, Check]:
    """The checks that one run decides; all of them where none of these has failed."""
    every = {**CHECKS, **LAWS}
    once = {name: check for name, check in CHECKS.items() if name not in NEED_WATCHING}
    return once if {*failed} & {*once, "run"} else every
