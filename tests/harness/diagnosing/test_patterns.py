"""Patterns: each is recognised on numbers that show it, and nothing is reported where none fits."""

import pytest
import torch
from torch import Tensor

from harness.checking.checks import examine
from harness.diagnosing.diagnosis import diagnose
from harness.diagnosing.rules.causes import reported
from harness.diagnosing.rules.patterns import from_patterns
from harness.shard import Shard
from tests.harness.toy_evidence import drawn, evidence, ids_of, outcome_of, planted, tried, truth

TRUTH, CUBE, ROWS = drawn(8, 4), drawn(2, 3, 5), drawn(6, 4, 5)
BY_RANK = torch.cat([torch.cat(rows.chunk(4, 1)).reshape(3, 4, 5) for rows in ROWS.chunk(2)])
"""Two data ranks of three rows: each gathered its own rows along dim 1 as if they lay along dim 0."""
ORDER, FLAT = "the 4 shards of tp are in another order: another rank's shard", "it holds the right numbers as if flat"


SHIFTED = "along dim 0 it is shifted by 1 of 4 shards: a neighbour's shard (tp)"
PERMUTED = "along dim 0 it holds the right rows in another order"
STANDS_IN = "along dim 0 it holds the wrong parts of 2 (dp): 0 in place of 1"
OVER_TP = "its 4 shards along dim 1: a collective over tp along dim 1 that works along dim 0"


@pytest.mark.parametrize(
    ("known", "value", "truth", "axes", "words"),
    [
        ("zero", TRUTH * 0, TRUTH, "tp", "it is zero throughout"),
        ("nan", TRUTH / 0, TRUTH, "tp", "100% of it is NaN or infinite"),
        ("shifted_shard", TRUTH.roll(2, 0), TRUTH, "tp", SHIFTED),
        ("shifted_shard", TRUTH.roll(2, 0), TRUTH, "tp ep", f"{SHIFTED[:-1]} or ep)"),  # parts of one size
        ("other_shard", TRUTH[[2, 3, 0, 1, 4, 5, 6, 7]], TRUTH, "tp", f"along dim 0 {ORDER}"),
        ("other_shard", TRUTH[:, [1, 0, 3, 2]], TRUTH, "tp", f"along dim 1 {ORDER}"),
        ("other_shard", torch.cat([TRUTH[:4]] * 2), TRUTH, "dp", STANDS_IN),
        ("rows_permuted", TRUTH[[1, 0, 2, 3, 4, 5, 7, 6]], TRUTH, "tp", PERMUTED),
        ("flat_dim", TRUTH.reshape(4, 8, 1).movedim(0, 1).flatten(1), TRUTH, "tp", f"{FLAT} memory were"),
        ("flat_dim", torch.cat(TRUTH.chunk(4, 1)).reshape(8, 4), TRUTH, "tp", f"{FLAT} memory were"),
        ("flat_dim", BY_RANK, ROWS, "tp dp", f"{FLAT} memory were {OVER_TP}"),
        ("transposed", CUBE.transpose(0, 1).reshape(2, 3, 5), CUBE, "dp", "dims 0 and 1 are exchanged in memory"),
    ],
)
def test_each_pattern_is_recognised_first(known: str, value: Tensor, truth: Tensor, axes: str, words: str) -> None:
    first = from_patterns(value, truth, {axis: {"tp": 4, "dp": 2, "ep": 4}[axis] for axis in axes.split()}, {})[0]
    assert first.id == known and first.words.startswith(words)


def test_only_known_causes_are_told() -> None:
    with pytest.raises(ValueError, match="cause id=gremlins: is not a known cause; legal: nan "):
        reported("gremlins", "", "a call")


def test_terms_that_were_never_summed_are_told_beside_what_was_added_to_each() -> None:
    """Each rank holds its term plus the same positions: their sum is the truth and the positions once more."""
    positions, name, term = drawn(3, 6), "act/embedding", drawn(2, 3, 6)
    first = outcome_of(0, {**truth(), name: term + positions})
    second = outcome_of(1, {**truth(), name: truth()[name] - term})
    assert ids_of(evidence(first, second)) == ["not_summed"]


def test_a_what_if_that_explains_part_of_the_error_is_not_told() -> None:
    """A value near a what-if that is itself near the truth has another cause."""
    true = truth()["logits/0"]
    other = {"fused_cut.one/logits/0": true + 1e-3 * drawn(*true.shape), "fused_cut.two/logits/0": true * 1.5}
    for value, ids in ((true + 1e-4, []), (true * 1.5, ["fused_cut"])):
        found = ids_of(planted({"logits/0": value}, what_ifs=tried(other)))
        assert [known for known in found if known == "fused_cut"] == ids


def test_replicas_that_differ_in_their_last_bits_alone() -> None:
    name = "act/embedding"
    near = evidence(outcome_of(0, truth()), outcome_of(1, {**truth(), name: truth()[name] * (1 + 2**-48)}))
    (drifting,) = diagnose(near, examine(near), "replicas").causes
    assert drifting.id == "replicas_drift"
    assert drifting.words.startswith("every rank's is right but for its last bits")
    far = evidence(outcome_of(0, truth()), outcome_of(1, {**truth(), name: truth()[name] * (1 + 2**-40)}))
    assert "replicas_drift" not in ids_of(far)


def test_another_replica_tells_what_the_first_one_cannot() -> None:
    """The first wrong tensor is next to nothing in truth; terms of the second add up to its truth."""
    first, second, term = "act/embedding", "act/layers.0.mlp.w1", drawn(2, 3, 6)
    true = {**truth(), first: truth()[first] * 1e-20}
    ranks = [
        outcome_of(0, {**true, first: true[first] + 1, second: true[second] - term}),
        outcome_of(1, {**true, first: true[first] + 2, second: term}),
    ]
    assert ids_of(evidence(*ranks, truth=true)) == ["not_summed"]


def test_a_loss_that_ranks_take_of_their_own_parts_of_right_logits() -> None:
    first, second = (outcome_of(rank, truth()) for rank in range(2))
    second["loss/0"] = truth()["loss/0"] + 0.1
    assert "loss_by_parts" not in ids_of(evidence(first, second))  # each holds all classes
    logits = truth()["logits/0"]
    for rank, outcome in enumerate((first, second)):
        half = logits.chunk(2, -1)[rank]
        offsets = (*[0] * (logits.dim() - 1), rank * half.shape[-1])
        outcome["logits/0"] = Shard(local=half, offsets=offsets, global_shape=tuple(logits.shape))
    assert "loss_by_parts" in ids_of(evidence(first, second))
    wrong = {**truth(), "logits/0": truth()["logits/0"] + 1}
    first, second = (outcome_of(rank, wrong) for rank in range(2))
    second["loss/0"] = truth()["loss/0"] + 0.1
    assert "loss_by_parts" not in ids_of(evidence(first, second))


def test_a_stale_value_is_told_and_a_right_tensor_has_no_cause() -> None:
    now, before = torch.tensor(3.25), torch.tensor(5.5)
    (stale,) = from_patterns(before, now, {"tp": 2}, {"loss/0": before})
    assert stale.id == "stale" and stale.words.startswith("it equals loss/0 of the dense model: stale")
    assert from_patterns(torch.tensor(3.3), now, {"tp": 2}, {"loss/0": before}) == []
    assert from_patterns(TRUTH, TRUTH, {"tp": 4}, {}) == []
    assert from_patterns(torch.zeros(0), torch.zeros(0), {"tp": 4}, {}) == []
    assert from_patterns(TRUTH, TRUTH[:4], {"tp": 4}, {}) == []
