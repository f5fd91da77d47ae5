"""Witnesses compared event by event: every planted slip of any of them is a failure that names the event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from harness.evidence import FAIL, PASS
from harness.ledger import Event
from harness.witnesses.agreement import agreement, finding
from harness.witnesses.sighting import UNKNOWN, Sighting, of_ledger

AXES = {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3))}
PLAN = (
    ("data", "", "broadcast", "tp", 8),
    ("forward", "layers.0.mlp", "all_reduce", "tp", 64),
    ("backward", "layers.0.mlp", "all_gather", "tp", 128),
    ("grad_sync", "", "all_reduce", "dp", 256),
)
Seen = list[Sighting]


@dataclass(frozen=True)
class Term:
    """A line of a closed form."""

    phase: str
    region: str
    op: str
    axis: str
    payload_bytes: int
    calls: int = 1
    reduce_op: str = ""
    group_size: int = 2
    dtype: str = "float32"


def event(rank: int, index: int, phase: str, region: str, op: str, axis: str, payload_bytes: int) -> Event:
    return Event(
        case="c",
        mode="tp",
        world_size=4,
        rank=rank,
        step=0,
        microbatch=0,
        phase=phase,
        region=region,
        op=op,
        reduce_op="",
        axis=axis,
        group_size=2,
        dtype="float32",
        shape="",
        payload_bytes=payload_bytes,
        wire_bytes=0,
        is_async=False,
        call_index=index,
        start_us=0.0,
        duration_us=0.0,
        caller="",
    )


EVENTS = [event(rank, index, *line) for rank in range(4) for index, line in enumerate(PLAN)]
TERMS = [Term(*line) for line in PLAN]
LEDGER = of_ledger(EVENTS, AXES)


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
    found = finding(agreement(LEDGER, {"torch": LEDGER, "nsys": LEDGER}, EVENTS, TERMS))
    assert found.verdict == PASS
    assert found.message == "ledger, torch, nsys, closed_form agree on 16 events of 4 ranks"


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        (lambda s: changed(s, 2, 1, payload_bytes=65), "torch saw forward all_reduce of 65 B over 2,3"),
        (lambda s: changed(s, 2, 1, op="reduce"), "torch saw forward reduce of 64 B over 2,3"),
        (lambda s: changed(s, 2, 1, groups=((0, 2),)), "torch saw forward all_reduce of 64 B over 0,2"),
        (lambda s: changed(s, 2, 1, phase="backward"), "torch saw backward all_reduce of 64 B over 2,3"),
        (lambda s: dropped(s, 2, 1), "torch saw nothing"),
        (lambda s: swapped(s, 2, 1), "torch saw backward all_gather of 128 B over 2,3; 1 more events differ"),
    ],
)
def test_a_slip_of_a_witness_fails_and_names_the_event(slip: Callable[[Seen], Seen], words: str) -> None:
    found = finding(agreement(LEDGER, {"torch": slip(LEDGER), "nsys": LEDGER}))
    assert found.verdict == FAIL
    start = "event 1 of rank 2: the ledger has forward all_reduce of 64 B over 2,3 in layers.0.mlp; "
    assert found.message == start + words
    assert (found.phase, found.region) == ("forward", "layers.0.mlp")


def test_an_event_that_only_a_witness_saw_fails() -> None:
    found = finding(agreement(LEDGER, {"nsys": doubled(LEDGER, 0, 3)}))
    assert found.message == (
        "event 4 of rank 0: the ledger has nothing; nsys saw grad_sync all_reduce of 256 B over 0,2"
    )


def test_the_closed_form_misses_and_demands() -> None:
    fewer = agreement(LEDGER, {}, EVENTS, TERMS[:-1])
    assert [row.words["closed_form"] for row in fewer.broken] == ["missing"] * 4
    more = finding(agreement(LEDGER, {}, EVENTS, [*TERMS, TERMS[1]]))
    assert "closed_form saw 1 more forward all_reduce of 64 B over tp in layers.0.mlp" in more.message


def test_what_a_witness_leaves_open_is_not_compared_but_counted() -> None:
    vague = [replace(s, groups=((0, 1), (2, 3), (0, 2), (1, 3)), payload_bytes=UNKNOWN, phase="") for s in LEDGER]
    found = finding(agreement(LEDGER, {"torch": vague}))
    assert found.verdict == PASS
    assert found.unchecked == ("48 fields that torch does not tell",)


def test_witnesses_who_saw_nothing_do_not_agree() -> None:
    assert finding(agreement([], {"torch": [], "nsys": []})).verdict == FAIL
