"""Proves one drawn case of the subject under test and turns verdicts into an assertion. What every suite calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import hypothesis
import torch

from harness.checks import CHECKS
from harness.claims import claims
from harness.engines.engine import Engine
from harness.environment import environment
from harness.errors import RequestError
from harness.proof import CaseResult, prove
from harness.run import engine_named
from harness.store import Store
from harness.summary import summarize
from reference.case import Case

__all__ = ["Prover", "chosen_modes", "world_sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prover:
    """A subject, the world sizes to draw from, the engine that runs it, and the run folder that keeps the proofs.

    `only` is proved in place of every case that is drawn.
    """

    subject: str
    worlds: tuple[int, ...]
    engine: Engine
    device: str = "cpu"
    store: Store | None = None
    stored: set[str] = field(default_factory=set)
    only: Case | None = None

    @classmethod
    @contextmanager
    def on(
        cls,
        subject: str,
        worlds: str,
        device: str = "cpu",
        out: Path | None = None,
        command: Sequence[object] = (),
        engine: str = "inproc",
        case: str = "",
    ) -> Iterator[Self]:
        """Open an engine, and a run folder in `out`; keep torch to one thread, as every engine does.

        World sizes beyond what was launched are not drawn. Raises RequestError when none is left.
        """
        request = {"subject": subject, "worlds": worlds, "engine": engine, "device": device}
        store = Store(out, subject, environment([*map(str, command)], request)) if out else None
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with engine_named(engine) as opened:
                drawn = _launched(world_sizes(worlds), opened)
                only = Case.parse(case) if case else None
                yield cls(subject=subject, worlds=drawn, engine=opened, device=device, store=store, only=only)
        finally:
            torch.set_num_threads(threads)
            if store:
                store.close()

    def proof(self, case: Case, subject: Any = None) -> CaseResult:
        """All that is known of this case; `subject` stands in for the one under test (a planted bug)."""
        return prove(case, subject or self.subject, self.engine)

    def holds(self, case: Case, *checks: str) -> None:
        """Assert that these checks pass on this case; a case that the subject does not support is not counted.

        A check that has nothing to look at is no pass: it fails, unless the subject is a third party's, which may
        return less than ours.
        """
        asked = {name: CHECKS[name] for name in checks}
        result = prove(self.only or case, self.subject, self.engine, checks=asked, device=self.device)
        self._keep(result)
        if result.skipped:
            hypothesis.note(result.skipped)
            hypothesis.reject()
        wrong = [verdict for verdict in result.verdicts if verdict.verdict != "pass"]
        assert not wrong, "\n\n".join(verdict.message for verdict in wrong)
        silent = set(checks) - {verdict.check for verdict in result.verdicts}
        assert not silent or self.subject != "parallel.subject:subject", f"nothing to check: {sorted(silent)}"

    def _keep(self, result: CaseResult) -> None:
        """Store what was proved; the events of a case that several tests draw are stored once."""
        if self.store is None or result.skipped:
            return
        case, events = result.case, result.events
        if result.text in self.stored:
            self.store.add(result.text, (), (), result.verdicts, result.seconds)
            return
        self.stored.add(result.text)
        self.store.plan([{"case": result.text, "mode": case.mode, "world_size": case.world_size}])
        rows = summarize(result.text, case.mode, case.world_size, events, result.expectation)
        self.store.add(result.text, events, rows, result.verdicts, result.seconds)


def world_sizes(text: str) -> tuple[int, ...]:
    """The world sizes that an option names. Raises RequestError for anything but whole numbers above 1."""
    try:
        worlds = tuple(int(word) for word in text.split(","))
    except ValueError:
        worlds = ()
    if not worlds or min(worlds) < 2:
        raise RequestError(f"worlds={text}: must be whole numbers above 1, comma separated; legal: --worlds 2,3")
    return worlds


def _launched(worlds: tuple[int, ...], engine: Engine) -> tuple[int, ...]:
    """Those of these world sizes for which the engine has enough ranks."""
    largest: int = getattr(engine, "largest_world", max(worlds))
    fitting = tuple(world for world in worlds if world <= largest)
    if not fitting:
        raise RequestError(f"worlds={worlds}: {largest} processes were launched; legal: --worlds {max(2, largest)}")
    return fitting


def chosen_modes(subject: str, text: str) -> Sequence[str]:
    """The modes to prove: all that the subject claims and a case can have, or those of them that are named."""
    return claims(subject).chosen(text)
