"""Factors and offsets: which sizes of the case a factor may come from; what is said where no cause fits."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.checking.checks import CHECKS, examine
from harness.checking.evidence import Evidence
from harness.diagnosing.by_numbers import by_numbers
from harness.diagnosing.diagnosis import explanation_of
from harness.diagnosing.first_place import First
from harness.diagnosing.hints import hint
from harness.diagnosing.rules.displaced import from_offsets
from harness.diagnosing.rules.factors import sizes_of
from harness.diagnosing.six_lines import explain
from harness.shard import Shard
from tests.harness.diagnosing.test_optimizer_causes import CLIPS, GRADIENTS, NAMES, NORMS, START, seen_of
from tests.harness.toy_evidence import case, drawn, evidence, ids_of, outcome_of, planted, truth

BIAS, NORM, TABLE = "grad/layers.0.mlp.w2.bias", "grad_norm/0", "init/embedding.tokens.weight"


def seen(
    values: dict[str, Tensor], text: str = "mode=tp tp=2 seq=16", true: dict[str, Tensor] | None = None
) -> Evidence:
    return planted(values, case=case(text), truth={**truth(), **(true or {})})


def causes_line(found: Evidence) -> str:
    findings = examine(found)
    check = next(name for name, finding in findings.items() if finding.verdict == "fail")
    return explain(found, findings, check, "my:subject").splitlines()[4].removeprefix("causes: ")


def test_parameters_that_are_built_otherwise_are_initial_values() -> None:
    words = "initial values: parameters as built differ from the truth, before any step"
    assert causes_line(seen({TABLE: drawn(12, 6)})) == words
    (cause,) = by_numbers(seen({TABLE: truth()[TABLE].roll(6, 0)}), [TABLE])
    assert cause.words.startswith("initial values, before any step: along dim 0 it is shifted by 1 of 2 shards")


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
    assert told(0.04) == ""
    assert told(1.0, gradient=50.0) == ""  # its own training may have moved it that far


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
    assert sizes_of(evidence(case=case("mode=tp tp=2 dp=3 seq=16 micro=5 batch=30")), factor) == words


def test_a_loss_scale_is_a_size_that_one_axis_explains_before_two_do() -> None:
    scaled = case("mode=tp tp=2 dp=2 dtype=float16 master=float32 scaler=static loss_scale=8")
    assert sizes_of(evidence(case=scaled), 0.125) == "1 / loss_scale=8"


def test_one_small_count_that_is_a_size_times_the_truth_says_that_it_is_one_number() -> None:
    tokens = {"tokens/0": torch.tensor(8)}
    words = causes_line(seen({"tokens/0": torch.tensor(16)}, "mode=tp tp=2 seq=16 micro=1", tokens))
    assert words == "tokens/0 is 2 x the truth, which is tp=2, one number only"
    assert causes_line(seen({"tokens/0": torch.tensor(11)}, true=tokens)) == "none of the known patterns fits"


def test_a_factor_that_is_no_plain_size_is_told_of_one_number() -> None:
    words = causes_line(seen({NORM: truth()[NORM] * math.sqrt(2)}, "mode=tp tp=2 seq=16 micro=3"))
    assert words == "grad_norm/0 is 1.414 x the truth, which is the root of tp=2, one number only"
    assert causes_line(seen({NORM: truth()[NORM] * 1.7})) == "none of the known patterns fits"


def test_a_factor_on_some_ranks_names_them() -> None:
    first, second = (outcome_of(rank, truth()) for rank in range(2))
    second[BIAS] = 2 * truth()[BIAS]
    assert causes_line(evidence(first, second)) == f"on rank 1 {BIAS} is 2 x the truth, which is tp=2 or micro=2"
    second[BIAS] = 2 * truth()[BIAS] + drawn(6)
    assert causes_line(evidence(first, second)) == "none of the known patterns fits"


def test_the_first_place_alone_may_have_a_factor() -> None:
    """The second wrong gradient is none of it."""
    w1 = "grad/layers.0.mlp.w1.weight"
    found = seen({BIAS: truth()[BIAS] * 2, w1: truth()[w1] + drawn(8, 6)}, "mode=tp tp=2 seq=16 micro=1")
    assert ids_of(found) == ["summed_twice"]


def updated(gradient: float, size: float, text: str = CLIPS) -> tuple[Evidence, list[str]]:
    """Step of clipped plain training, its gradients and updates multiplied by these factors."""
    clipped = {name: 0.5 / float(NORMS[0]) * GRADIENTS[0][name] for name in NAMES}
    true = {f"param/{name}": START[name] - 0.1 * clipped[name] for name in NAMES}
    values = {f"param/{name}": START[name] - 0.1 * size * clipped[name] for name in NAMES}
    values |= {f"grad/{name}": gradient * GRADIENTS[0][name] for name in NAMES} if gradient != 1 else {}
    return seen_of(f"{text} steps=1", values, true)


def test_an_update_of_right_gradients_says_where_to_look() -> None:
    found, wrong = updated(1.0, 0.7)
    look = "gradients are right, the update is wrong: look at clip, decay, learning rate, step count"
    first = First(phase="step", region="", step=0, name=wrong[0])
    assert explanation_of(found, examine(found)).causes == ()
    assert hint(found, first, wrong) == f"{look} (the updates of step 0 are 0.7 x the right ones)"
    bad = [f"grad/{NAMES[0]}", *wrong]
    assert hint(found, First(phase="backward", name=bad[0], step=0), bad) == ""


def test_drawn_replicas_that_differ_have_no_truth_and_are_told_all_the_same() -> None:
    """The dense model is given what ranks drew; where they drew apart, nothing can be given."""
    true = {name: tensor for name, tensor in truth().items() if name != TABLE}
    ranks = (outcome_of(rank, {**true, TABLE: drawn(12, 6) + rank}) for rank in range(2))
    first = First(phase="forward", region="embedding.tokens", step=0, name=TABLE)
    assert hint(evidence(*ranks, truth=true), first, [TABLE]).startswith("initial values: parameters as built differ")


W1 = "grad/layers.0.mlp.w1.weight"
ACT = "act/layers.0.mlp.w2"
ALONE = case("mode=tp tp=2 seq=16 micro=1")
THREE = case("mode=tp tp=2 seq=16 micro=3")


def multiplied(factors: dict[str, float], text: object = ALONE) -> Evidence:
    return planted({name: truth()[name] * factor for name, factor in factors.items()}, case=text)


@pytest.mark.parametrize(
    ("factors", "text", "ids"),
    [
        ({BIAS: 2}, ALONE, ["summed_twice"]),  # the ranks hold it whole: a sum over them doubles it
        ({W1: 2}, ALONE, ["constant_factor"]),  # each holds other rows: a sum over the ranks would mix them
        ({BIAS: 4}, ALONE, ["summed_twice"]),
        ({BIAS: 1 / 2}, ALONE, ["averaged"]),
        ({W1: 1 / 2}, ALONE, ["averaged"]),  # a division needs no sum
        ({BIAS: 3}, THREE, ["constant_factor"]),
        ({BIAS: 1 / 3}, THREE, ["constant_factor"]),
        ({BIAS: 2}, case("mode=tp tp=2 seq=16 micro=2"), ["summed_twice", "constant_factor"]),  # nothing decides
        ({ACT: 2}, case("mode=tp tp=2 seq=16 micro=2"), ["summed_twice"]),  # forward knows no other micro-batch
        ({BIAS: -1}, ALONE, ["sign"]),
        ({BIAS: 1.7}, ALONE, ["constant_factor"]),
        ({BIAS: 2, W1: 3}, ALONE, ["summed_twice"]),  # the first one's
        ({BIAS: 1.7, W1: 3}, ALONE, []),  # one bug has one factor
        ({ACT: math.sqrt(2)}, ALONE, ["constant_factor"]),  # roots are of norms
        ({NORM: 2}, ALONE, ["summed_twice"]),
        ({NORM: 1.7}, ALONE, []),  # any wrong number is a factor times the right one
    ],
)
def test_factor_is_told_by_sizes_that_it_can_come_from(factors: dict[str, float], text: object, ids: list[str]) -> None:
    assert ids_of(multiplied(factors, text)) == ids


def test_the_words_name_every_size_that_fits() -> None:
    third = multiplied({BIAS: 1 / 3}, THREE)
    (cause,) = explanation_of(third, examine(third)).causes
    assert cause.words == "it is 0.3333 x the truth, and micro=3: divided by it once more"
    both = case("mode=tp tp=2 dp=2 seq=16 micro=1")
    values = {**truth(), BIAS: truth()[BIAS] * 2}
    seen = evidence(*(outcome_of(rank % 2, values) for rank in range(4)), case=both)
    numbers = {check: CHECKS[check] for check in ("parameter_gradients",)}
    (cause,) = explanation_of(seen, examine(seen, numbers)).causes
    assert (cause.id, "tp=2 or dp=2" in cause.words) == ("summed_twice", True)


def test_a_loss_over_gathered_logits_is_told_by_its_logarithm() -> None:
    for extra, ids in ((math.log(2), ["more_classes"]), (0.97 * math.log(2), [])):
        assert ids_of(planted({"loss/0": truth()["loss/0"] + extra}, case=ALONE)) == ids


def told_rolled(change: Tensor | int) -> list[tuple[str, str]]:
    """Hints about two ranks whose shards of a gradient are rolled by this many elements, or all this."""
    ranks = [outcome_of(rank, truth()) for rank in range(2)]
    for outcome in ranks:
        shard = outcome[W1]
        local = shard.local.flatten().roll(change).view_as(shard.local) if isinstance(change, int) else change
        outcome[W1] = Shard(local, shard.offsets, shard.global_shape)
    return [(cause.id, cause.words) for cause in from_offsets(evidence(*ranks), [W1])]


@pytest.mark.parametrize(("offset", "words"), [(1, "1 too late"), (-1, "1 too early"), (5, "5 too late")])
def test_an_offset_in_flat_memory_is_told(offset: int, words: str) -> None:
    words = f"its elements stand {words} in flat memory: a buffer walked from another place"
    assert told_rolled(offset) == [("flat_offset", words)]


def test_other_numbers_are_no_offset() -> None:
    assert told_rolled(0) == told_rolled(9) == told_rolled(torch.zeros(4, 6)) == []
    assert from_offsets(evidence(), ["param/layers.0.mlp.w1.weight"]) == []
