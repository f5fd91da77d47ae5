"""Factors and offsets: which sizes of the case a factor may come from; what is said where no cause fits."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardproof.harness.checking.checks import examine
from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.diagnosing.by_numbers import by_numbers
from shardproof.harness.diagnosing.diagnosis import explanation_of
from shardproof.harness.diagnosing.first_place import First
from shardproof.harness.diagnosing.hints import hint
from shardproof.harness.diagnosing.hypotheses.displaced import from_offsets
from shardproof.harness.diagnosing.hypotheses.factors import sizes_of
from shardproof.harness.shard import Shard
from tests.harness.diagnosing.test_optimizer_causes import CLIPS, GRADIENTS, NAMES, NORMS, START, seen_of
from tests.harness.toy_evidence import case, drawn, evidence, ids_of, outcome_of, planted, told_by, truth

BIAS, NORM, TABLE = "grad/layers.0.mlp.w2.bias", "grad_norm/0", "init/embedding.tokens.weight"


def seen(
    values: dict[str, Tensor], text: str = "mode=tp tp=2 seq=16", true: dict[str, Tensor] | None = None
) -> Evidence:
    return planted(values, case=case(text), truth={**truth(), **(true or {})})


COUNT = {"tokens/0": torch.tensor(8)}
BUILT = "initial values: parameters as built differ from the truth, before any step"


@pytest.mark.parametrize(
    ("values", "true", "micro", "words"),
    [
        ({TABLE: drawn(12, 6)}, {}, 2, BUILT),
        ({"tokens/0": torch.tensor(16)}, COUNT, 1, "wrong: tokens 1 of 2; right: "),
        ({"tokens/0": torch.tensor(11)}, COUNT, 2, "wrong: tokens 1 of 2; right: "),
        ({NORM: truth()[NORM] * math.sqrt(2)}, {}, 3, "wrong: gradient norms 1 of 2; right: "),
        ({NORM: truth()[NORM] * 1.7}, {}, 2, "wrong: gradient norms 1 of 2; right: "),
    ],
)
def test_what_no_cause_fits_is_told_as_far_as_it_is_known(
    values: dict[str, Tensor], true: dict[str, Tensor], micro: int, words: str
) -> None:
    assert told_by(seen(values, f"mode=tp tp=2 seq=16 micro={micro}", true))[4].startswith(f"causes: {words}")


def test_a_factor_on_some_ranks_names_them() -> None:
    first, second = (outcome_of(rank, truth()) for rank in range(2))
    for rest, words in ((0 * drawn(6), f"on rank 1 {BIAS} is 2 x the truth, which is tp=2 or micro=2"), (drawn(6), "")):
        second[BIAS] = 2 * truth()[BIAS] + rest
        assert told_by(evidence(first, second))[4].startswith(f"causes: {words or 'wrong: gradients 1 of 4; right: '}")


def test_a_parameter_that_no_training_moved_so_far_began_otherwise() -> None:
    """Of a subject that returns no initial values: its first wrong module has a weight that is far off."""
    name, act = "param/layers.0.mlp.w2.bias", "act/layers.0.mlp.w2"
    first = First(phase="forward", region="layers.0.mlp.w2", step=0, name=act)

    def told(off: float, gradient: float = 1.0) -> str:
        """Hint when everything is off by `off`, of which training moves it by 0.01."""
        wrong = {act: truth()[act] + drawn(2, 3, 6), name: truth()[name] + off, BIAS: gradient * truth()[BIAS]}
        shares = {"start/layers.0.mlp.w2.bias": truth()[name] + 0.01}
        return hint(replace(seen(wrong), shares=shares), first, [act, name])

    assert told(1.0) == f"initial values: {name} is off by more than 5 times what training moves it by"
    alike = "wrong: parameters 1 of 4, activations 1 of 5"
    assert told(0.04).startswith(alike)
    assert told(1.0, gradient=50.0).startswith(alike)  # its own training may have moved it that far


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (2, "tp=2"),
        (1 / 3, "1 / dp=3"),
        (9, "the square of dp=3"),
        (math.sqrt(2), "the root of tp=2"),
        (1 / math.sqrt(3), "1 / the root of dp=3"),
        (1.5, "dp=3 / tp=2"),
        (0.4, "tp=2 / micro=5"),
        (6, "all ranks=6"),
        (-2, "minus tp=2"),
        (0.7, ""),
        (1.00001, ""),
    ],
)
def test_sizes_and_their_powers_and_ratios(factor: float, words: str) -> None:
    """A single axis explains it before two do, and a loss scale is a size."""
    assert sizes_of(evidence(case=case("mode=tp tp=2 dp=3 seq=16 micro=5 batch=30")), factor) == words
    scaled = case("mode=tp tp=2 dp=2 dtype=float16 master=float32 scaler=static loss_scale=8")
    assert sizes_of(evidence(case=scaled), 0.125) == "1 / loss_scale=8"


def updated(size: float) -> tuple[Evidence, list[str]]:
    """Step of clipped plain training, its updates multiplied by this factor."""
    clip = 0.1 * 0.5 / float(NORMS[0])
    true, values = (
        {f"param/{name}": START[name] - factor * clip * GRADIENTS[0][name] for name in NAMES} for factor in (1, size)
    )
    return seen_of(f"{CLIPS} steps=1", values, true)


def test_an_update_of_right_gradients_is_told_by_its_factor_alone() -> None:
    once_more = by_numbers(*updated(0.5 / float(NORMS[0])))
    assert not [cause.words for cause in once_more if "scaled up" in cause.words], "it is clipped once more"
    found, wrong = updated(0.7)
    first = First(phase="step", region="", step=0, name=wrong[0])
    assert explanation_of(found, examine(found)).causes == ()
    assert hint(found, first, wrong) == "the updates of step 0 are 0.7 x the right ones"
    assert hint(found, replace(first, name="logits/1"), ["logits/1"]).startswith("wrong: logits"), (
        "its data may be others"
    )
    bad = [f"grad/{NAMES[0]}", *wrong]
    assert hint(found, First(phase="backward", name=bad[0], step=0), bad).startswith(
        "wrong: gradients 1 of 4, parameters 2 of 4"
    )


def test_drawn_replicas_that_differ_have_no_truth_and_are_told_all_the_same() -> None:
    """The dense model is given what ranks drew; where they drew apart, nothing can be given."""
    true = {name: tensor for name, tensor in truth().items() if name != TABLE}
    ranks = (outcome_of(rank, {**true, TABLE: drawn(12, 6) + rank}) for rank in range(2))
    first = First(phase="forward", region="embedding.tokens", step=0, name=TABLE)
    assert hint(evidence(*ranks, truth=true), first, [TABLE]).startswith("initial values: parameters as built differ")


W1 = "grad/layers.0.mlp.w1.weight"
ACT = "act/layers.0.mlp.w2"


def multiplied(factors: dict[str, float], micro: int = 1) -> Evidence:
    values = {name: truth()[name] * factor for name, factor in factors.items()}
    return seen(values, f"mode=tp tp=2 seq=16 micro={micro}")


@pytest.mark.parametrize(
    ("factors", "micro", "ids"),
    [
        ({BIAS: 2}, 1, ["summed_twice"]),  # the ranks hold it whole: a sum over them doubles it
        ({W1: 2}, 1, ["constant_factor"]),  # each holds other rows: a sum over the ranks would mix them
        ({BIAS: 4}, 1, ["summed_twice"]),
        ({BIAS: 1 / 2}, 1, ["averaged"]),
        ({W1: 1 / 2}, 1, ["averaged"]),  # a division needs no sum
        ({BIAS: 3}, 3, ["constant_factor"]),
        ({BIAS: 2}, 2, ["summed_twice", "constant_factor"]),  # nothing decides
        ({ACT: 2}, 2, ["summed_twice"]),  # forward knows no other micro-batch
        ({BIAS: -1}, 1, ["sign"]),
        ({BIAS: 1.7}, 1, ["constant_factor"]),
        ({BIAS: 1 / (2 + 1e-7)}, 1, ["averaged"]),  # an epsilon in its divisor
        ({BIAS: 1 / (2 + 1e-4)}, 1, ["constant_factor"]),
        ({BIAS: 2, W1: 3}, 1, ["summed_twice"]),  # the first one's
        ({BIAS: 1.7, W1: 3}, 1, []),  # one bug has one factor
        ({ACT: math.sqrt(2)}, 1, ["constant_factor"]),  # roots are of norms
        ({NORM: 2}, 1, []),  # any wrong number is a factor times the right one
    ],
)
def test_factor_is_told_by_sizes_that_it_can_come_from(factors: dict[str, float], micro: int, ids: list[str]) -> None:
    assert ids_of(multiplied(factors, micro)) == ids


def test_four_losses_show_a_factor_and_three_do_not() -> None:
    for steps, causes in ((3, "wrong: loss 3 of 3; right: "), (4, "all are 2 x the truth, which is tp=2")):
        true = {f"loss/{step}": drawn().abs() + 5 + step for step in range(steps)}
        found = seen({n: 2 * loss for n, loss in true.items()}, f"mode=tp tp=2 seq=16 micro=1 steps={steps}", true)
        assert told_by(found)[4].startswith(f"causes: {causes}")


def test_a_loss_and_gradients_that_share_a_factor_show_it_together() -> None:
    gradients = [name for name in truth() if name.startswith("grad/")]
    for other, causes in (
        (2, "it and all wrong gradients are 2 x the truth, which is tp=2"),
        (3, "wrong: loss 1 of 2, "),
    ):
        found = multiplied({"loss/0": 2, **dict.fromkeys(gradients, 2), W1: other})
        assert told_by(found)[4].startswith(f"causes: {causes}")


def test_a_loss_over_gathered_logits_is_told_by_its_logarithm() -> None:
    for extra, ids in ((math.log(2), ["more_classes"]), (0.97 * math.log(2), [])):
        assert ids_of(seen({"loss/0": truth()["loss/0"] + extra}, "mode=tp tp=2 seq=16 micro=1")) == ids


def told_rolled(change: Tensor | int) -> list[tuple[str, str]]:
    """Hints about two ranks whose shards of a gradient are rolled by this many elements, or all this."""
    ranks = [outcome_of(rank, truth()) for rank in range(2)]
    for outcome in ranks:
        shard = outcome[W1]
        local = shard.local.flatten().roll(change).view_as(shard.local) if isinstance(change, int) else change
        outcome[W1] = Shard(local, shard.offsets, shard.global_shape)
    return [(cause.id, cause.words) for cause in from_offsets(evidence(*ranks), [W1])]


def test_an_offset_in_flat_memory_is_told() -> None:
    for offset, words in ((1, "1 too late"), (-1, "1 too early"), (5, "5 too late")):
        told = f"its elements stand {words} in flat memory"
        assert told_rolled(offset) == [("flat_offset", told)]
    assert told_rolled(0) == told_rolled(9) == told_rolled(torch.zeros(4, 6)) == []
    assert from_offsets(evidence(), ["param/layers.0.mlp.w1.weight"]) == []
