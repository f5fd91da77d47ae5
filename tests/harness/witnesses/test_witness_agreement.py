"""Witnesses compared event by event: every planted slip of any of them is a failure that names the event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.checking.evidence import FAIL, PASS
from harness.checking.witness_checks import finding
from harness.witnesses.agreement import UNKNOWN, agreement
from tests.harness.witnesses.toy_sightings import EVENTS, LEDGER, TERMS, Seen, changed, doubled, dropped, swapped


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
        (lambda s: swapped(s, 2, 1), "torch saw backward all_gather of 128 B over 2,3; 1 more event differs"),
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
