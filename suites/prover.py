"""Proves one drawn case of the subject under test and turns verdicts into an assertion. What every suite calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import hypothesis
import torch

from harness.checks import CHECKS
from harness.engines.engine import Engine
from harness.errors import RequestError
from harness.proof import CaseResult, prove
from harness.resolve import resolve
from harness.run import engine_named
from reference.case import Case
from reference.rules import MODES

__all__ = ["Prover", "chosen_modes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prover:
    """A subject, the world sizes to draw from, and the engine that runs it."""

    subject: str
    worlds: tuple[int, ...]
    engine: Engine

    @classmethod
    @contextmanager
    def on(cls, subject: str, worlds: str) -> Iterator[Self]:
        """Open an engine and keep torch to one thread, as every engine does."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with engine_named("inproc") as engine:
                yield cls(subject=subject, worlds=world_sizes(worlds), engine=engine)
        finally:
            torch.set_num_threads(threads)

    def proof(self, case: Case, subject: Any = None) -> CaseResult:
        """All that is known of this case; `subject` stands in for the one under test (a planted bug)."""
        return prove(case, subject or self.subject, self.engine)

    def holds(self, case: Case, *checks: str) -> None:
        """Assert that these checks pass on this case; a case that the subject does not support is not counted.

        A check that has nothing to look at is no pass: it fails, unless the subject is a third party's, which may
        return less than ours.
        """
        asked = {name: CHECKS[name] for name in checks}
        result = prove(case, self.subject, self.engine, checks=asked)
        if result.skipped:
            hypothesis.note(result.skipped)
            hypothesis.reject()
        wrong = [verdict for verdict in result.verdicts if verdict.verdict != "pass"]
        assert not wrong, "\n\n".join(verdict.message for verdict in wrong)
        silent = set(checks) - {verdict.check for verdict in result.verdicts}
        assert not silent or self.subject != "parallel.subject:subject", f"nothing to check: {sorted(silent)}"


def world_sizes(text: str) -> tuple[int, ...]:
    """The world sizes that an option names. Raises RequestError for anything but whole numbers above 1."""
    try:
        worlds = tuple(int(word) for word in text.split(","))
    except ValueError:
        worlds = ()
    if not worlds or min(worlds) < 2:
        raise RequestError(f"worlds={text}: must be whole numbers above 1, comma separated; legal: --worlds 2,3")
    return worlds


def chosen_modes(subject: str, text: str) -> Sequence[str]:
    """The modes to prove: all that the subject claims, or those of them that are named."""
    claimed = tuple(getattr(resolve(subject), "modes", MODES))
    if text == "all":
        return claimed
    named = tuple(text.split(","))
    if unknown := [mode for mode in named if mode not in claimed]:
        raise RequestError(f"modes={','.join(unknown)}: {subject} claims {', '.join(claimed)}; legal: --modes all")
    return named
