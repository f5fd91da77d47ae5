"""Engines compared: each difference of verdicts, ledgers and expectations is reported."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RankDied
from shardproof.harness.ledger import COLUMNS, REPEATABLE
from shardproof.harness.running.proof import prove
from shardproof.harness.running.result import CaseResult
from shardproof.reference.case import Case
from shardproof.suites.test_engines import describe_differences, differences, draw_cases
from tests.harness.toy_evidence import but

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
    return replace(result, evidence=but(result.evidence, events=events))


def test_what_differs_between_two_results_is_told(result: CaseResult) -> None:
    *before, last = result.events
    first, *others = result.verdicts
    assert result.evidence is not None
    assert list(describe_differences(result, with_events(result, *reversed(result.events)))) == [], (
        "in any order of ranks"
    )
    for other, told in (
        (replace(result, verdicts=(replace(first, verdict="fail"), *others)), f"{first.check} is fail, not pass"),
        (replace(result, verdicts=(*others,)), f"{first.check} is None, not pass"),
        (with_events(result, *before), f"the ledger has {len(before)} events, not {len(before) + 1}"),
        (replace(result, evidence=but(result.evidence, expectation=())), "the expectation differs"),
    ):
        assert list(describe_differences(result, other)) == [told]
    assert set(COLUMNS) - set(REPEATABLE) == {"start_us", "duration_us", "caller"}, "all others are compared"
    for column in REPEATABLE:
        value = getattr(last, column)
        changed: dict[str, Any] = {column: not value if isinstance(value, bool) else value + type(value)("1")}
        (difference,) = describe_differences(result, with_events(result, *before, replace(last, **changed)))
        assert column in difference


def test_a_dry_result_is_held_against_the_ranks_that_it_ran(result: CaseResult) -> None:
    with DryEngine() as engine:
        dry = prove(CASE, SUBJECT, engine)
    assert dry.events and list(describe_differences(result, dry, dry=True)) == []
    *before, last = dry.events
    told = list(describe_differences(result, with_events(dry, *before, replace(last, payload_bytes=1)), dry=True))
    assert len(told) == 1 and "payload_bytes" in told[0]
    assert list(describe_differences(result, replace(dry, verdicts=()), dry=True)) == [
        "nothing was recorded or checked"
    ]


def test_an_engine_that_fails_differs() -> None:
    with InprocEngine() as right, Dying() as dying:
        told = differences(CASE, SUBJECT, {"inproc": right, "dying": dying})
    assert "dying against inproc: run is unknown, not None" in told


def test_cases_are_drawn_again_from_the_same_seed_and_from_every_mode() -> None:
    once = draw_cases(6, 3, worlds=(2,))
    assert once == draw_cases(6, 3, worlds=(2,)) and once != draw_cases(6, 4, worlds=(2,))
    assert len({case.mode for case in once}) == 6
    assert {case.world_size for case in draw_cases(12)} == {2, 3, 4}
