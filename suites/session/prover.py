"""Proves one drawn case of the subject under test and turns verdicts into an assertion, for every suite."""

import contextlib
import functools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Self

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from shardproof.harness.checking.checks import CHECKS, LAWS
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.engines.engine import Engine
from shardproof.harness.errors import RequestError
from shardproof.harness.plain_case import Vocabulary
from shardproof.harness.protocols import CaseLike
from shardproof.harness.running.engines import engine_named
from shardproof.harness.running.proof import prove
from shardproof.harness.running.result import CaseResult, ledger_rows, with_traceback
from shardproof.harness.running.store import Store, environment
from shardproof.harness.running.summary import summarize
from shardproof.harness.subject import NamedSubject, case_of, offers, refusal, resolve_subject, vocabulary
from shardproof.harness.verdicts.verdict import FAIL, SKIP, Verdict
from shardproof.harness.verdicts.words import label_lines
from shardproof.reference.case import Case
from shardproof.reference.features import PARTS
from shardproof.reports.options.request import default_cases
from shardproof.suites.drawing.own_cases import cases_around
from shardproof.suites.drawing.strategies import boolean_rows, cases
from shardproof.suites.session.request import world_sizes

_ENOUGH = 50
"""After this many refused cases in a row a test is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prover:
    """A subject, the world sizes to draw from, the engine that runs it, and the run folder that keeps the proofs.

    `only` is proved in place of every case that is drawn. A run may take `timeout_s` seconds. `refusals` has the
    reasons for which the subject refused the cases drawn since it last took one. `reported` has each first place with
    the test that reported it first; `rows` are the rows of boolean words that each test has drawn.
    """

    subject: NamedSubject
    worlds: tuple[int, ...]
    engine: Engine
    device: str = "cpu"
    store: Store | None = None
    stored: set[str] = field(default_factory=set)
    refusals: list[str] = field(default_factory=list)
    rows: dict[str, dict[int, int]] = field(default_factory=dict)
    reported: dict[str, str] = field(default_factory=dict)
    only: CaseLike | None = None
    timeout_s: float = 60.0

    @classmethod
    @contextmanager
    def on(
        cls,
        subject: str,
        worlds: str,
        truth: str = "",
        device: str = "cpu",
        out: Path | None = None,
        command: Sequence[object] = (),
        engine: str = "inproc",
        case: str = "",
        timeout_s: float = 60.0,
    ) -> Iterator[Self]:
        """Open an engine, and a run folder in `out`; keep torch to one thread, as every engine does.

        World sizes for which the engine has too few ranks are not drawn. Raises RequestError if none is left.
        """
        request = {"subject": subject, "truth": truth, "worlds": worlds, "engine": engine, "device": device}
        store = Store(out, subject, environment([*map(str, command)], request)) if out else None
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with engine_named(engine) as opened:
                drawn = _launchable_worlds(world_sizes(worlds), opened)
                given = resolve_subject(subject, truth)
                words: dict[str, Any] = {"device": device, "store": store, "timeout_s": timeout_s}
                words["only"] = case_of(case, given) if case else None
                yield cls(subject=given, worlds=drawn, engine=opened, **words)
        finally:
            torch.set_num_threads(threads)
            if store:
                store.close()

    def draw_case(
        self, data: st.DataObject, mode: str, *, where_known: Mapping[str, Any] = MappingProxyType({}), **fixed: Any
    ) -> Any:
        """The case to prove: `only`, or one drawn of this mode with these `fixed` words, as the subject takes it.

        Words of `where_known` are fixed too, unless the subject has words of its own that lack the word or the value.
        Skips the test when the subject refuses `only`, or lacks a fixed word or its value. If it refuses a drawn case,
        and no other case can replace that one (`fit_case`), the draw is not counted.
        """
        if self.only is not None:
            if reason := self.reason_of_refusal(self.only):
                pytest.skip(reason)
            return self.only
        if (own := vocabulary(self.subject)) is not None:
            return self._drawn_of_own_words(data, mode, own, where_known, fixed)
        fixed = {**where_known, **fixed}
        flags = {word: value for word, value in self._row(data, mode).items() if word not in fixed}
        parts = tuple(PARTS) if offers(self.subject.call, "refuses") else ()  # other subjects state nothing about them
        case = data.draw(cases(mode, self.worlds, flags, parts, **fixed), label="case")
        fitting = self.fit_case(case, **fixed)
        if fitting is None:
            self._reject()
        self.refusals.clear()
        return fitting

    def _drawn_of_own_words(
        self, data: st.DataObject, mode: str, own: Vocabulary, where_known: Mapping[str, Any], fixed: Mapping[str, Any]
    ) -> CaseLike:
        """A case near those that the subject names. Skips the test if it lacks a fixed word, or its value."""
        known = dict(own.words)
        if lacking := [word for word in fixed if word not in known]:
            pytest.skip(f"cases of {self.subject.name} have no word {lacking[0]}")
        if foreign := [str(own.foreign(word, value)) for word, value in fixed.items() if not own.takes(word, value)]:
            pytest.skip(f"cases of {self.subject.name} cannot have {foreign[0]}")
        words = {word: value for word, value in where_known.items() if word in known and own.takes(word, value)}
        case: CaseLike = data.draw(cases_around(self.subject, mode, {**words, **fixed}), label="case")
        if reason := self.reason_of_refusal(case):
            self.refusals.append(reason)
            self._reject()
        self.refusals.clear()
        return case

    def _reject(self) -> NoReturn:
        """Do not count a refused draw; skip the test after _ENOUGH of them in a row."""
        if len(self.refusals) >= _ENOUGH:
            self.skip_refused()
        hypothesis.note(self.refusals[-1])
        hypothesis.reject()

    def _row(self, data: st.DataObject, mode: str) -> Mapping[str, bool]:
        """The boolean words of a draw: one of `boolean_rows`. A test draws every row before it draws one a second time,
        and tests begin with different rows. A draw that is repeated (shrunk, from the database) has its row again.
        """
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        every, drawn = boolean_rows(mode), self.rows.setdefault(test, {})
        turn = data.draw(st.integers(0, 2**16 - 1), label="turn")
        row = data.draw(st.integers(0, len(every) - 1), label="row")
        if drawn.setdefault(row, turn) != turn and len(drawn) < len(every):
            hypothesis.reject()
        return every[(row + zlib.crc32(test.encode())) % len(every)]

    def skip_refused(self) -> NoReturn:
        """Skip a test for which the subject refused _ENOUGH cases in a row, with the reason of the last refusal."""
        words = f"{self.subject.name} takes none of {len(self.refusals)} cases drawn and none of its default cases"
        reason = f"{words}; the last: {self.refusals[-1]}; legal: --case with one that it takes"
        self.refusals.clear()
        pytest.skip(reason)

    def fit_case(self, case: Case, **fixed: Any) -> Case | None:
        """The case itself if the subject takes it, else a default case with its seed, world sizes and `fixed` words.

        So a subject with a single architecture is proved as well. None if it takes neither.
        """
        if not (reason := self.reason_of_refusal(case)):
            return case
        self.refusals.append(reason)
        taken = []
        for usual in _default_cases(self.subject, case.mode):
            with contextlib.suppress(ValueError):  # no default case can have a fixed word
                near = usual.but(**fixed, seed=case.seed)
                taken += [near] if near.world_size in self.worlds and not self.reason_of_refusal(near) else []
        return taken[case.seed % len(taken)] if taken else None

    def reason_of_refusal(self, case: CaseLike) -> str:
        """Why the subject does not take this case, "" if it does. Raises Unanswered if its own code fails."""
        return refusal(case, self.subject)

    def proof(self, case: CaseLike, subject: Any = None, *, explain: bool = True, repeat: bool = True) -> CaseResult:
        """All that is known of this case; `subject` replaces the one under test (a planted bug).

        Without `explain` a failure takes no further runs, without `repeat` the subject runs once.
        """
        words: dict[str, Any] = {"timeout_s": self.timeout_s, "explain": explain, "repeat": repeat}
        return prove(case, subject or self.subject, self.engine, **words)

    def holds(self, case: CaseLike, *checks: str) -> None:
        """Assert that these checks pass on this case; skip if the subject refuses it.

        A check that has nothing to compare is a failure, except for a third party's subject, which may return less than
        ours.
        """
        known = {**CHECKS, **LAWS}
        asked = {name: known[name] for name in checks}
        result = prove(case, self.subject, self.engine, checks=asked, device=self.device, timeout_s=self.timeout_s)
        if self.store is not None and result.traceback:
            result = with_traceback(result, self.store)
        self._keep(result)
        if result.verdict == SKIP:
            pytest.skip(result.skipped)
        wrong = [verdict for verdict in result.verdicts if verdict.verdict != "pass"]
        assert not wrong, self._report(wrong)
        silent = set(checks) - {verdict.check for verdict in result.verdicts}
        assert not silent or self.subject.name != SUBJECT, f"nothing to check: {sorted(silent)}"

    def _report(self, wrong: Sequence[Verdict]) -> str:
        """Six lines for each first place; a place that another test has reported is two lines and the command.

        Checks that are unknown, which is no failure, are reported with their reason.
        """
        test, blocks = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0], []
        by_place: dict[str, list[Verdict]] = {}
        for verdict in wrong:
            key = verdict.site if verdict.verdict == FAIL else verdict.statement
            by_place.setdefault(key, []).append(verdict)
        for place, verdicts in by_place.items():
            before = self.reported.setdefault(place, test)
            message, failure = verdicts[0].message, verdicts[0].failure
            if before != test:
                checks = ", ".join(verdict.check for verdict in verdicts)
                message = f"{checks} of {verdicts[0].case}\nfails from the same first place on as {before}"
                message += "\n" + "".join(
                    label_lines({"repeat": failure.repeat}) if failure else [verdicts[0].statement]
                )
            elif len(verdicts) > 1:
                message += f"\nand from there on: {', '.join(verdict.check for verdict in verdicts[1:])}"
            blocks.append(message)
        return "\n\n".join(blocks)

    def _keep(self, result: CaseResult) -> None:
        """Store what was proved; the events of a case that several tests draw are stored once."""
        if self.store is None or result.skipped:
            return
        case, events = result.case, result.events
        if result.text in self.stored:
            self.store.add(result.text, "", (), result.verdicts, result.seconds)
            return
        self.stored.add(result.text)
        self.store.plan([{"case": result.text, "mode": case.mode, "world_size": case.world_size}])
        rows = summarize(result.text, case.mode, case.world_size, events, result.expectation)
        self.store.add(result.text, ledger_rows(events), rows, result.verdicts, result.seconds)


def _launchable_worlds(worlds: tuple[int, ...], engine: Engine) -> tuple[int, ...]:
    """The world sizes for which the engine has enough ranks."""
    largest: int = getattr(engine, "largest_world", max(worlds))
    fitting = tuple(world for world in worlds if world <= largest)
    if not fitting:
        raise RequestError(f"worlds={worlds}: {largest} processes were launched; legal: --worlds {max(2, largest)}")
    return fitting


@functools.lru_cache(maxsize=16)
def _default_cases(subject: NamedSubject, mode: str) -> tuple[Case, ...]:
    """The default cases of a mode, found once for a subject."""
    return default_cases(subject, mode)  # type: ignore[return-value]
