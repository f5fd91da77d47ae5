"""The ledger check: the exact multiset on every rank, the first difference by name, and the general laws."""

from dataclasses import replace
from typing import Any

import pytest

from shardproof.harness.checking.checks import run_checks
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.laws import broken_laws
from shardproof.harness.checking.ledger_checks import module_order
from shardproof.harness.differences import but_for_bytes, find_differences
from shardproof.harness.ledger import Event
from shardproof.harness.running.summary import summarize
from shardproof.harness.terms import Term
from shardproof.harness.verdicts.facts import state_difference
from shardproof.harness.verdicts.verdict import FAIL, PASS
from shardproof.suites.subjects import quantised
from tests.harness.noted import reasons_of
from tests.harness.proofs import proved, told, verdict_of
from tests.harness.toy_evidence import MODULES, TERMS, a_term, altered, events, evidence, without


def judged(ledger: tuple[Event, ...], **changes: Any) -> Finding:
    return run_checks(evidence(events=ledger, **changes))["ledger"]


def first_message(ledger: tuple[Event, ...], terms: tuple[Term, ...] = TERMS) -> str:
    return state_difference(find_differences(ledger, terms, range(2), MODULES)[0]).text


@pytest.mark.parametrize("term", TERMS, ids=lambda term: f"{term.phase}-{term.region or 'none'}")
def test_one_call_more_or_less_is_named_with_module_and_phase(term: Term) -> None:
    finding = judged(without(events(), phase=term.phase, region=term.region))
    assert (finding.verdict, finding.phase, finding.region) == (FAIL, term.phase, term.region)
    place = f"missing event in {term.phase} of {term.region or 'no module'} (1 call)"
    assert finding.message.startswith(f"{place}: all_reduce {term.reduce_op} of {term.payload_bytes} B float64 over tp")
    finding = judged((*events(), replace(events((replace(term, calls=1),))[1], call_index=99)))
    assert (finding.verdict, finding.phase, finding.region, finding.ranks) == (FAIL, term.phase, term.region, (1,))
    assert finding.message.startswith("extra event in")


def test_a_wrong_event_shows_both_sides_word_for_word() -> None:
    place = next(i for i, e in enumerate(events()) if e.region == "layers.0.mlp.w2")
    assert first_message(altered(events(), place, reduce_op="avg")) == (
        "wrong event in forward of layers.0.mlp.w2 (1 call): all_reduce avg of 384 B float64 over tp (2 ranks); "
        "expected all_reduce sum of 384 B float64 over tp (2 ranks)"
    )
    assert first_message(altered(events(), place, region="head")) == (
        "wrong event in forward of head (1 call): all_reduce sum of 384 B float64 over tp (2 ranks); "
        "expected all_reduce sum of 384 B float64 over tp (2 ranks) in forward of layers.0.mlp.w2"
    )


def test_a_call_in_another_phase_is_that_of_its_own_module() -> None:
    """Two modules with equal calls each keep their own."""
    modules = ("head", "layers.0.mlp.w1")
    alike = [replace(event, phase="recompute") if event.region in modules else event for event in events()]
    recomputed = [event for event in alike if event.phase == "recompute"]
    assert {event.region for event in recomputed} == {*modules}
    parted = find_differences(alike, TERMS, range(2))
    assert {(one.expected.region, one.found.region) for one in parted if one.expected and one.found} == {
        (module, module) for module in modules
    }


def test_a_call_that_is_made_too_late_is_missed_where_it_was_due() -> None:
    """Unless the first pass makes it in its place: then it is first wrong where a later pass makes it."""

    def first_line(step: int) -> tuple[str, str]:
        moved = [event.region == "layers.0.mlp.w1" and event.step == step for event in events()]
        pairs = zip(events(), moved, strict=True)
        late = [replace(event, phase="grad_sync", region="") if is_late else event for event, is_late in pairs]
        line = find_differences(late, TERMS, range(2), MODULES)[0].line
        return line.phase, line.region

    assert first_line(0) == ("backward", "layers.0.mlp.w1")
    assert first_line(1) == ("grad_sync", "")
    early = [replace(event, region="head") if event.region == "layers.0.mlp.w1" else event for event in events()]
    assert find_differences(early, TERMS, range(2), MODULES)[0].line.region == "head", "made before it is due"


def test_the_first_difference_is_the_first_in_training_order() -> None:
    ledger = without(without(events(), phase="backward", region="layers.0.mlp.w1"), phase="backward", region="head")
    finding = judged(ledger)
    assert finding.region == "head"  # backward meets the head first
    assert finding.message.endswith("; 1 more lines differ")
    assert judged(without(ledger, phase="forward", region="layers.0.mlp.w2")).region == "layers.0.mlp.w2"


RING = Term(phase="forward", op="all_gather", axis="tp", calls=8, payload_bytes=64, carrier="user_buffer")


def test_an_expected_call_that_no_recorder_sees_is_unseen_and_never_missing() -> None:
    finding = judged(events(), expectation=(*TERMS, RING))
    assert finding.verdict == PASS
    assert "8 all_gather over tp, expected and carried by user_buffer, which no recorder sees" in reasons_of(finding)
    (row,) = [row for row in summarize("", "tp", 2, events(), (*TERMS, RING)) if row.phase == "forward"][:1]
    assert row.op == "all_reduce"
    finding = judged(events(), expectation=(*TERMS, replace(RING, carrier="c10d")))  # carried by torch
    assert finding.verdict == FAIL and "all_gather" in finding.message
    (call,) = events(world_size=1)[:1]
    more = tuple(replace(call, rank=rank, op="all_gather", reduce_op="", payload_bytes=64) for rank in range(2))
    seen = judged((*events(), *more), expectation=(*TERMS, RING))
    assert seen.verdict == FAIL, "seen although it should not be"
    with pytest.raises(ValueError, match=r"carrier='nvshmem'.*'user_buffer', 'deep_ep', 'replay'"):
        Term(op="all_gather", carrier="nvshmem")
    assert repr(RING).endswith('carrier="user_buffer")')

    # Modules stand in forward order, with and without a truth.
    right = evidence()
    assert module_order(right.run.calls, right.claims, right.truth)[: len(MODULES)] == MODULES
    assert module_order(right.run.calls, right.claims, None) == ("embedding", "layers.0.mlp.w2")


def test_without_expectation_the_laws_are_checked_and_an_empty_one_is_one() -> None:
    finding = judged(events())
    assert (finding.verdict, finding.message) == (PASS, "20 events a rank, exactly as expected")
    assert judged((), expectation=()).verdict == PASS
    assert judged(events(), expectation=()).verdict == FAIL
    finding = judged(events(), expectation=None)
    assert finding.verdict == PASS
    assert reasons_of(finding) == ["the subject states no expectation"]
    assert judged(altered(events(), 3, op="all_gather"), expectation=None).verdict == FAIL


def laws_broken_by(ledger: tuple[Event, ...]) -> list[str]:
    """The messages of broken laws where autograd needs every gradient."""
    return [broken.fact.text for broken in broken_laws(replace(event, needs_gradient=True) for event in ledger)]


def test_members_of_a_group_must_issue_the_same_sequence() -> None:
    assert laws_broken_by(events()) == []
    swapped = altered(altered(events(), 0, call_index=8), 8, call_index=0)  # rank 0 begins with the loss
    assert laws_broken_by(swapped) == [
        "ranks disagree in call #0 of tp (0 1): the reduce op is sum on rank 1, max on rank 0; "
        "rank 1 issued all_reduce sum float64 of 384 B over tp, embedding (forward, step 0), at model.py:7, "
        "rank 0 all_reduce max float64 of 64 B over tp (loss, step 0), at model.py:7"
    ]
    shorter = tuple(event for event in events() if not (event.rank == 1 and event.call_index == 19))
    assert laws_broken_by(shorter)[0].startswith("rank 1 never issued call #19 of tp (0 1): all_reduce ")
    skips = tuple(event for event in events() if not (event.rank == 1 and event.call_index == 3))
    assert laws_broken_by(skips)[0].startswith("rank 1 never issued call #3 of tp (0 1): all_reduce ")
    finding = judged(swapped)
    assert (finding.verdict, finding.ranks) == (FAIL, (0, 1))


def test_groups_are_kept_apart_and_size_one_groups_are_free() -> None:
    ledger = events(world_size=4)
    lonely = altered(altered(ledger, 0, op="broadcast", reduce_op=""), 20, op="broadcast", reduce_op="")
    assert {event.rank for event in lonely if event.op == "broadcast"} == {0, 1}
    assert broken_laws(lonely) == []
    extra = replace(ledger[0], axis="pp", group_size=1, call_index=77)
    assert broken_laws((*ledger, extra)) == []


def test_a_call_of_one_rank_is_one_of_any_axis() -> None:
    result = proved(quantised.subject, "steps=1 micro=1", explain=False)
    assert verdict_of(result, "ledger").verdict == PASS, told(result)


def test_what_is_sent_is_received() -> None:
    move = a_term(phase="forward", region="", op="send", reduce_op="", calls=1)
    sends, receives = events((move,)), events((replace(move, op="recv"),))
    assert laws_broken_by((sends[0], receives[1])) == []
    assert laws_broken_by((sends[0],)) == [
        "tp group [0, 1] sends 1 messages of 384 B and receives 0 of 0 B, at model.py:7"
    ]
    short = replace(receives[1], payload_bytes=8)
    assert laws_broken_by((sends[0], short)) == [
        "tp group [0, 1] sends 1 messages of 384 B and receives 1 of 8 B, at model.py:7"
    ]

    # Uneven all-to-alls are lawful, and uneven reductions are not.
    uneven = events((a_term(phase="forward", region="", op="all_to_all", reduce_op="", calls=1),))
    assert laws_broken_by((uneven[0], replace(uneven[1], payload_bytes=8))) == []
    reduced = events((a_term(phase="forward", region="", calls=1),))
    assert len(laws_broken_by((reduced[0], replace(reduced[1], payload_bytes=8)))) == 1


def test_moves_have_their_conjugates() -> None:
    exchange = a_term(phase="forward", region="layers.0.mlp", op="all_to_all", reduce_op="", calls=2)
    scatter = replace(exchange, op="reduce_scatter", reduce_op="sum")
    back, gather = replace(exchange, phase="backward"), replace(exchange, phase="backward", op="all_gather")
    assert laws_broken_by(events((exchange, scatter, back, gather))) == []
    assert laws_broken_by(events((exchange, scatter))) == []  # nothing goes backward: an evaluation
    assert laws_broken_by(events((exchange, back, scatter, replace(gather, calls=1)))) == [
        "2 reduce_scatters of 384 B float64 over tp in forward of layers.0.mlp have no all_gather of their gradients "
        "in its backward, at model.py:7"
    ]
    assert laws_broken_by(events((exchange, replace(back, calls=1)))) == [
        "4 all-to-alls of 1536 B over tp go forward and 2 of 768 B backward: each must have its conjugate, "
        "module layers.0.mlp, at model.py:7"
    ]
    tokens = replace(exchange, dtype="int64")
    assert laws_broken_by(events((tokens, replace(gather, calls=1)))) == []  # indices have no gradient


def test_calls_with_other_rows_in_some_modules_are_put_aside_and_others_are_not() -> None:
    """Another choice of rows gives other payloads, and more or fewer calls of the same kind; another dtype is no
    choice.
    """
    terms = (
        a_term(phase="forward", region="layers.0", op="all_to_all", payload_bytes=64),
        a_term(phase="forward", region="layers.0", op="all_gather", payload_bytes=32),
    )
    rows = tuple(replace(event, payload_bytes=48) for event in events(terms[:1]))
    fewer = rows + tuple(replace(event, payload_bytes=16, call_index=9) for event in events(terms[:1]))
    for ledger in (rows, fewer):
        parted = find_differences((*ledger, *events(terms[1:])), terms, range(2))
        assert parted and but_for_bytes(parted, {"layers.0"}) == []
        assert but_for_bytes(parted, {"layers.1"}) == parted
    narrow = tuple(replace(event, dtype="float32") for event in events(terms[1:]))
    parted = find_differences((*rows, *narrow), terms, range(2))
    (left,) = but_for_bytes(parted, {"layers.0"})
    assert left.found and (left.found.op, left.found.dtype) == ("all_gather", "float32")
