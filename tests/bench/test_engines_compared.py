"""Engines compared and their table of faults: differences are reported, every row is detected or shown as silent."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import fault_table
from bench.fault_programs import goes_right, raises
from bench.fault_table import FAULTS, Fault, seen
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.engines.shapes.dry import DryEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RankDied
from shardproof.harness.ledger import COLUMNS, REPEATABLE
from shardproof.harness.running import engines as named_engines
from shardproof.harness.running.proof import prove
from shardproof.harness.running.result import CaseResult
from shardproof.reference.case import Case
from shardproof.suites.session.engines import differences, drawn, unlike

CASE = Case.parse("mode=tp layers=1 hidden=16 heads=2 ffn=16 vocab=64 seq=8 micro=1 steps=1 tp=2")


class Dying(InprocEngine):
    """An engine whose ranks die."""

    def run(self, program: Any, *args: Any, **options: Any) -> list[Any]:
        raise RankDied("rank 1 of 2 died: killed by SIGKILL", ranks=(1,), positions=())


@pytest.fixture(scope="module")
def result() -> Iterator[CaseResult]:
    with InprocEngine() as engine:
        yield prove(CASE, SUBJECT, engine)


def with_events(result: CaseResult, *events: Any) -> CaseResult:
    assert result.evidence is not None
    return replace(result, evidence=replace(result.evidence, events=events))


def test_what_differs_between_two_results_is_told(result: CaseResult) -> None:
    *before, last = result.events
    first, *others = result.verdicts
    assert result.evidence is not None
    assert list(unlike(result, with_events(result, *reversed(result.events)))) == [], "in any order of ranks"
    for other, told in (
        (replace(result, verdicts=(replace(first, verdict="fail"), *others)), f"{first.check} is fail, not pass"),
        (replace(result, verdicts=(*others,)), f"{first.check} is None, not pass"),
        (with_events(result, *before), f"the ledger has {len(before)} events, not {len(before) + 1}"),
        (replace(result, evidence=replace(result.evidence, expectation=())), "the expectation differs"),
    ):
        assert list(unlike(result, other)) == [told]
    assert set(COLUMNS) - set(REPEATABLE) == {"start_us", "duration_us", "caller"}, "all others are compared"
    for column in REPEATABLE:
        value = getattr(last, column)
        changed: dict[str, Any] = {column: not value if isinstance(value, bool) else value + type(value)("1")}
        (difference,) = unlike(result, with_events(result, *before, replace(last, **changed)))
        assert column in difference


def test_a_dry_result_is_held_against_the_ranks_that_it_ran(result: CaseResult) -> None:
    with DryEngine() as engine:
        dry = prove(CASE, SUBJECT, engine)
    assert dry.events and list(unlike(result, dry, dry=True)) == []
    *before, last = dry.events
    told = list(unlike(result, with_events(dry, *before, replace(last, payload_bytes=1)), dry=True))
    assert len(told) == 1 and "payload_bytes" in told[0]
    assert list(unlike(result, replace(dry, verdicts=()), dry=True)) == ["nothing was recorded or checked"]


def test_an_engine_that_fails_differs() -> None:
    with InprocEngine() as right, Dying() as dying:
        told = differences(CASE, SUBJECT, {"inproc": right, "dying": dying})
    assert "dying against inproc: run is unknown, not None" in told


def test_cases_are_drawn_again_from_the_same_seed_and_from_every_mode() -> None:
    once = drawn(6, 3, worlds=(2,))
    assert once == drawn(6, 3, worlds=(2,)) and once != drawn(6, 4, worlds=(2,))
    assert len({case.mode for case in once}) == 6
    assert {case.world_size for case in drawn(12)} == {2, 3, 4}


QUICK = tuple(fault for fault in FAULTS if not fault.clock and not fault.fatal)


class Blind(InprocEngine):
    """An engine that runs something harmless instead, and so sees no fault."""

    def run(self, program: Any, *args: Any, **options: Any) -> list[Any]:
        return super().run(goes_right, **options)


class Spoiled(Blind):
    """An engine that returns ones for any program."""

    def run(self, program: Any, *args: Any, **options: Any) -> list[Any]:
        return [1.0 for _ in super().run(program, **options)]


def test_a_silent_row_is_shown_and_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(named_engines.ENGINES, "inproc", Blind)
    monkeypatch.setattr(fault_table, "FAULTS", QUICK[:1])
    assert fault_table.main(["--out", str(tmp_path), "--engines", "inproc"]) == 1
    assert "0 of 1 detected" in capsys.readouterr().out
    with (tmp_path / "faults.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["engine"], row["fault"], row["detected"]) == ("inproc", "a rank raises", "False")
    assert row["message"] == "nothing: the run ended as if all were well"


def test_an_error_that_says_something_else_is_no_detection_and_a_spoiled_engine_is_told() -> None:
    with InprocEngine() as engine:
        assert not seen(engine, Fault(name="", program=raises, says="rank 2 of 3 raised")).detected
    with Spoiled() as engine, pytest.raises(RuntimeError, match="not usable after 'a rank raises'"):
        seen(engine, QUICK[0])
