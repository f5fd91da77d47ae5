"""The groups of a run: each must be a rank list of the axis that it is named after, on every engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from harness.checking.checks import CHECKS
from harness.checking.evidence import FAIL, PASS, UNKNOWN, Finding
from harness.checking.ledger_checks import groups
from harness.engines.engine import Engine
from harness.engines.named import engine_named
from harness.running.proof import CaseResult, prove
from reference.case import Case
from tests.harness.checking.toy_groups import Strided
from tests.harness.toy_evidence import events, evidence

CASE = Case.parse("mode=tp tp=2 dp=2 layers=1 hidden=16 heads=2 seq=4")
TOY = "tests.harness.checking.toy_groups:"
ASKED = {"groups": CHECKS["groups"]}


@pytest.fixture(scope="module", params=["inproc", "pool", "dry"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "pool":
        yield request.getfixturevalue("pool")
        return
    with engine_named(request.param) as made:
        yield made


def asked(subject: Any, engine: Engine) -> CaseResult:
    return prove(CASE, subject, engine, checks=ASKED)


def of_groups(result: CaseResult) -> tuple[str, str]:
    return next((told.verdict, told.message) for told in result.verdicts if told.check == "groups")


def test_a_mesh_of_another_rank_order_is_named_with_the_ranks_seen_and_the_legal_ones(engine: Engine) -> None:
    result = asked(f"{TOY}unstated", engine)
    verdict, message = of_groups(result)
    assert verdict == FAIL
    seen = "[0, 2]" if engine.name == "dry" and len(result.events) < 4 else "[0, 2] [1, 3]"
    assert f"calls named tp run over the ranks {seen}, which are no rank lists of axis tp: [0, 1] [2, 3]" in message
    assert result.diagnosis is not None
    assert [cause.id for cause in result.diagnosis.causes] == ["wrong_group"]
    assert f"run over the ranks {seen}; the rank lists of axis tp are [0, 1] [2, 3]" in message
    assert "subject.axes(case)" in message


def test_a_subject_that_states_its_rank_order_passes(engine: Engine) -> None:
    assert of_groups(asked(f"{TOY}stated", engine))[0] == PASS


def test_a_name_that_no_axis_has_is_a_note() -> None:
    with engine_named("inproc") as engine:
        verdict = asked(f"{TOY}own_name", engine).verdicts[0]
    # the ranks are those of the case's dp, which is then the name in the ledger
    assert (verdict.verdict, verdict.unchecked) == (PASS, ())
    found = _judged(tuple(replace(event, axis="0,3", group=(0, 3)) for event in events()))
    assert found.verdict == PASS
    assert found.unchecked == ("group 0,3: no axis of the case or of subject.axes(case) has this name",)


@pytest.mark.parametrize(("ranks", "verdict"), [((0, 1, 2, 3), PASS), ((0, 1), FAIL)])
def test_an_axis_that_joins_two_has_the_ranks_of_both(ranks: tuple[int, ...], verdict: str) -> None:
    joint = tuple(replace(event, axis="tp_dp", group=ranks) for event in events())
    found = groups(evidence(case=CASE, events=joint))
    assert found is not None
    assert (found.verdict, found.unchecked) == (verdict, ())


def _judged(ledger: Any) -> Finding:
    found = groups(evidence(events=ledger))
    assert found is not None
    return found


def test_a_group_of_one_that_is_named_after_a_split_axis_is_a_wrong_group() -> None:
    alone = tuple(replace(event, group=(event.rank,), group_size=1) for event in events())
    found = _judged(alone)
    assert (found.verdict, found.phase, found.region) == (FAIL, "forward", "embedding")


@pytest.mark.parametrize(
    ("order", "rule"),
    [
        ({"tp": ((0, 2), (1, 2))}, "axis tp=((0, 2), (1, 2)): every rank of 4 must be in one rank list"),
        ({"tp": ((0, 1, 2, 3),)}, "axis tp=((0, 1, 2, 3),): the case has groups of 2 ranks"),
        ({"tp": 2}, "axis tp=2: every rank of 4 must be in one rank list"),
        (7, "axes=7 must map axes to rank lists; legal: {'tp': ((0, 1), (2, 3))}"),
    ],
)
def test_rank_lists_that_are_none_make_the_check_unknown_in_one_sentence(order: Any, rule: str) -> None:
    with engine_named("inproc") as engine:
        verdict, message = of_groups(asked(Strided(order=order), engine))
    assert verdict == UNKNOWN
    assert message.startswith("subject.axes failed: ") and rule in message
    assert "legal: " in message and "\n" not in message
