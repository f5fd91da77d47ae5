"""Numbers drawn in forward are the cause where the truth draws none; masks of dropout lie in those of the truth."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardproof.harness.outcome.blocks import blocks
from shardproof.harness.outcome.merging import merge_outcomes
from shardproof.harness.plain_case import Vocabulary
from shardproof.harness.recording.capturing.drawn_values import Draw, taken_out
from shardproof.harness.running.truth.joint_masks import RankMasks, in_order, masks_of
from tests.harness.proofs import proved
from tests.harness.recording.toy_calls import Part

ROWS, WIDTH, EXPERTS = 4, 8, 3


class Router(nn.Module):
    """Scores of experts, with numbers of a random stream or without: `noise` is a word of the case."""

    def __init__(self, noise: str) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.noise = noise

    def forward(self, x: Tensor, numbers: range) -> Tensor:
        """The shares [rows, experts]."""
        logits: Tensor = self.gate(x)
        if self.noise == "jitter":
            logits = logits * (1 + 0.01 * torch.rand_like(logits))
        if self.noise == "gumbel":
            return functional.gumbel_softmax(logits, hard=False)
        if self.noise == "normal":
            logits = logits + torch.zeros(logits.shape, dtype=logits.dtype).normal_(0, 0.1)
        if self.noise == "dropout":
            logits = functional.dropout(logits, 0.25)
        if self.noise == "seeded":
            drawn = [torch.rand(EXPERTS, generator=torch.Generator().manual_seed(n)) for n in numbers]
            logits = logits + torch.stack(drawn).to(logits)
        return logits.softmax(-1)


def trained(case: Any, noise: str, dp_ranks: range, factor: float = 1.0) -> Mapping[str, Any]:
    """Gradients of one step, added up over data ranks where several are."""
    torch.manual_seed(case.seed)
    parts = {"router": Router(noise), "experts": nn.Linear(WIDTH, EXPERTS)}  # all experts are computed
    model = Part(lambda it, given: (it.router(*given) * it.experts(given[0])).sum(-1), **parts)
    model.to(getattr(torch, case.dtype))
    total = torch.zeros((), dtype=getattr(torch, case.dtype))
    for micro in range(case.micro):
        for dp_rank in dp_ranks:
            numbers = case.samples(0, micro, dp_rank, ROWS)
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(numbers.start)).to(total)
            y = model((x, numbers))
            if noise == "loader":
                list(
                    torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(1)))
                )  # draws the seed of its workers
            if noise == "function":
                y = y * torch.rand(y.shape, dtype=y.dtype)
            loss = y.square().sum() / (case.dp * case.micro) * factor
            loss.backward()
            total = total + loss.detach()
            if noise == "built" and len(dp_ranks) < case.dp:
                nn.Linear(WIDTH, EXPERTS)  # a model that ranks alone build while training goes on
    gradients = {f"grad/{name}": one.grad for name, one in model.named_parameters() if one.grad is not None}
    for tensor in (total, *gradients.values()) if case.world_size > 1 and len(dp_ranks) == 1 else ():
        dist.all_reduce(tensor)
    return {"loss/0": total, **gradients}


class Noisy:
    """The subject. `factor` of its loss: any but 1 is a bug."""

    drawn = ("jitter", "gumbel", "normal", "dropout", "function", "loader", "seeded", "built", "none")
    words = {"noise": drawn, "steps": 1}
    cases = ("dp=2",)

    def __init__(self, truth: Any, factor: float = 1.0) -> None:
        self.truth, self.factor = truth, factor

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        return trained(case, case.noise, range(dist.get_rank(), dist.get_rank() + 1), self.factor)


def same(case: Any, device: torch.device) -> Mapping[str, Any]:
    """The dense model with the same noise."""
    return trained(case, case.noise, range(case.dp))


def quiet(case: Any, device: torch.device) -> Mapping[str, Any]:
    """The dense model without any, unless it is seeded."""
    return trained(case, case.noise if case.noise == "seeded" else "none", range(case.dp))


OPERATORS = {"jitter": "torch.rand_like", "gumbel": "Tensor.exponential_", "normal": "Tensor.normal_"}
OPERATORS |= {"dropout": "Tensor.bernoulli_", "function": "torch.rand"}


@pytest.mark.parametrize(
    ("noise", "truth"),
    [("jitter", "alone"), ("gumbel", same), ("normal", quiet), ("dropout", quiet), ("function", same)],
)
def test_they_are_the_cause_with_operator_line_and_module(noise: str, truth: Any) -> None:
    result = proved(Noisy(truth), f"dp=2 noise={noise}")
    assert result.verdict == "fail"
    causes = {cause for one in result.diagnoses.values() if one for cause in one.causes}
    assert {cause.id for cause in causes} == {"other_numbers"}, causes
    (words,) = {cause.words for cause in causes}
    where = "" if noise == "function" else r" in module router"
    line = rf"{OPERATORS[noise]} at tests/harness/running/subjects/test_drawn_numbers.py:\d+{where} draws other numbers"
    assert re.match(line, words) and "switch that off for the proof" in words, words


def test_one_rank_that_draws_what_the_truth_draws_is_right() -> None:
    alone = proved(Noisy("alone"), "noise=jitter")
    assert {verdict.check for verdict in alone.verdicts if verdict.verdict == "fail"} == {"regrouping"}
    causes = {cause.words for one in alone.diagnoses.values() if one for cause in one.causes}
    assert len(causes) == 1 and "draws other numbers than a run with dp=2 micro=1 does" in causes.pop()
    assert proved(Noisy("alone"), "dp=2 noise=seeded").verdict == "pass"
    assert proved(Noisy(quiet), "dp=2 noise=seeded").verdict == "pass"


@pytest.mark.parametrize("noise", ["seeded", "built", "loader", "none"])
def test_a_bug_beside_equal_numbers_keeps_its_own_cause(noise: str) -> None:
    result = proved(Noisy(quiet if noise == "loader" else same, factor=2.0), f"dp=2 noise={noise}")
    causes = {cause.id for one in result.diagnoses.values() if one for cause in one.causes}
    assert result.verdict == "fail" and causes and "other_numbers" not in causes


KNOWN = Vocabulary.of({"micro": 3, "steps": 2})


def mask_of(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def placed(words: str, truth: list[tuple[str, tuple[int, ...]]], *ranks: list[tuple[str, Tensor]]) -> RankMasks:
    """The masks of ranks, each with its line, in those of a truth that draws these shapes."""
    case = KNOWN.parse(words)
    dense = [Draw(line, 0.5, blocks(torch.ones(shape))) for line, shape in truth]
    drawn = [{f"{number}/0.5/{line}": mask for number, (line, mask) in enumerate(rank)} for rank in ranks]
    outcomes = [{f"dropout.drawn/{place}": blocks(mask) for place, mask in rank.items()} for rank in drawn]
    assert all(len(taken_out(outcome)[1]) == len(rank) for outcome, rank in zip(outcomes, ranks, strict=True))
    return masks_of(case, case.axes, dense, outcomes)


def joint(found: RankMasks) -> tuple[Tensor, ...]:
    merged = merge_outcomes(found.masks)
    assert (found.problem, merged.flaws) == ("", ())
    return in_order(merged.tensors)


def test_stages_draw_for_their_own_sites_and_data_ranks_for_their_own_rows() -> None:
    """Two sites on the first stage, one on the second; the truth takes the data ranks one after the other."""
    sites = (2, 1)
    ranks = [[mask_of(100 * rank + n, 5, 4) for n in range(6 * sites[rank // 2])] for rank in range(4)]
    found = placed("dp=2 pp=2", [("a.py:1", (5, 4))] * 36, *([("a.py:1", mask) for mask in own] for own in ranks))
    right = []
    for turn in range(6):
        for data_rank in range(2):
            right += [*ranks[data_rank][2 * turn : 2 * turn + 2], ranks[2 + data_rank][turn]]
    assert all(torch.equal(mask[0], own) for mask, own in zip(joint(found), right, strict=True))


def test_rows_of_all_data_ranks_may_be_one_draw_of_the_truth() -> None:
    ranks = [[("b.py:9", mask_of(10 * rank + n, 5, 4)) for n in range(6)] for rank in range(3)]
    found = joint(placed("dp=3", [("a.py:1", (15, 4))] * 6, *ranks))
    for turn, mask in enumerate(found):
        assert torch.equal(mask.flatten(0, 1), torch.cat([own[turn][1] for own in ranks]))


def test_lines_are_held_against_each_other_in_any_order() -> None:
    one, other = mask_of(1, 5, 4), mask_of(2, 7)
    masks = [("b.py:2", other), ("a.py:1", one)]
    found = placed("tp=1 dp=1 micro=1 steps=1", [("a.py:1", (5, 4)), ("b.py:2", (7,))], masks)
    assert [mask[0].tolist() for mask in joint(found)] == [one.tolist(), other.tolist()]
    assert set(found.masks[0]) == {"mask/0/a.py:1.0", "mask/0/b.py:2.1"}


def test_of_two_axes_a_dim_is_cut_over_the_one_whose_replicas_are_equal() -> None:
    case = KNOWN.parse("tp=4 micro=1 steps=1")
    axes = {"outer": ((0, 2), (1, 3)), "inner": ((0, 1), (2, 3))}
    parts = mask_of(1, 5, 2), mask_of(2, 5, 2)
    for place, right in ((lambda rank: rank // 2, "outer"), (lambda rank: rank % 2, "inner")):
        outcomes = [{"dropout.drawn/0/0.5/a.py:1": blocks(parts[place(rank)])} for rank in range(4)]
        found = masks_of(case, axes, [Draw("a.py:1", 0.5, blocks(torch.ones(5, 4)))], outcomes)
        assert torch.equal(joint(found)[0][0], torch.cat(parts, 1)), right


@pytest.mark.parametrize(
    ("words", "shape", "own", "problem"),
    [
        ("cp=2 micro=1 steps=1", (6, 4), (3, 4), r"shape \(3, 4\) on rank 0 and \(6, 4\) in the truth.* over cp"),
        ("tp=2 micro=1 steps=1", (6, 4), (2, 4), r"no cut over one axis"),
        ("tp=2 micro=2 steps=1", (6, 4), (6, 4), "draws 1 masks at a.py:1 and the ranks 1, in 1 steps of 2"),
    ],
)
def test_masks_without_a_place_are_one_sentence(
    words: str, shape: tuple[int, ...], own: tuple[int, ...], problem: str
) -> None:
    found = placed(words, [("a.py:1", shape)], *[[("a.py:1", mask_of(1, *own))]] * 2)
    assert found.masks == ()
    assert re.search(problem, found.problem), found.problem
