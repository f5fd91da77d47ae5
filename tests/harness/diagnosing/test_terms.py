"""Terms, parts and dtypes: what a wrong tensor is made of, and nothing where several makings fit."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.diagnosing.by_numbers import by_numbers
from shardproof.harness.diagnosing.causes.cause import claimed
from shardproof.harness.diagnosing.causes.proofs import Explained
from shardproof.harness.diagnosing.causes.ranking import within_limits
from shardproof.harness.diagnosing.hypotheses.displaced import from_regions
from shardproof.harness.diagnosing.hypotheses.norms import from_norms
from shardproof.harness.diagnosing.hypotheses.patterns import rounded
from shardproof.harness.diagnosing.hypotheses.replicas import partial_sums
from shardproof.harness.diagnosing.hypotheses.sum_terms import from_terms
from shardproof.harness.diagnosing.hypotheses.sums import from_counts, from_shares
from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.outcome.blocks import localize
from shardproof.harness.shard import Shard
from tests.harness.toy_evidence import (
    TERMS,
    a_term,
    case,
    drawn,
    events,
    evidence,
    ids_of,
    outcome_of,
    planted,
    tried,
    truth,
)

LINEAR, TABLE = "act/layers.0.mlp.w2", "act/embedding"
OUTER, INNER = "act/layers.0.mlp", "act/layers.0.mlp.w1"
W1, OF_W2 = "grad/layers.0.mlp.w1.weight", "grad/layers.0.mlp.w2.bias"
ONE = case("mode=tp tp=2 seq=16 micro=1")


BIAS, POSITIONS = drawn(6), drawn(3, 6)
STARTS = {"start/layers.0.mlp.w2.bias": BIAS, "start/embedding.positions.weight": POSITIONS}
seen_with = partial(planted, shares=STARTS, case=ONE)


@pytest.mark.parametrize(
    ("name", "rest", "term", "ids"),
    [
        (LINEAR, 1.0, 0.0, ["bias_missing"]),
        (LINEAR, 1.0, 2.0, ["bias_per_rank"]),
        (LINEAR, 1.0, 1.7, ["constant_factor"]),
        (LINEAR, 0.5, 1.0, ["averaged"]),
        (LINEAR, 2.0, 1.0, ["summed_twice"]),
        (LINEAR, 1.7, 0.0, []),  # two terms at once are two bugs
        (TABLE, 1.0, 0.0, ["term_missing"]),
        (TABLE, 1.0, 2.0, ["bias_per_rank"]),
        (TABLE, 2.8, 1.0, ["constant_factor"]),
    ],
)
def test_the_term_that_does_not_count_once_is_told(name: str, rest: float, term: float, ids: list[str]) -> None:
    """`term`: how often the module's own term counts in its output; `rest`: how often the rest of it."""
    own = BIAS if name == LINEAR else POSITIONS
    seen = seen_with({name: rest * (truth()[name] - own) + term * own})
    assert [cause.id for cause in from_terms(seen, name)] == ids


def test_no_term_is_added_once_a_data_rank() -> None:
    """Data ranks have other rows, which no sum joins."""
    text, true = case("mode=tp tp=1 dp=2 seq=16 micro=1"), {**truth(), LINEAR: drawn(4, 3, 6)}
    for value in (true[LINEAR] + BIAS, 2 * true[LINEAR] - BIAS):
        shards = [Shard(part, (2 * rank, 0, 0), (4, 3, 6)) for rank, part in enumerate(value.chunk(2))]
        ranks = ({**outcome_of(rank, truth()), LINEAR: shard} for rank, shard in enumerate(shards))
        assert [told.id for told in from_terms(evidence(*ranks, truth=true, case=text, shares=STARTS), LINEAR)] == [
            "constant_factor"
        ]


def test_a_sum_without_one_of_its_terms_is_told_by_the_names_of_both() -> None:
    for name, value in (
        (OUTER, truth()[INNER]),  # an inner module alone: what goes past it is lost
        (OUTER, truth()[OUTER] - truth()[TABLE]),
        ("act_grad/embedding", truth()["act_grad/head"]),
        ("act_grad/embedding", truth()["act_grad/embedding"] - truth()["act_grad/head"]),
    ):
        (cause,) = from_terms(seen_with({name: value}), name)
        assert cause.id == "term_missing"
    assert from_terms(seen_with({OUTER: truth()[TABLE]}), OUTER) == []  # another module's output is no term
    assert from_terms(seen_with({OUTER: drawn(2, 3, 6)}), OUTER) == []


def test_places_are_looked_at_beside_what_a_module_adds_itself_and_what_is_not_finite_has_no_what_if() -> None:
    rules = tried({f"mask_ignored/{W1}": truth()[W1] * 2})
    assert ids_of(seen_with({W1: truth()[W1] / 0}, what_ifs=rules)) == ["nan"]
    rest = truth()[TABLE] - POSITIONS
    assert ids_of(seen_with({TABLE: rest.roll(3, 2) + POSITIONS})) == ["shifted_shard"]


def test_numbers_of_a_shorter_dtype_are_told() -> None:
    right = drawn(8, 4)
    for short in (torch.float32, torch.bfloat16, torch.float16):
        (cause,) = rounded(right.to(short).double(), right)
        words = f"explained by rounding to {str(short).removeprefix('torch.')}: all its numbers are ones of it; "
        assert cause.id == "shorter_dtype" and cause.words.startswith(words)
    assert rounded(right.bfloat16(), right) == []  # the run's own dtype
    assert rounded(right.float().double(), right.float().double()) == []  # as the truth itself
    for factor in (0.5, 0.875, 2.0):
        assert rounded(factor * right.bfloat16().double(), right) == []
    assert rounded(right[0].bfloat16().double()[:4], right[0][:4]) == []  # too few to be none by chance


def parts_of(name: str, full: Tensor, starts: tuple[int, ...], places: tuple[int, ...]) -> Evidence:
    """Ranks that hold columns of a tensor from these starts, and in them the numbers of these places."""
    outcomes: list[Mapping[str, Any]] = []
    for start, place in zip(starts, places, strict=True):
        size = min(starts[1], full.shape[1] - start)
        local = torch.nn.functional.pad(full, (0, size))[:, place : place + size]
        outcomes.append(localize({name: Shard(local, (0, start), tuple(full.shape))}))
    return replace(seen_with({}), outcomes=outcomes, truth={name: full})


def test_a_part_that_holds_another_place_is_told_also_when_parts_are_unequal() -> None:
    full = drawn(4, 7)
    (cause,) = from_regions(parts_of("grad/x", full, (0, 4), (0, 0)), "grad/x")
    assert cause.id == "other_shard" and "rank 1 holds what lies at 0, where 4 is meant" in cause.words
    assert from_regions(parts_of("grad/x", full, (0, 4), (0, 4)), "grad/x") == []
    assert from_regions(parts_of("grad/x", full, (0, 4), (0, 1)), "grad/x") == []  # no part begins there


def test_norms_of_another_kind_are_told() -> None:
    gradients = {name: tensor for name, tensor in truth().items() if name.startswith("grad/")}
    parts = [tensor.norm() for tensor in gradients.values()]
    right = torch.stack(parts).norm()
    true = {**truth(), "grad_norm/0": right}

    def of(value: Tensor, text: str = "mode=tp tp=2 seq=16") -> list[str]:
        seen = planted({"grad_norm/0": value}, truth=true, case=case(text))
        return [cause.id for cause in from_norms(seen, "grad_norm/0")]

    every = torch.cat([tensor.flatten() for tensor in gradients.values()])
    for other in (right**2, every.abs().max(), every.abs().sum(), torch.stack(parts).max(), right / len(every) ** 0.5):
        assert of(other) == ["norm_kind"]
    assert of(torch.stack(parts).sum()) == ["norm_of_norms"]
    assert of((right**2 + parts[0] ** 2).sqrt()) == ["norm_counts_replicas"]
    assert of(torch.tensor(0.5, dtype=torch.float64), "mode=tp tp=2 seq=16 clip=0.5") == ["norm_after_clip"]
    assert of(torch.tensor(0.5, dtype=torch.float64)) == []
    assert of(right * 1.01) == []


def test_numbers_of_tokens_are_told_where_one_rule_alone_fits() -> None:
    grid = torch.tensor([[30.0, 50.0], [40.0, 80.0]], dtype=torch.float64)
    text, true = case("mode=tp tp=2 dp=2 seq=16"), {**truth(), "tokens/0": torch.tensor(200)}

    def of(*values: int, tokens: Tensor = grid) -> list[str]:
        counts = [torch.tensor(values[rank % len(values)]) for rank in range(4)]
        ranks = (outcome_of(rank % 2, {**true, "tokens/0": counts[rank]}) for rank in range(4))
        seen = evidence(*ranks, truth=true, case=text, shares={"tokens": tokens})
        return [cause.id for cause in from_counts(seen, "tokens/0")]

    assert of(130) == of(120) == of(80) == ["micro_missing"]
    assert of(4 * 3) == ["constant_factor"]  # all tokens of the logits
    assert of(199) == []
    assert of(120, 80) == []  # ranks of one data rank disagree
    assert of(12, tokens=torch.tensor([[4.0, 8.0], [80.0, 108.0]])) == []  # all tokens, or those of one data rank
    # Nine tokens of one data rank, of which the last micro-batch has five: no factor, and no chance either.
    shares = {"tokens": torch.tensor([[4.0, 5.0]], dtype=torch.float64)}
    nine = {**truth(), "tokens/0": torch.tensor(9)}
    few = planted({"tokens/0": torch.tensor(5)}, truth=nine, case=ONE, shares=shares)
    assert [told.id for told in from_counts(few, "tokens/0")] == ["micro_missing"]


def test_calls_too_many_that_nobody_waits_for_are_told_as_calls_too_many() -> None:
    """The handle of a call that is not needed at all is no one's to wait for."""
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
    for choices, ids in (({}, ["wrong_payload"]), ({f"routing/0/{LINEAR[4:]}": torch.ones(4, 3, 2).bool()}, [])):
        ranks = [outcome_of(rank, {**truth(), LINEAR: drawn(2, 3, 6), **choices}) for rank in range(2)]
        assert ids_of(evidence(*ranks, case=ONE, events=events(less))) == ids


def test_a_module_that_never_ran_lacks_more_than_its_call() -> None:
    values = {**truth(), OUTER: truth()[OUTER] - truth()[LINEAR]}
    for left_out, ids in (((), ["missing_call"]), ((LINEAR,), ["term_missing"])):
        known = {name: tensor for name, tensor in values.items() if name not in left_out}
        ranks = [outcome_of(rank, known) for rank in range(2)]
        assert ids_of(evidence(*ranks, case=ONE, events=events((*TERMS[:1], *TERMS[2:])))) == ids


def test_a_parameter_without_a_gradient_lacks_more_than_its_sum() -> None:
    """Not used, or frozen, a parameter stays as before. Of one that moves the gradient was not returned."""
    summed, still = a_term(phase="grad_sync", region=""), {**truth(), "param/layers.0.mlp.w2.bias": BIAS}
    lost = {name: tensor for name, tensor in still.items() if name != OF_W2}
    moved = {**lost, "param/layers.0.mlp.w2.bias": drawn(6, seed=8)}
    for values, ids in ((still, ["missing_call"]), (lost, ["unused"]), (moved, ["missing_call"])):
        ranks = [outcome_of(rank, values) for rank in range(2)]
        assert ids_of(evidence(*ranks, case=ONE, expectation=(*TERMS, summed), shares=STARTS)) == ids


def test_parts_that_do_not_fit_follow_from_a_call_over_other_ranks() -> None:
    apart = [Shard(truth()[W1][:4], (0, 0), (8, 6)), Shard(truth()[W1][3:7], (3, 0), (8, 6))]
    ranks = [{**outcome_of(rank, truth()), W1: part} for rank, part in enumerate(apart)]
    expected, issued = (a_term(phase="grad_sync", region="", axis=axis) for axis in ("edp", "tp"))
    for more, ids in (((), ["layout"]), ((issued,), ["wrong_group"])):
        expectation = (*TERMS, *((expected,) if more else ()))
        assert ids_of(evidence(*ranks, expectation=expectation, events=events((*TERMS, *more)))) == ids


def test_partial_sums_are_those_of_an_axis_whose_groups_all_add_up() -> None:
    true, part = drawn(6), drawn(6, seed=3)
    axes = {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3))}
    for order, axis in (((0, 0, 1, 1), "dp"), ((0, 1, 0, 1), "tp")):
        (told,) = partial_sums({rank: (part, true - part)[place] for rank, place in enumerate(order)}, true, axes)
        assert f"over {axis}=2" in told.words


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
        assert [told.id for told in partial_sums(dict(enumerate(parts)), true, {"tp": ((0, 1),)})] == ["not_summed"]
    assert partial_sums({0: true, 1: true / 2}, true, {"tp": ((0, 1),)}) == []


def test_tensors_behind_the_first_one_need_not_be_as_near() -> None:
    """Later tensors were computed from wrong values, and round otherwise; the first must be near."""
    later = 1e-8 * drawn(8, 6)
    for first, second, told in ((0.0, later, ["summed_twice"]), (1e-8 * drawn(6), 0 * later, [])):
        table = {OF_W2: 2 * truth()[OF_W2] + first, W1: 2 * truth()[W1] + second}
        proof = (Explained(value=table[n], truth=truth()[n], guess=2 * truth()[n], names=(n,)) for n in (OF_W2, W1))
        causes, found = claimed("summed_twice", "both are 2 x the truth", *proof), seen_with(table)
        merged = replace(found.merged, tensors={**found.merged.tensors, **table})
        assert [cause.id for cause in within_limits(replace(found, merged=merged), causes)] == told


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
    proof = Explained(value=found.merged.tensors[name], truth=true, guess=guess)
    assert within_limits(found, claimed("shifted_shard", "it is shifted", proof))


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
