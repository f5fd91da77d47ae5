"""Witnesses compared event by event: every planted slip of any of them is a failure that names the event."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.witness_checks import CHECK, judge_agreement
from shardproof.harness.diagnosing.witness_lines import diagnose_disagreement, failed_witnesses
from shardproof.harness.ledger import Event
from shardproof.harness.protocols import CaseLike
from shardproof.harness.running.result import verdict_on
from shardproof.harness.running.witnessing import Witnesses, WitnessResult
from shardproof.harness.terms import Term
from shardproof.harness.verdicts.verdict import FAIL, PASS
from shardproof.harness.witnesses.agreement import UNKNOWN, Agreement, Sighting, agreement, of_ledger
from shardproof.harness.witnesses.measured import WatchedRank
from shardproof.harness.witnesses.session import Session
from shardproof.reference.case import Case
from tests.harness.noted import reasons_of
from tests.harness.recording.toy_calls import an_event

AXES = {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3))}
PLAN: tuple[tuple[Any, ...], ...] = (
    ("data", "", "broadcast", "tp", 8),
    ("forward", "layers.0.mlp", "all_reduce", "tp", 64),
    ("backward", "layers.0.mlp", "all_gather", "tp", 128),
    ("grad_sync", "", "all_reduce", "dp", 256),
)
Seen = list[Sighting]


FACTS: dict[str, Any] = {"reduce_op": "", "group_size": 2, "dtype": "float32"}
FIELDS = ("phase", "region", "op", "axis", "payload_bytes")
TERMS = [Term(calls=1, **FACTS, **dict(zip(FIELDS, line, strict=True))) for line in PLAN]


def event(rank: int, index: int) -> Event:
    where = {"mode": "tp", "world_size": 4, "rank": rank, "step": 0, "call_index": index, "start_us": 0.0}
    what = dict(zip(FIELDS, PLAN[index], strict=True))
    group = next(ranks for ranks in AXES[PLAN[index][3]] if rank in ranks)
    return an_event(**where, **what, **FACTS, group=group, duration_us=0.0)


EVENTS = [event(rank, index) for rank in range(4) for index in range(len(PLAN))]
LEDGER = of_ledger(EVENTS)


def changed(seen: Seen, rank: int, index: int, **words: object) -> Seen:
    return [replace(s, **words) if (s.rank, s.index) == (rank, index) else s for s in seen]  # type: ignore[arg-type]


def dropped(seen: Seen, rank: int, index: int) -> Seen:
    left = [s for s in seen if (s.rank, s.index) != (rank, index)]
    return [replace(s, index=s.index - 1) if s.rank == rank and s.index > index else s for s in left]


def doubled(seen: Seen, rank: int, index: int) -> Seen:
    later = [replace(s, index=s.index + 1) if s.rank == rank and s.index > index else s for s in seen]
    return [*later, *(replace(s, index=index + 1) for s in seen if (s.rank, s.index) == (rank, index))]


def swapped(seen: Seen, rank: int, index: int) -> Seen:
    other = {index: index + 1, index + 1: index}
    return [replace(s, index=other.get(s.index, s.index)) if s.rank == rank else s for s in seen]


def test_groups_come_from_the_mesh_and_agreement_is_told_with_its_size() -> None:
    assert {s.groups for s in LEDGER if s.rank == 3} == {((2, 3),), ((1, 3),)}
    found = judge_agreement(agreement(LEDGER, {"torch": LEDGER, "nsys": LEDGER}, EVENTS, TERMS))
    assert found.verdict == PASS
    assert found.message == "ledger, torch, nsys, closed_form agree on 16 events of 4 ranks"
    vague = [replace(s, groups=((0, 1), (2, 3), (0, 2), (1, 3)), payload_bytes=UNKNOWN, phase="") for s in LEDGER]
    # what a witness leaves open is not compared but counted
    found = judge_agreement(agreement(LEDGER, {"torch": vague}))
    assert (found.verdict, reasons_of(found)) == (PASS, ["48 fields that torch does not tell"])


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        (lambda s: changed(s, 2, 1, payload_bytes=65), "torch saw forward all_reduce of 65 B over 2,3"),
        (lambda s: changed(s, 2, 1, op="reduce"), "torch saw forward reduce of 64 B over 2,3"),
        (lambda s: changed(s, 2, 1, groups=((0, 2),)), "torch saw forward all_reduce of 64 B over 0,2"),
        (lambda s: changed(s, 2, 1, phase="backward"), "torch saw backward all_reduce of 64 B over 2,3"),
        (lambda s: dropped(s, 2, 1), "torch saw nothing"),
        (lambda s: swapped(s, 2, 1), "torch saw backward all_gather of 128 B over 2,3; 1 more event differs"),
    ],
)
def test_a_slip_of_a_witness_fails_and_names_the_event(slip: Callable[[Seen], Seen], words: str) -> None:
    found = judge_agreement(agreement(LEDGER, {"torch": slip(LEDGER), "nsys": LEDGER}))
    assert found.verdict == FAIL
    start = "event 1 of rank 2: the ledger has forward all_reduce of 64 B over 2,3 in layers.0.mlp; "
    assert found.message == start + words
    assert (found.phase, found.region) == ("forward", "layers.0.mlp")


def test_the_closed_form_misses_and_demands() -> None:
    fewer = agreement(LEDGER, {}, EVENTS, TERMS[:-1])
    assert [row.words["closed_form"] for row in fewer.broken] == ["missing"] * 4
    more = judge_agreement(agreement(LEDGER, {}, EVENTS, [*TERMS, TERMS[1]]))
    assert "closed_form saw 1 more forward all_reduce of 64 B over tp in layers.0.mlp" in more.message


CASE: CaseLike = Case.parse("mode=tp tp=2 dp=2 steps=4")
SUBJECT = "my.module:subject"
OPTIONS = "--profile torch,nsys --profile-steps 0:1"
Others = Mapping[str, Sequence[Sighting]]


def lines(found: Finding, agreed: Agreement, options: str = "") -> list[str]:
    failure = failed_witnesses(diagnose_disagreement(CASE, agreed, found), agreed, CASE, SUBJECT, options)
    return verdict_on(found, str(CASE), CHECK, failure).lines


def message(others: Others, terms: Sequence[Term] | None = None) -> list[str]:
    agreed = agreement(LEDGER, others, EVENTS, terms)
    found = judge_agreement(agreed, "0:1")
    assert found.verdict == FAIL
    return lines(found, agreed, OPTIONS)


def test_an_event_that_one_witness_lost_in_six_lines() -> None:
    assert message({"torch": dropped(LEDGER, 2, 1), "nsys": LEDGER}, TERMS) == [
        "what:   event 1 of rank 2: the ledger has forward all_reduce of 64 B over 2,3 in layers.0.mlp; "
        "torch saw nothing (check witnesses)",
        "where:  mode=tp, rank 2 of 4, step 0, phase forward, module layers.0.mlp",
        "error:  1 of 16 events differ between witnesses, allowed 0",
        "first:  forward of layers.0.mlp in step 0: event 1 of rank 2",
        "causes: the torch profiler alone tells it otherwise",
        'repeat: shardproof run "dp=2 steps=4" --subject my.module:subject --profile torch,nsys --profile-steps 0:1',
    ]


def test_the_lines_of_what_the_closed_form_does_not_state_and_of_what_the_recorder_lacks() -> None:
    told = message({"torch": LEDGER}, TERMS[:-1])
    assert told[:2] == [
        "what:   event 3 of rank 0: the ledger has grad_sync all_reduce of 256 B over 0,2; closed_form saw nothing; "
        "3 more events differ (check witnesses)",
        "where:  mode=tp, all 4 ranks, step 0, phase grad_sync",
    ]
    issued = "causes: the program issues other calls than its closed form states: "
    assert told[4] == f"{issued}the recorder and the torch profiler saw the same"
    told = message({"torch": doubled(LEDGER, 0, 3)})
    seen = "event 4 of rank 0: the ledger has nothing; torch saw grad_sync all_reduce of 256 B over 0,2"
    assert told[:2] == [f"what:   {seen} (check witnesses)", "where:  mode=tp, rank 0 of 4"]
    blind = "causes: the torch profiler tells it otherwise than the recorder"
    assert told[3:5] == ["first:  event 4 of rank 0", blind]


def test_witnesses_who_saw_nothing_do_not_agree() -> None:
    agreed = agreement([], {"torch": [], "nsys": []})
    found = judge_agreement(agreed, "1:2")
    nothing = "no witness saw any event in steps 1:2: nothing was witnessed"
    assert lines(found, agreed)[:-1] == [
        f"what:   {nothing} (check witnesses)",
        "where:  mode=tp, all 4 ranks",
        "error:  nothing to measure: this must never be",
        f"first:  {nothing}",
        "causes: no rank of 4 issues a collective here",
    ]


@pytest.mark.parametrize(
    ("others", "terms", "cause"),
    [
        ({"recorder": dropped(LEDGER, 1, 0), "torch": dropped(LEDGER, 1, 0)}, None, "witness"),
        ({"torch": changed(LEDGER, 1, 0, op="reduce")}, TERMS, "witness"),
        ({"nsys": doubled(LEDGER, 1, 0)}, TERMS, "witness"),
        ({"torch": changed(LEDGER, 0, 3, payload_bytes=1)}, TERMS[:-1], "witness"),
        ({"torch": LEDGER}, [*TERMS, TERMS[0]], "witness"),
        ({"torch": doubled(LEDGER, 1, 3)}, TERMS, "witness"),
    ],
)
def test_the_cause_follows_from_who_contradicts_whom(others: Others, terms: Sequence[Term] | None, cause: str) -> None:
    agreed = agreement(LEDGER, others, EVENTS, terms)
    assert [told.id for told in diagnose_disagreement(CASE, agreed, judge_agreement(agreed)).causes] == [cause]


def told_of(*watched: str) -> WitnessResult:
    """Messages of a session whose ranks' outcomes have these digests when they are watched, "a" when not."""

    facts: dict[str, Any] = {"calls": range(len(PLAN)), "seconds": (1.0,), "watched_s": 1.0, "peak_bytes": 1}
    ranks = tuple(
        WatchedRank(events=tuple(e for e in EVENTS if e.rank == rank), plain="a", watched=digest, **facts)
        for rank, digest in enumerate(watched)
    )
    session = Session(tool="nsys", folder=Path(), ranks=ranks, seen=tuple(LEDGER))
    seen = Witnesses(sessions={"nsys": {str(CASE): session}}, notes=(), subject=SUBJECT, options="--profile nsys")
    return seen.judge_case(CASE, EVENTS, TERMS)


def test_an_outcome_that_watching_changes_in_six_lines() -> None:
    told = told_of("a", "b", "a", "b")
    assert told.verdict.message.splitlines() == [
        "what:   the outcome of ranks 1, 3 is not the same bit for bit when the recorder and nsys watch "
        "(check witnesses)",
        "where:  mode=tp, ranks 1, 3 of 4",
        "error:  compared exactly: nothing is allowed to differ",
        "first:  the outcome of ranks 1, 3 is not the same bit for bit when the recorder and nsys watch",
        "causes: the outcome of a run that is watched is another one",
        'repeat: shardproof run "dp=2 steps=4" --subject my.module:subject --profile nsys',
    ]
    assert told.diagnosis is not None and told.diagnosis.ranks == (1, 3)
    told = told_of("a", "a", "a", "a")
    assert told.diagnosis is None
    assert told.verdict.message == "ledger, recorder, nsys, closed_form agree on 16 events of 4 ranks"
