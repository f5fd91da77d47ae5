"""Terms, parts and dtypes: what a wrong tensor is made of, and nothing where several makings fit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.causes.cause import Cause, claim_cause
from shardproof.harness.diagnosing.causes.proofs import Explained
from shardproof.harness.diagnosing.causes.ranking import within_limits
from shardproof.harness.diagnosing.hypotheses.displaced import from_regions
from shardproof.harness.diagnosing.hypotheses.patterns import guess_rounded_numbers
from shardproof.harness.diagnosing.hypotheses.replicas import never_reduced
from shardproof.harness.diagnosing.hypotheses.sums import from_shares
from shardproof.harness.diagnosing.rank_causes import by_numbers
from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.outcome.blocks import blocks, localize
from shardproof.harness.protocols import Axes, Shard
from shardproof.harness.verdicts.facts import state_text
from tests.harness.toy_evidence import (
    TERMS,
    a_term,
    but,
    case,
    drawn,
    events,
    evidence,
    ids_of,
    outcome_of,
    planted,
    truth,
)

LINEAR, TABLE = "act/layers.0.mlp.w2", "act/embedding"
OUTER, INNER = "act/layers.0.mlp", "act/layers.0.mlp.w1"
W1, OF_W2 = "grad/layers.0.mlp.w1.weight", "grad/layers.0.mlp.w2.bias"
ONE = case("mode=tp tp=2 seq=16 micro=1")


BIAS, POSITIONS = drawn(6), drawn(3, 6)
STARTS = {"start/layers.0.mlp.w2.bias": BIAS, "start/embedding.positions.weight": POSITIONS}
seen_with = partial(planted, shares=STARTS, case=ONE)


def test_what_is_not_finite_is_told() -> None:
    assert ids_of(seen_with({W1: truth()[W1] / 0})) == ["nan"]


def test_numbers_of_a_shorter_dtype_are_told() -> None:
    right = drawn(8, 4)
    for short in (torch.float32, torch.bfloat16, torch.float16):
        (cause,) = guess_rounded_numbers(right.to(short).double(), right)
        words = f"explained by rounding to {str(short).removeprefix('torch.')}: all its numbers are ones of it; "
        assert cause.id == "shorter_dtype" and cause.words.startswith(words)
    assert guess_rounded_numbers(right.bfloat16(), right) == []  # the run's own dtype
    assert guess_rounded_numbers(right.float().double(), right.float().double()) == []  # as the truth itself
    for factor in (0.5, 0.875, 2.0):
        assert guess_rounded_numbers(factor * right.bfloat16().double(), right) == []
    assert guess_rounded_numbers(right[0].bfloat16().double()[:4], right[0][:4]) == []  # too few to be none by chance


def parts_of(name: str, full: Tensor, starts: tuple[int, ...], places: tuple[int, ...]) -> Evidence:
    """Ranks that hold columns of a tensor from these starts, and in them the numbers of these places."""
    outcomes: list[Mapping[str, Any]] = []
    for start, place in zip(starts, places, strict=True):
        size = min(starts[1], full.shape[1] - start)
        local = torch.nn.functional.pad(full, (0, size))[:, place : place + size]
        outcomes.append(localize({name: Shard(local, (0, start), tuple(full.shape))}))
    return but(seen_with({}), outcomes=outcomes, tensors={name: full})


def test_a_part_that_holds_another_place_is_told_also_when_parts_are_unequal() -> None:
    full = drawn(4, 7)

    def found(places: tuple[int, int]) -> list[Cause]:
        seen = parts_of("grad/x", full, (0, 4), places)
        return from_regions(seen.run, seen.truth, "grad/x")

    (cause,) = found((0, 0))
    assert cause.id == "other_part" and "rank 1 holds what lies at 0, where 4 is meant" in cause.words
    assert found((0, 4)) == []
    assert found((0, 1)) == []  # no part begins there


def test_calls_too_many_that_nobody_waits_for_are_told_as_calls_too_many() -> None:
    """Nobody need wait for the handle of a call that is not needed at all."""
    extra = replace(TERMS[-1], op="all_gather", reduce_op="")
    work = Unwaited(rank=0, op="all_gather", group="tp (0 1)", number=0, caller="model.py:7")
    assert ids_of(seen_with({}, events=events((*TERMS, extra)), unwaited=(work,))) == ["extra_call"]
    assert ids_of(seen_with({}, unwaited=(work,))) == ["not_waited"]


def test_a_call_that_parts_behind_the_first_wrong_number_is_no_cause_of_it() -> None:
    """A gradient that forward never used leaves its sum out, and another choice of experts sends other rows."""
    summed = a_term(phase="grad_sync", region="")
    for name, ids in ((LINEAR, []), ("loss/0", ["missing_call"])):
        assert ids_of(seen_with({name: drawn(*truth()[name].shape)}, expectation=(*TERMS, summed))) == ids

    less = tuple(replace(one, payload_bytes=96 if one.region == LINEAR[4:] else one.payload_bytes) for one in TERMS)
    for choices, ids in (({}, ["wrong_call"]), ({f"routing/0/{LINEAR[4:]}": torch.ones(4, 3, 2).bool()}, [])):
        ranks = [outcome_of(rank, {**truth(), LINEAR: drawn(2, 3, 6), **choices}) for rank in range(2)]
        assert ids_of(evidence(*ranks, case=ONE, events=events(less))) == ids


def test_a_module_that_never_ran_lacks_more_than_its_call() -> None:
    values = {**truth(), OUTER: truth()[OUTER] - truth()[LINEAR]}
    for left_out, ids in (((), ["missing_call"]), ((LINEAR,), [])):
        known = {name: tensor for name, tensor in values.items() if name not in left_out}
        ranks = [outcome_of(rank, known) for rank in range(2)]
        assert ids_of(evidence(*ranks, case=ONE, events=events((*TERMS[:1], *TERMS[2:])))) == ids


def test_a_parameter_without_a_gradient_lacks_more_than_its_sum() -> None:
    """A parameter that is not used or frozen stays as before. If it moves, its gradient was not returned."""
    summed, still = a_term(phase="grad_sync", region=""), {**truth(), "param/layers.0.mlp.w2.bias": BIAS}
    lost = {name: tensor for name, tensor in still.items() if name != OF_W2}
    moved = {**lost, "param/layers.0.mlp.w2.bias": drawn(6, seed=8)}
    for values, ids in ((still, ["missing_call"]), (lost, ["never_updated"]), (moved, ["missing_call"])):
        ranks = [outcome_of(rank, values) for rank in range(2)]
        assert ids_of(evidence(*ranks, case=ONE, expectation=(*TERMS, summed), shares=STARTS)) == ids


def test_parts_that_do_not_fit_follow_from_a_call_over_other_ranks() -> None:
    apart = [Shard(truth()[W1][:4], (0, 0), (8, 6)), Shard(truth()[W1][3:7], (3, 0), (8, 6))]
    ranks = [{**outcome_of(rank, truth()), W1: part} for rank, part in enumerate(apart)]
    expected, issued = (a_term(phase="grad_sync", region="", axis=axis) for axis in ("edp", "tp"))
    for more, ids in (((), ["layout"]), ((issued,), ["wrong_group"])):
        expectation = (*TERMS, *((expected,) if more else ()))
        assert ids_of(evidence(*ranks, expectation=expectation, events=events((*TERMS, *more)))) == ids


def _terms_of(parts: Sequence[Tensor], true: Tensor, axes: Axes) -> list[Cause]:
    return never_reduced({rank: blocks(part) for rank, part in enumerate(parts)}, true, axes)


def test_partial_sums_are_those_of_an_axis_whose_groups_all_add_up() -> None:
    true, part = drawn(6), drawn(6, seed=3)
    axes = {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3))}
    for order, axis in (((0, 0, 1, 1), "dp=2"), ((0, 1, 0, 1), "tp=2")):
        (told,) = _terms_of([(part, true - part)[place] for place in order], true, axes)
        assert f"over the ranks of {axis}" in told.words
    (told,) = _terms_of([0.1 * part, 0.2 * part, 0.3 * part, true - 0.6 * part], true, axes)
    assert told.id == "not_summed" and "over all ranks is the truth" in told.words


def test_shards_that_overlap_hold_the_terms_of_what_both_have_or_differ_by_rounding() -> None:
    true = truth()[W1]
    for common, ids in ((0.3 * true[3:5], ["not_summed"]), (true[3:5] * (1 + 1e-15), ["replicas_drift"])):
        first, second = torch.cat([true[:3], common]), true[3:].clone()
        second[:2] -= common if ids == ["not_summed"] else 0
        apart = [Shard(first, (0, 0), (8, 6)), Shard(second, (3, 0), (8, 6))]
        ranks = [{**outcome_of(rank, truth()), W1: part} for rank, part in enumerate(apart)]
        assert ids_of(evidence(*ranks)) == ids


def test_one_rank_may_hold_the_whole_sum() -> None:
    true = drawn(6)
    for parts in ((true, 0 * true), (true + 1e-16 * drawn(6, seed=5), 0 * true), (0.3 * true, 0.7 * true)):
        assert [told.id for told in _terms_of(parts, true, {"tp": ((0, 1),)})] == ["not_summed"]
    assert _terms_of((true, true / 2), true, {"tp": ((0, 1),)}) == []


def test_tensors_behind_the_first_one_need_not_be_as_near() -> None:
    """Later tensors were computed from wrong values, and round otherwise; the first must be near."""
    later = 1e-8 * drawn(8, 6)
    for first, second, told in ((0.0, later, ["size_factor"]), (1e-8 * drawn(6), 0 * later, [])):
        table = {OF_W2: 2 * truth()[OF_W2] + first, W1: 2 * truth()[W1] + second}
        proof = (Explained(value=table[n], truth=truth()[n], guess=2 * truth()[n], names=(n,)) for n in (OF_W2, W1))
        causes, found = claim_cause("size_factor", state_text("both are 2 x the truth"), *proof), seen_with(table)
        merged = replace(found.run.merged, tensors={**found.run.tensors, **table})
        assert [cause.id for cause in within_limits(but(found, merged=merged), causes)] == told


def test_an_element_is_measured_by_its_own_predicted_size() -> None:
    """An element of thousands is far larger than others, and is rounded where the truth has a small one."""
    name, true = "act/head", drawn(2, 100, 100)
    true[0, 0, 0] = 1e4
    guess = true.roll(50, 1)
    value = (guess * (1 + 2**-8)).bfloat16()
    known = {**truth(), name: true}
    short = {n: t.bfloat16() if t.is_floating_point() else t for n, t in {**known, name: value}.items()}
    text = case("mode=tp tp=2 seq=16 dtype=bfloat16")
    found = planted(short, truth=known, case=text)
    proof = Explained(value=found.run.tensors[name], truth=true, guess=guess)
    assert within_limits(found, claim_cause("other_part", state_text("it is shifted"), proof))


def test_gradients_kept_wider_than_they_were_computed_are_judged_as_they_were() -> None:
    """Masters in float32 of gradients in float16, all eight times the truth but for rounding: a factor."""
    text = case("mode=tp tp=2 seq=16 micro=2 dtype=float16 master=float32")
    parts = drawn(1, 2, 8, 6)
    true = {**truth(), W1: parts.sum((0, 1))}
    short = {name: t.half().float() if t.is_floating_point() else t for name, t in true.items()}
    short[W1] = (8 * parts[0, 0] * 1.01 + 8 * parts[0, 1]).half().float()
    shares = {W1: parts, "tokens": torch.tensor([[4.0, 4.0]], dtype=torch.float64)}
    found = planted(short, truth=true, case=text, shares=shares)
    assert from_shares(found, [W1]) == []
    (cause,) = by_numbers(found, [W1])
    assert (cause.id, " 8" in cause.words or " 7.9" in cause.words) == ("constant_factor", True)
