"""Failure messages word for word, the first wrong place, and the tell-tale patterns behind the likely causes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checks import examine
from harness.diagnosis import crash, explain, repeat_command
from harness.evidence import Evidence
from harness.patterns import causes
from harness.places import place_of, timeline
from suites.meta.toy_evidence import altered, case, events, evidence, outcome_of, truth, without

W1 = "grad/layers.0.mlp.w1.weight"
SUBJECT = "my.module:subject"


def planted(**wrong: Tensor) -> Evidence:
    values = {**truth(), **wrong}
    return evidence(*(outcome_of(rank, values) for rank in range(2)))


def message(seen: Evidence, check: str) -> str:
    return explain(seen, examine(seen), check, SUBJECT)


def test_a_wrong_gradient_in_six_lines() -> None:
    seen = planted(**{W1: truth()[W1] * 2})
    peak = float(truth()[W1].abs().max() / truth()[W1].square().mean().sqrt())
    assert message(seen, "parameter_gradients") == "\n".join(
        [
            "what:   grad/layers.0.mlp.w1.weight differs from the dense model (check parameter_gradients)",
            "where:  mode=tp, all 2 ranks, step 0, phase backward, module layers.0.mlp.w1, "
            "tensor grad/layers.0.mlp.w1.weight",
            f"error:  peak error {peak:.3g} ({peak / 2**-52:.3g} eps), allowed 1e-09 (4.5e+06 eps); "
            "1 tensor of this check wrong",
            "first:  grad/layers.0.mlp.w1.weight (step 0, phase backward)",
            "causes: it is 2 x the truth, and tp=2: summed over tp once too often, or not divided by it",
            'repeat: shardproof run "seq=16" --subject my.module:subject',
        ]
    )


def test_a_missing_collective_in_six_lines() -> None:
    seen = evidence(events=without(events(), phase="forward", region="layers.0.mlp.w2"))
    assert message(seen, "ledger") == "\n".join(
        [
            "what:   missing event in forward of layers.0.mlp.w2 (1 call): all_reduce sum of 384 B float64 over tp "
            "(2 ranks) (check ledger)",
            "where:  mode=tp, all 2 ranks, phase forward, module layers.0.mlp.w2",
            "error:  1 event more or less than expected on a rank, allowed 0",
            "first:  in the ledger: missing event in forward of layers.0.mlp.w2 (1 call): all_reduce sum of 384 B "
            "float64 over tp (2 ranks)",
            "causes: the all_reduce over tp is left out: each rank keeps its partial sum",
            'repeat: shardproof run "seq=16" --subject my.module:subject',
        ]
    )


def test_replicas_that_hold_partial_sums_in_six_lines() -> None:
    bias = "grad/layers.0.mlp.w2.bias"
    first, second = (outcome_of(rank, truth()) for rank in range(2))
    first[bias], second[bias] = truth()[bias] - 1.5, torch.full((6,), 1.5, dtype=torch.float64)
    seen = evidence(first, second)
    lines = message(seen, "replicas").splitlines()
    assert lines[0].startswith(
        "what:   grad/layers.0.mlp.w2.bias has a flaw, replica conflict: rank 1 differs from rank 0 in 6 of 6"
    )
    assert lines[1] == (
        "where:  mode=tp, rank 1 of 2, step 0, phase backward, module layers.0.mlp.w2, tensor grad/layers.0.mlp.w2.bias"
    )
    assert lines[2] == "error:  compared exactly: nothing is allowed to differ"
    assert lines[3] == "first:  grad/layers.0.mlp.w2.bias (step 0, phase backward)"
    assert lines[4] == (
        "causes: the ranks' values add up to the truth over tp=2: each holds one partial sum, never reduced"
    )


def test_a_raising_subject_in_six_lines() -> None:
    said = (
        "rank 1 raised ValueError: no\n  rank 0: waits in all_reduce #3 of tp (0 1), at model.py:7\n  rank 1: raised\n"
    )
    assert crash(case(), SUBJECT, said, "--engine pool") == "\n".join(
        [
            "what:   the subject did not finish: rank 1 raised ValueError: no (check run)",
            "where:  mode=tp, 2 ranks",
            "error:  nothing to compare: there is no outcome",
            "first:  rank 0: waits in all_reduce #3 of tp (0 1), at model.py:7 | rank 1: raised",
            "causes: the subject raised, or its ranks issued different calls: the line above says where each rank "
            "stood",
            'repeat: shardproof run "seq=16" --subject my.module:subject --engine pool',
        ]
    )


def test_a_split_that_moves_nothing_in_six_lines() -> None:
    assert message(evidence(events=(), expectation=None), "parallelism") == "\n".join(
        [
            "what:   no rank sent or received anything in a mesh of tp=2 (check parallelism)",
            "where:  mode=tp, all 2 ranks",
            "error:  nothing to measure: this must never be",
            "first:  no rank sent or received anything in a mesh of tp=2",
            "causes: the split was done to a tensor that is not used, or undone by what followed it",
            'repeat: shardproof run "seq=16" --subject my.module:subject',
        ]
    )


def test_every_failure_has_six_labelled_lines() -> None:
    seen = planted(**{name: tensor + 1 for name, tensor in truth().items()})
    findings = examine(seen)
    failed = [name for name, finding in findings.items() if finding.verdict == "fail"]
    assert len(failed) == 6
    for check in failed:
        labels = [line.split(":")[0] for line in explain(seen, findings, check, SUBJECT).splitlines()]
        assert labels == ["what", "where", "error", "first", "causes", "repeat"]


def test_the_rank_whose_shard_is_wrong_is_named() -> None:
    first, second = (outcome_of(rank, truth()) for rank in range(2))
    second[W1].local.mul_(3)
    lines = message(evidence(first, second), "parameter_gradients").splitlines()
    assert lines[1].startswith("where:  mode=tp, rank 1 of 2, step 0")
    assert lines[4] == "causes: only part 1 of 2 along dim 0 is wrong: look at what one place on tp does"


def test_nothing_is_guessed_where_no_pattern_fits() -> None:
    seen = planted(**{W1: torch.randn(8, 6, generator=torch.Generator().manual_seed(99), dtype=torch.float64)})
    assert message(seen, "parameter_gradients").splitlines()[4] == "causes: none of the known patterns fits"


@pytest.mark.parametrize(
    ("wrong", "first"),
    [
        (
            ["act/layers.0.mlp.w2", "act/layers.0.mlp", "act/head", "loss/0", W1],
            "act/layers.0.mlp.w2 (step 0, phase forward)",
        ),
        (
            ["act_grad/layers.0.mlp.w1", "act_grad/embedding", W1, "loss/1"],
            "act_grad/layers.0.mlp.w1 (step 0, phase backward)",
        ),
        (["grad/embedding.tokens.weight", W1, "param/layers.0.mlp.w1.weight"], f"{W1} (step 0, phase backward)"),
        (["loss/1", "param/layers.0.mlp.w1.weight"], "loss/1 (step 1, phase loss)"),
        (["param/layers.0.mlp.w1.weight"], "param/layers.0.mlp.w1.weight (step 1, phase step)"),
    ],
)
def test_the_first_wrong_place_is_the_first_that_training_computes(wrong: list[str], first: str) -> None:
    seen = planted(**{name: truth()[name] + 1 for name in wrong})
    findings = examine(seen)
    check = next(name for name, finding in findings.items() if finding.verdict == "fail")
    assert explain(seen, findings, check, SUBJECT).splitlines()[3] == f"first:  {first}"


def test_tensor_and_ledger_are_both_told_when_both_are_wrong() -> None:
    values = {**truth(), "loss/0": truth()["loss/0"] * 2}
    seen = evidence(*(outcome_of(rank, values) for rank in range(2)), events=altered(events(), 0, reduce_op="avg"))
    lines = message(seen, "forward").splitlines()
    assert lines[3].startswith(
        "first:  loss/0 (step 0, phase loss); in the ledger: wrong event in forward of embedding"
    )
    assert lines[3].endswith("at model.py:7")
    assert "the call is made otherwise: reduce_op avg instead of sum" in lines[4]


def test_names_stand_in_training_order() -> None:
    assert timeline(
        ["param/a", "grad/a", "grad/b", "loss/1", "loss/0", "act/a", "act_grad/a", "act_grad/b", "odd"], 2
    ) == [*("act/a", "loss/0", "act_grad/b", "act_grad/a", "grad/b", "grad/a", "loss/1", "param/a", "odd")]
    place = place_of("grad/layers.0.mlp.w1.weight", 3)
    assert (place.step, place.phase, place.module) == (0, "backward", "layers.0.mlp.w1")
    assert place_of("param/head.weight", 3).step == 2
    assert place_of("grad_norm/2", 3).step == 2


def test_the_repeat_command_survives_a_shell() -> None:
    assert repeat_command(case("mode=tp tp=2"), SUBJECT) == 'shardproof run "mode=tp" --subject my.module:subject'
    odd = repeat_command(case("mode=tp data=$HOME/a"), "a:b; rm")
    assert odd == "shardproof run 'data=$HOME/a' --subject 'a:b; rm'"


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


TRUTH = drawn(8, 4)
PATTERNS: list[tuple[str, Any, str]] = [
    ("averaged", TRUTH / 4, "it is 0.25 x the truth, and tp=4: averaged over tp where it must be summed"),
    ("summed", TRUTH * 4, "it is 4 x the truth, and tp=4: summed over tp once too often"),
    ("data axis", TRUTH * 3, "it is 3 x the truth, and dp=3: summed over dp once too often"),
    ("sign", -TRUTH, "it is -1 x the truth: its sign is wrong"),
    ("odd factor", TRUTH * 1.7, "it is 1.7 x the truth: a constant factor is wrong"),
    ("zero", TRUTH * 0, "it is zero throughout"),
    ("nan", TRUTH / 0, "100% of it is NaN or infinite"),
    ("shifted", TRUTH.roll(2, 0), "along dim 0 it is shifted by 1 of 4 shards: a neighbour's shard (tp)"),
    ("other shard", TRUTH[[2, 3, 0, 1, 4, 5, 6, 7]], "along dim 0 the 4 shards of tp are in another order"),
    ("columns", TRUTH[:, [1, 0, 3, 2]], "along dim 1 the 4 shards of tp are in another order: another rank's shard"),
    ("rows", TRUTH[[1, 0, 2, 3, 4, 5, 7, 6]], "along dim 0 it holds the right rows in another order"),
    ("bias", TRUTH + 3 * drawn(4), "the same vector is too much in every row: a bias that every rank adds"),
    (
        "flat, scattered",
        TRUTH.reshape(4, 8, 1).movedim(0, 1).flatten(1),
        "it holds the right numbers as if flat memory",
    ),
    ("flat, gathered", torch.cat(TRUTH.chunk(4, 1)).reshape(8, 4), "it holds the right numbers as if flat memory were"),
    ("one shard", torch.cat([TRUTH[:6], drawn(2, 4)]), "only part 3 of 4 along dim 0 is wrong"),
]


@pytest.mark.parametrize(("value", "words"), [row[1:] for row in PATTERNS], ids=[row[0] for row in PATTERNS])
def test_each_pattern_is_recognised_first(value: Tensor, words: str) -> None:
    assert causes(value, TRUTH, {"tp": 4, "dp": 3}, {})[0].startswith(words)


def test_stale_values_and_scalars() -> None:
    now, before = torch.tensor(3.0), torch.tensor(5.0)
    assert causes(before, now, {"tp": 2}, {"loss/0": before})[0].startswith(
        "it equals loss/0 of the dense model: stale"
    )
    assert causes(torch.tensor(3.3), now, {"tp": 2}, {"loss/0": before}) == []
    norm = causes(now * math.sqrt(2), now, {"tp": 2}, {})
    assert norm == [
        "it is 1.414 x the truth, and tp=2: a square root of tp too large: a norm that counts replicas more than once"
    ]


def test_flat_memory_is_told_by_data_rank_too() -> None:
    """Two data ranks of three rows: each gathered its own rows along dim 1 as if they lay along dim 0."""
    right = drawn(6, 4, 5)
    wrong = torch.cat([torch.cat(rows.chunk(4, 1)).reshape(3, 4, 5) for rows in right.chunk(2)])
    assert causes(wrong, right, {"tp": 4, "dp": 2}, {}) == [
        "it holds the right numbers as if flat memory were its 4 shards along dim 1: "
        "a collective over tp along dim 1 that works along dim 0"
    ]


def test_a_loss_over_gathered_logits_is_told_by_its_logarithm() -> None:
    loss = torch.tensor(5.5, dtype=torch.float64)
    assert causes(loss + math.log(3), loss, {"tp": 2, "dp": 3}, {})[0].startswith(
        "it is the truth + ln(3), and dp=3: logits that are gathered already were fed"
    )
    assert causes(loss + 0.97 * math.log(3), loss, {"tp": 2, "dp": 3}, {}) == []


def test_a_loss_that_ranks_take_of_their_own_parts_of_right_logits() -> None:
    first, second = (outcome_of(rank, truth()) for rank in range(2))
    second["loss/0"] = truth()["loss/0"] + 0.1
    assert "the logits are right and the loss differs between ranks" in message(evidence(first, second), "replicas")
    wrong = {**truth(), "logits/0": truth()["logits/0"] + 1}
    first, second = (outcome_of(rank, wrong) for rank in range(2))
    second["loss/0"] = truth()["loss/0"] + 0.1
    assert "the logits are right" not in message(evidence(first, second), "replicas")


def test_a_right_tensor_has_no_cause() -> None:
    assert causes(TRUTH, TRUTH, {"tp": 4}, {}) == []
    assert causes(torch.zeros(0), torch.zeros(0), {"tp": 4}, {}) == []
    assert causes(TRUTH, TRUTH[:4], {"tp": 4}, {}) == []
