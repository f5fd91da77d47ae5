"""Causes and places that follow from what one rank drew, from what backward left, and from numbers of one tensor."""

from dataclasses import replace

import torch

from shardproof.harness.checking.checks import run_checks
from shardproof.harness.diagnosing.causes.hypothesis import Failure
from shardproof.harness.diagnosing.first_place import first_place
from shardproof.harness.diagnosing.hypotheses.masks import from_masks
from shardproof.harness.diagnosing.hypotheses.patterns import from_patterns
from shardproof.harness.diagnosing.hypotheses.stated import of_checks, taken_where_skipped
from shardproof.harness.protocols import Shard
from tests.harness.diagnosing.test_causes_of_any_subject import SUMS, causes, norm, placed
from tests.harness.toy_evidence import but, case, drawn, evidence

REDUCED = f"        {SUMS}\n            dist.all_reduce(tensor, group=group)"
SCALED = "        model[0].weight.grad *= 1 + bool(group)"


def test_a_gradient_that_backward_left_right_is_wrong_by_what_follows() -> None:
    first = placed({REDUCED: f"{REDUCED}\n{SCALED}"})
    assert (first.phase, first.region) == ("grad_sync", "0")
    assert "as backward leaves it, its sum over dp is right" in first.beside


def test_a_gradient_that_backward_left_wrong_is_wrong_in_backward() -> None:
    left = "model[0].weight.register_hook(lambda grad: grad * (1 + bool(group)))"
    made = "    outcome, optimizer = {}, torch.optim.SGD(model.parameters(), lr=0.1)"
    first = placed({made: f"{made}\n    {left}"})
    assert (first.phase, first.region) == ("backward", "0")


def test_all_gradients_that_backward_left_wrong_are_no_wrong_sum() -> None:
    made = "    outcome, optimizer = {}, torch.optim.SGD(model.parameters(), lr=0.1)"
    left = "[p.register_hook(lambda grad: grad + bool(group) * grad.abs().sqrt()) for p in model.parameters()]"
    assert placed({made: f"{made}\n    {left}"}).phase == "backward"


def test_a_check_states_nothing_of_what_is_wrong_before_the_tensors_that_it_names() -> None:
    rank = {"act/head": torch.ones(2), "grad/head.bias": torch.ones(2)}
    finding = run_checks(evidence())["merge"]
    flawed = {"merge": replace(finding, verdict="fail", names=("grad/head.bias",))}
    seen = evidence(rank, rank)
    for wrong, ids in ((["act/head", "grad/head.bias"], []), (["grad/head.bias"], ["layout"])):
        found = of_checks(Failure(evidence=seen, wrong=wrong, numbers=[], findings=flawed))
        assert [cause.id for cause in found] == ids


def test_norms_that_are_added_in_place_of_their_squares_are_named() -> None:
    own = 'squares = [outcome[f"grad/{n}"].local.square().sum() for n in ("0.weight", "2.weight")]\n    '
    added = own + '[dist.all_reduce(one, group=mesh.get_group("tp")) for one in squares]\n    '
    found = causes(norm(added + 'outcome["total_norm"] = sum(one.sqrt() for one in squares)'))
    assert [id for id, _ in found] == ["norm_members"]
    assert "it is the sum of the norms of grad/" in found[0][1] and "and of all else" in found[0][1]


def test_parts_that_keep_their_padding_stand_apart() -> None:
    true = drawn(3, 7)
    wrong = torch.zeros(3, 7, dtype=torch.float64)
    wrong[:, :2], wrong[:, 3:] = true[:, :2], true[:, 2:6]  # parts of 2 and 5, the first one padded to 3
    found = from_patterns(wrong, true, {}, {})
    words = (
        "along dim 1 right numbers stand apart: from 3 on they are those that belong at 2, and 1 of them are nowhere"
    )
    assert [(cause.id, cause.words) for cause in found] == [("other_part", words)]
    wrong[1, 4] += 1e-3
    assert from_patterns(wrong, true, {}, {}) == []


MASK = "mask/0/layers.0.mlp"


def test_a_mask_of_a_module_that_other_ranks_compute_is_named_as_that() -> None:
    masks = [drawn(8, 16, seed=seed) > -1 for seed in (3, 4)]
    seen = evidence({MASK: masks[0], "act/layers.0.mlp": drawn(8, 16)}, {MASK: masks[1]}, unmergeable=True)
    found = from_masks(Failure(evidence=seen, wrong=[MASK], numbers=[]))
    words = "rank 1 drops by a mask of layers.0.mlp, which other ranks alone compute"
    assert [(cause.id, cause.words) for cause in found] == [("other_numbers", words)]


def test_two_ranks_of_no_common_axis_that_drop_by_one_mask_are_named() -> None:
    """Ranks 1 and 2 of two axes of two: seeds that are one apart on both."""
    own = [drawn(2, 64, seed=seed) > -1 for seed in (3, 4, 4, 5)]
    shards = [Shard(mask, (2 * rank, 0), (8, 64)) for rank, mask in enumerate(own)]
    seen = evidence(*({MASK: shard} for shard in shards), case=case("mode=tp tp=2 cp=2 seq=16"), unmergeable=True)
    found = from_masks(Failure(evidence=seen, wrong=[MASK], numbers=[]))
    assert [cause.words for cause in found] == ["ranks 1, 2 hold different shards and drop by one mask"]


def test_stages_of_a_pipeline_are_no_replicas_of_each_other() -> None:
    masks = [drawn(8, 16, seed=seed) > -1 for seed in (3, 4)]
    seen = evidence({MASK: masks[0]}, {MASK: masks[1]}, unmergeable=True)
    failure = Failure(evidence=seen, wrong=[MASK], numbers=[])
    assert "drop by independent masks" in from_masks(failure)[0].words
    stages = but(seen, axes={"pp": ((0, 1),)})
    assert from_masks(Failure(evidence=stages, wrong=[MASK], numbers=[])) == []


def test_a_step_that_the_truth_skips_is_named_where_states_of_it_come_first() -> None:
    state = "exp_avg_after/0/head.weight"
    seen = but(evidence({state: torch.ones(2)}, {}), tensors={"skipped/0": torch.ones(())})
    for wrong, words in (([state], ["the optimizer takes step 0, which the truth skips"]), (["loss/0", state], [])):
        found = taken_where_skipped(Failure(evidence=seen, wrong=wrong, numbers=[]))
        assert [cause.words for cause in found] == words
    assert first_place(seen, [state], None).phase == "step"
