"""Sums gone wrong, on hand-made shares: what a gradient counts, what a norm counts, what became of parameters."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.first_place import first_place
from shardproof.harness.diagnosing.hypotheses.sums import from_own_gradients, from_shares
from shardproof.harness.diagnosing.rank_causes import by_numbers
from shardproof.harness.outcome.blocks import Block, localize
from shardproof.harness.outcome.merging import Outcomes
from shardproof.harness.terms import Term
from tests.harness.toy_evidence import TERMS, a_term, but, case, drawn, evidence, outcome_of, planted, truth

W1, BIAS = "grad/layers.0.mlp.w1.weight", "grad/layers.0.mlp.w2.bias"
TOKENS = torch.tensor([[3.0, 5.0], [4.0, 8.0]], dtype=torch.float64)


SHARES = {W1: drawn(2, 2, 8, 6), "tokens": TOKENS}


def counting(*weights: Tensor, shares: Tensor = SHARES[W1]) -> Evidence:
    """Four ranks (tp=2, dp=2); every one's gradient counts the micro-batches so, or each data rank's as given."""

    def weighted(weights: Tensor) -> Tensor:
        return (shares * weights[..., None, None]).sum((0, 1))

    by_rank = [weights[0]] * 4 if len(weights) == 1 else [weights[rank // 2] for rank in range(4)]
    true = {**truth(), W1: weighted(torch.ones(2, 2))}
    outcomes: Outcomes = [localize({W1: weighted(w)}) for w in by_rank]
    seen = evidence(case=case("mode=tp tp=2 dp=2 seq=16"), truth=true)
    tensors = {W1: weighted(by_rank[0])} if len(weights) == 1 else {}
    merged = replace(seen.run.merged, tensors=tensors)
    return but(seen, outcomes=outcomes, shares={**SHARES, W1: shares}, merged=merged)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((0.6, 0.4), ["the gradients of the dp ranks are averaged with equal weights; the truth weighs them 0.6, 0.4"]),
        ((0.5, 0.5), []),  # right
        ((0.6, 0.8), []),  # weights of another sum are no mean
    ],
)
def test_a_mean_of_unequal_means_is_told_by_what_backward_leaves_on_ranks(
    weights: tuple[float, float], words: list[str]
) -> None:
    own = [drawn(8, 6, seed=seed) for seed in (1, 2)]
    true = {**truth(), W1: weights[0] * own[0] + weights[1] * own[1]}
    value = (own[0] + own[1]) / 2
    seen = evidence(case=case("mode=tp tp=2 dp=2 seq=16"), truth=true)
    given = tuple(
        {W1.removeprefix("grad/"): Block(local=own[rank // 2], offsets=(0, 0), global_shape=(8, 6))}
        for rank in range(4)
    )
    merged = replace(seen.run.merged, tensors={**true, W1: value})
    found = from_own_gradients(but(seen, merged=merged, before_sums=given), [W1])
    assert [cause.words for cause in found] == words


def test_parts_of_a_gradient_whose_sum_is_due_nowhere_are_left_by_backward() -> None:
    """Where the expectation has a sum behind backward that may hold them, that is the place. A norm's call cannot."""
    true = truth()
    mine = [outcome_of(rank, {**true, BIAS: true[BIAS] * (rank == 0)}) for rank in range(2)]
    own = [Block(local=true[BIAS] * (rank == 0), offsets=(0,), global_shape=(6,)) for rank in range(2)]
    seen = but(evidence(*mine), before_sums=tuple({BIAS.removeprefix("grad/"): one} for one in own))

    def phase_with(*terms: Term) -> str:
        return first_place(but(seen, expectation=(*TERMS, *terms)), [BIAS], None).phase

    summed = a_term(phase="grad_sync", region="", payload_bytes=48, calls=1)
    assert phase_with() == phase_with(replace(summed, payload_bytes=8)) == "backward"
    assert phase_with(summed) == first_place(but(seen, expectation=None), [BIAS], None).phase == "grad_sync"


LOCAL = TOKENS.sum() / TOKENS.sum(1)


@pytest.mark.parametrize(
    ("seen", "cause", "words"),
    [
        (counting(torch.tensor([[0.0, 1], [0, 1]])), "unequal_shares", "micro-batch 0 of 2 is missing in it"),
        (counting(torch.tensor([[1.0, 0], [1, 0]])), "unequal_shares", "micro-batch 1 of 2 is missing in it"),
        (counting(torch.tensor([[1.0, 0], [1, 1]])), "unequal_shares", "some micro-batches of some data ranks"),
        (counting(torch.tensor([[0.0, 0], [1, 1]])), "not_summed", "only data rank 1 of 2 is in it"),
        (counting(torch.tensor([[0.25, 0.5]] * 2)), "unequal_shares", "its micro-batches count 0.25, 0.5, 0.25, 0.5"),
        (counting(5 / TOKENS), "unequal_shares", "every micro-batch is divided by its own tokens"),
        (counting(LOCAL[:, None].expand(2, 2)), "unequal_shares", "every data rank divides by the tokens"),
        (counting(*LOCAL[:, None, None].expand(2, 2, 2)), "unequal_shares", "every data rank divides by the tokens"),
        (counting(*torch.eye(2)[..., None].expand(2, 2, 2)), "not_summed", "each data rank's own micro-batches alone"),
    ],
)
def test_what_a_gradient_counts_otherwise_is_told(seen: Evidence, cause: str, words: str) -> None:
    (told,) = from_shares(seen, [W1])
    assert told.id == cause and told.words.startswith(words)


def test_what_is_no_sum_of_shares_tells_nothing() -> None:
    assert from_shares(counting(torch.ones(2, 2), torch.full((2, 2), 1 + 2.0**-40)), [W1]) == []  # rounding
    seen = counting(torch.tensor([[0.25, 0.5], [0.25, 0.5]]))
    halved = but(seen, shares={**SHARES, "tokens": torch.tensor([[6.0, 3.0], [6.0, 3.0]])})
    assert [told.id for told in from_shares(halved, [W1])] == ["unequal_shares"]  # equal products are no division
    assert from_shares(counting(torch.full((2, 2), 0.5)), [W1]) == []  # a factor, which is another pattern's
    assert from_shares(but(counting(torch.ones(2, 2)), shares={}), [W1]) == []


def test_equal_weights_win_where_micro_batches_repeat_each_other() -> None:
    """Many weights fit then, and those with the smallest squares are not what a program would use."""
    again = torch.stack([SHARES[W1][:, 0], SHARES[W1][:, 0] / 2], 1)
    (told,) = from_shares(counting(*LOCAL[:, None, None].expand(2, 2, 2), shares=again), [W1])
    assert told.id == "unequal_shares"
    assert from_shares(counting(torch.tensor([[0.25, 0.5]] * 2), shares=again), [W1]) == []


def test_a_part_that_was_not_summed_is_told() -> None:
    """Rows that hold the second data rank's own sum, as after a copy that was left out."""
    found = counting(torch.ones(2, 2))
    true, own = found.truth.tensors[W1], SHARES[W1][1].sum(0)

    def told(value: Tensor) -> list[tuple[str, str]]:
        torn = but(found, merged=replace(found.run.merged, tensors={W1: value}))
        return [(cause.id, cause.words.partition(",")[0]) for cause in from_shares(torn, [W1])]

    ((known, words),) = told(torch.cat([true[:5], own[5:]]))
    assert known == "not_summed" and words.startswith("what is wrong in it is one data rank's own sum")
    assert told(torch.cat([true[:5], drawn(3, 6, seed=8)])) == told(drawn(8, 6, seed=9)) == []


def square(name: str) -> float:
    return float(truth()[name].square().sum())


SPLIT = square(W1) + square("grad/layers.0.mlp.w2.weight")
WHOLE = square(BIAS) + square("grad/embedding.tokens.weight")


@pytest.mark.parametrize(
    ("found", "cause", "words"),
    [
        (SPLIT + 2 * WHOLE, "norm_members", "it counts what every rank holds whole once a rank, tp=2"),
        (2 * SPLIT + WHOLE, "norm_members", "it counts what is split over ranks once a rank, tp=2"),
        (2 * (SPLIT + WHOLE), "norm_members", "it counts everything once a rank, tp=2"),
        ((SPLIT + WHOLE) / 2, "norm_members", "it counts 1 of 2 ranks of tp in everything"),
        (SPLIT, "norm_members", "it leaves out what every rank holds whole"),
        (WHOLE, "norm_members", "it leaves out what is split over ranks"),
        (SPLIT + WHOLE - square(BIAS), "norm_members", f"it leaves out {BIAS}"),
        (SPLIT + WHOLE + square(BIAS), "norm_members", f"it counts {BIAS} 2 times, and tp=2"),
        (SPLIT + WHOLE - square(W1) / 2, "norm_members", f"it counts 1 of 2 ranks of tp in {W1}"),
        (SPLIT + WHOLE + square(BIAS) * (1 + 1e-6), "", ""),  # no check would let that pass
    ],
)
def test_what_a_norm_counts_otherwise_is_told(found: float, cause: str, words: str) -> None:
    seen = planted({"grad_norm/0": torch.tensor(found, dtype=torch.float64).sqrt()})
    assert [(told.id, told.words) for told in by_numbers(seen, ["grad_norm/0"])] == ([(cause, words)] if cause else [])


def test_a_norm_without_every_bias_is_told() -> None:
    other = "grad/layers.0.mlp.w1.bias"
    true = {**truth(), other: drawn(8), "grad/final_norm.weight": drawn(6, seed=2)}
    squares = {name: float(tensor.square().sum()) for name, tensor in true.items() if name.startswith("grad/")}
    norm = math.sqrt(sum(squares.values()) - squares[BIAS] - squares[other])
    true["grad_norm/0"] = torch.tensor(math.sqrt(sum(squares.values())), dtype=torch.float64)
    seen = planted({"grad_norm/0": torch.tensor(norm, dtype=torch.float64)}, truth=true)
    assert [told.words for told in by_numbers(seen, ["grad_norm/0"])] == ["it leaves out every bias"]


def test_a_norm_without_a_gradient_that_no_rank_holds_names_it() -> None:
    norm = torch.tensor(SPLIT + WHOLE - square(BIAS), dtype=torch.float64).sqrt()
    values = {n: t for n, t in {**truth(), "grad_norm/0": norm}.items() if n != BIAS}
    seen = evidence(*(outcome_of(rank, values) for rank in range(2)), truth=truth())
    assert [told.words for told in by_numbers(seen, ["grad_norm/0"])] == [f"it leaves out {BIAS}"]


def test_a_norm_that_counts_a_group_by_another_axis_names_it() -> None:
    """Six ranks, tp=2 and dp=3: what ranks hold whole is counted once a data rank, all ranks, or tp ranks."""
    text = case("mode=tp tp=2 dp=3 seq=16 batch=6")
    total, table = SPLIT + WHOLE, "grad/embedding.tokens.weight"
    for found, words in (
        (total + 2 * square(BIAS), f"it counts {BIAS} 3 times, and dp=3"),
        (total + 5 * square(table), f"it counts {table} 6 times, and all ranks=6"),
        (total - 2 / 3 * SPLIT, "it counts 1 of 3 ranks of dp in what is split over ranks"),
        (total + square(table), f"it counts {table} 2 times, and tp=2"),
    ):
        values = {**truth(), "grad_norm/0": torch.tensor(math.sqrt(found), dtype=torch.float64)}
        seen = evidence(*(outcome_of(rank % 2, values) for rank in range(6)), case=text)
        assert [told.words for told in by_numbers(seen, ["grad_norm/0"])] == [words]


def test_norms_of_parts_are_told() -> None:
    ranks = [outcome_of(rank, truth()) for rank in range(2)]
    names = [f"grad/layers.0.mlp.{leaf}.weight" for leaf in ("w1", "w2")]
    own = [sum(float(rank[name].local.square().sum()) for name in names) + WHOLE for rank in ranks]
    before = tuple(torch.tensor([3.0, size], dtype=torch.float64) for size in (5.0, 7.0))

    def told(*squares: float, unsummed: tuple[torch.Tensor, ...] = before) -> list[str]:
        values = (torch.tensor(math.sqrt(square), dtype=torch.float64) for square in squares)
        seen = (({**rank, "grad_norm/0": value}) for rank, value in zip(ranks, values, strict=True))
        return [cause.words for cause in by_numbers(evidence(*seen, unsummed=unsummed), ["grad_norm/0"])]

    assert told(*own) == ["each rank's norm is that of its own parts"]
    assert told(own[1], own[1]) == ["it is the norm of rank 1's own parts"]
    assert told(own[0] + own[1], own[0] + own[1])[0].startswith("it counts what every rank holds whole once a rank")
    words = "it is the norm of gradients before they are summed over ranks"
    assert told(5.0, 7.0) == [f"{words}, on each rank of its own"]
    assert told(12.0, 12.0) == [f"{words}, added up over tp"]
    never_summed = tuple(torch.tensor([size], dtype=torch.float64) for size in own)
    assert told(sum(own), sum(own), unsummed=never_summed)[0].startswith("it counts what every rank holds whole once a")
    assert told(5.0, 7.1) == told(7.0, 7.0) == []


def test_what_became_of_parameters_is_told() -> None:
    name = "param/layers.0.mlp.w1.weight"
    start = {name.replace("param", "start"): drawn(8, 6, seed=4)}

    def causes(value: Tensor) -> list[str]:
        norm = {"grad_norm/1": truth()["grad_norm/1"] + 1}  # a right one shows that gradients hold nothing old
        return [told.id for told in by_numbers(planted({name: value, **norm}, shares=start), [name, *norm])]

    assert causes(start[name.replace("param", "start")]) == ["never_updated"]
    assert causes(truth()[name] - 0.3 * truth()[W1]) == ["not_zeroed"]
    assert causes(truth()[name] + drawn(8, 6, seed=5)) == []
    other = "param/layers.0.mlp.w2.weight"  # it moved, and wrong
    shares = {**start, other.replace("param", "start"): drawn(6, 8, seed=4)}
    values = {name: start[name.replace("param", "start")], other: truth()[other] + 1}
    (told,) = by_numbers(planted(values, shares=shares), [name, other])
    assert (told.id, told.words) == ("never_updated", f"{name}: as before the first step")


@pytest.mark.parametrize(("recorded", "size"), [(False, "; 2 is the size of dp"), (True, "")])
def test_shards_of_data_ranks_are_parts_of_a_sum_where_no_call_was_recorded(recorded: bool, size: str) -> None:
    double = {name: 2 * tensor for name, tensor in truth().items() if name == W1}
    calls = {} if recorded else {"events": ()}
    seen = planted(double, case=case("tp=1 dp=2 seq=16 micro=1"), **calls)
    assert [told.words for told in by_numbers(seen, [*double])] == [f"it is 2 x the truth{size}"]
