"""Terms that leave fields out: their counts, the messages of a wrong ledger, and the readers of a closed form."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.harness.checking.checks import CHECKS, run_checks
from shardproof.harness.checking.finding import Finding
from shardproof.harness.differences import find_differences
from shardproof.harness.ledger import Event
from shardproof.harness.protocols import TermLike
from shardproof.harness.running.summary import summarize
from shardproof.harness.terms import FIELDS, Term
from shardproof.harness.verdicts.verdict import FAIL, PASS
from shardproof.harness.witnesses.agreement import CLOSED_FORM, agreement, of_ledger
from shardproof.harness.witnesses.chosen import terms_of
from tests.harness.toy_evidence import TERMS, altered, case, events, evidence, told_by, without

EVENTS = events()
"""On either rank 20 all_reduces over tp, 8 of them forward; 16 of 384 B and 4 of 64 B."""
ALL = Term(op="all_reduce", axis="tp", calls=20, total_bytes=6400)


def judged(terms: Sequence[TermLike], ledger: Sequence[Event] = EVENTS) -> Finding:
    return run_checks(evidence(events=tuple(ledger), expectation=tuple(terms)))["ledger"]


def causes(terms: Sequence[TermLike], ledger: Sequence[Event]) -> str:
    return told_by(evidence(events=tuple(ledger), expectation=tuple(terms)), "ledger")[4]


def generalised(kept: Sequence[str], *, summed: bool) -> list[Term]:
    """The terms of the toy ledger with these fields alone, and the bytes of all calls when `summed`."""
    amounts: dict[tuple[tuple[str, Any], ...], Counter[str]] = {}
    for term in TERMS:
        fields = tuple((name, getattr(term, name)) for name in kept)
        amounts.setdefault(fields, Counter()).update(calls=term.calls, total_bytes=term.calls * term.payload_bytes)
    return [
        Term(**dict(fields), calls=of["calls"], total_bytes=of["total_bytes"] if summed else None)
        for fields, of in amounts.items()
    ]


@given(kept=st.sets(st.sampled_from([name for name in FIELDS if name != "payload_bytes"])), summed=st.booleans())
def test_whatever_is_left_out_right_ledger_passes_and_one_more_or_less_call_fails(kept: set[str], summed: bool) -> None:
    terms = generalised(sorted(kept), summed=summed)
    assert find_differences(EVENTS, terms, range(2)) == []
    assert find_differences(EVENTS[:-1], terms, range(2))
    assert find_differences([*EVENTS, EVENTS[-1]], terms, range(2))
    heavier = altered(EVENTS, 0, payload_bytes=392)
    assert bool(find_differences(heavier, terms, range(2))) == summed


@pytest.mark.parametrize(
    ("terms", "message", "cause"),
    [
        ([replace(ALL, calls=19)], "calls=19, total_bytes=6400), found 20 calls, 6400 B: 4 in forward", "more calls"),
        ([replace(ALL, total_bytes=6000)], "total_bytes=6000), found 20 calls, 6400 B: 4 in", "of other sizes"),
        ([ALL, Term(op="all_gather", calls=1)], 'expected Term(op="all_gather", calls=1), found none', "left out"),
        ([ALL, Term(phase="loss", calls=3)], "found 4 calls, 256 B: 4 in loss of no module at model.py:7", "more"),
        ([Term(phase="forward")], "extra event in loss of no module (4 calls): all_reduce max of 64 B", "too many"),
        ([*TERMS[1:], Term(op="all_reduce", total_bytes=1)], "total_bytes=1), found 20 calls, 6400 B", "other sizes"),
    ],
)
def test_term_that_does_not_hold_is_told_as_it_was_written(terms: Sequence[TermLike], message: str, cause: str) -> None:
    finding = judged(terms)
    assert finding.verdict == FAIL and message in finding.message
    assert cause in causes(terms, EVENTS)


def test_an_event_that_no_term_counts_stands_for_one_that_a_term_lacks() -> None:
    wrong = altered(EVENTS, 5, payload_bytes=8, op="all_gather", reduce_op="")
    finding = judged([replace(ALL, total_bytes=None)], wrong)
    expected = 'expected Term(op="all_reduce", axis="tp", calls=20), found 19 calls, 6016 B'
    event = "all_gather of 8 B float64 over tp (2 ranks)"
    assert finding.message == f"wrong event in forward of layers.0.mlp.w2 (1 call): {event}; {expected}"
    assert (finding.ranks, finding.region) == ((0,), "layers.0.mlp.w2")
    assert "op all_gather instead of all_reduce" in causes([replace(ALL, total_bytes=None)], wrong)


def test_a_place_is_named_where_all_counted_events_have_it() -> None:
    finding = judged([Term(op="all_reduce", reduce_op="max", calls=3), Term(reduce_op="sum")])
    assert (finding.phase, finding.region) == ("loss", "")
    finding = judged([Term(region="head", calls=5), Term(axis="tp")])
    assert (finding.phase, finding.region) == ("backward", "head")


def test_equal_terms_add_up_and_a_pass_lists_what_was_not_compared() -> None:
    finding = judged([ALL])
    assert (finding.verdict, finding.message) == (PASS, "20 events a rank, as the closed form states")
    (left_out,) = finding.notes
    assert left_out.names == ("phase", "region", "reduce_op", "group_size", "dtype")
    halves = [Term(op="all_reduce", calls=12, total_bytes=6000), Term(op="all_reduce", calls=8, total_bytes=400)]
    assert judged(halves).verdict == PASS
    assert judged([Term(axis="tp")]).notes[0].names[-2:] == ("payload_bytes", "calls")
    assert judged([Term(axis="tp"), Term(axis="dp", calls=0)]).verdict == PASS
    assert judged([Term(axis="dp"), Term(axis="tp", calls=0)]).verdict == FAIL


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"^Term\(\): states nothing"),
        ({"op": "allreduce"}, "^op='allreduce': is no word of the ledger; legal: 'broadcast', "),
        ({"phase": "fwd"}, "^phase='fwd': is no word of the ledger; legal: 'data', "),
        ({"calls": -1}, "^calls=-1: must be a whole number of at least 0"),
        ({"calls": True}, "^calls=True: must be a whole number"),
        ({"group_size": 0, "op": "all_reduce"}, "^group_size=0: must be a whole number of at least 1"),
        ({"axis": 2}, "^axis=2: must be a word, not int; leave it out for any"),
        ({"payload_bytes": 8, "total_bytes": 16}, "^payload_bytes=8, total_bytes=16: state one of the two"),
    ],
)
def test_a_term_that_no_call_can_have_is_refused(fields: dict[str, Any], message: str) -> None:
    """A term prints as the call that makes it."""
    with pytest.raises((TypeError, ValueError), match=message):
        Term(**fields)
    term = Term(op="all_reduce", region="", calls=2, hidden=True)
    assert repr(term) == 'Term(region="", op="all_reduce", calls=2, hidden=True)' and eval(repr(term)) == term


def test_a_summary_knows_what_terms_of_equal_fields_tell_and_no_more() -> None:
    def expected(*terms: TermLike) -> dict[str, tuple[int | None, int | None]]:
        rows = summarize("c", "tp", 2, EVENTS, terms)
        return {row.phase: (row.expected_calls, row.expected_payload_bytes) for row in rows}

    whole = expected(*TERMS)
    assert whole == {"forward": (8, 3072), "loss": (4, 256), "backward": (8, 3072)}
    row = ("phase", "op", "axis", "group_size")
    assert expected(*generalised(row, summed=True)) == whole
    assert expected(*generalised(row, summed=False)) == {phase: (calls, None) for phase, (calls, _) in whole.items()}
    assert expected(*generalised(row[:3], summed=True)) == whole, "one size of groups over tp"
    assert expected(ALL) == dict.fromkeys(whole, (None, None))
    assert expected(*TERMS, Term(phase="forward", calls=8)) == whole | {"forward": (None, None)}
    fewer = generalised(row, summed=True)[:2]
    assert expected(*fewer) == whole | {"backward": (0, 0)}, "no term counts a call there"


def test_calls_that_a_partial_term_hides_must_travel_behind_products() -> None:
    forward = {(e.rank, e.call_index) for e in EVENTS if e.phase == "forward"}

    def found(check: str, **changes: Any) -> Finding:
        return run_checks(evidence(**changes), {check: CHECKS[check]})[check]

    for calls in (8, None):
        promised = (Term(phase="forward", calls=calls, hidden=True), Term(axis="tp"))
        assert found("overlap", expectation=promised, hidden=frozenset(forward)).verdict == PASS
        one_less = found("overlap", expectation=promised, hidden=frozenset(sorted(forward)[1:]))
        assert one_less.verdict == FAIL and one_less.message.startswith("1 of 8 calls of rank 0")
    # Silence is wrong where a term may count a call between ranks.
    for term, verdict in ((Term(op="all_reduce", calls=2), FAIL), (Term(axis="tp", calls=0), PASS)):
        assert found("parallelism", events=(), expectation=(term,)).verdict == verdict


def test_the_closed_form_is_a_witness_as_far_as_it_says() -> None:
    def words(ledger: Sequence[Event], *terms: TermLike) -> list[str]:
        return [row.words[CLOSED_FORM] for row in agreement(of_ledger(ledger), {}, ledger, terms).broken]

    assert words(EVENTS, ALL) == []
    assert words(EVENTS, replace(ALL, calls=19)) == ["missing"] * 2, "the last call of either rank"
    left = 'more of Term(op="all_reduce", axis="tp", calls=20, total_bytes=6400)'
    assert words(without(EVENTS, region="head"), ALL) == [f"1 call of 384 B {left}"] * 2
    assert words(EVENTS, Term(phase="forward")) == ["missing"] * 24


def test_some_steps_have_their_share_of_a_partial_term() -> None:
    def expected(one: Any) -> list[Term]:
        return [Term(op="all_reduce", calls=5 * one.steps, total_bytes=1600 * one.steps), Term(axis="dp")]

    many = case("mode=tp tp=2 steps=4")
    assert terms_of(range(1, 3), many, expected(many), expected) == (tuple(expected(many.but(steps=2))), "")
    terms, why = terms_of(range(1, 3), many, [Term(op="all_reduce", calls=21), Term(axis="dp")], expected)
    assert terms is None and why.endswith('Term(op="all_reduce", calls=21) is not 4 times what one step has')
