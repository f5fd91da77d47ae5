"""Layouts and patterns are recognised on numbers that show them, and nothing is reported where none fits.

Flaws of dtype or shape have a cause, and disturb no diagnosis.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.harness.checking.checks import run_checks
from shardproof.harness.diagnosing.causes.cause import report_cause
from shardproof.harness.diagnosing.diagnosis import diagnose, explanation_of
from shardproof.harness.diagnosing.hypotheses.patterns import from_patterns
from shardproof.harness.diagnosing.placing.alignments import AGREES, DIFFERS, UNKNOWN, TrueTensor, fit_parts
from shardproof.harness.diagnosing.placing.counterparts import same_modules, stages_of_ranks
from shardproof.harness.diagnosing.placing.modules_by_name import Watched, locate_wrong_module
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.protocols import Shard
from shardproof.harness.recording.capturing.module_calls import ModuleCalls, TensorCopy
from shardproof.harness.verdicts.facts import state_text
from tests.harness.recording.toy_calls import an_event
from tests.harness.toy_evidence import drawn, evidence, ids_of, outcome_of, truth

AXES = {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3))}
PAIR = {"tp": ((0, 1),)}


def target(*calls: Tensor, dtype: str = "float64") -> TrueTensor:
    return TrueTensor(calls=calls, dtype=dtype, kind=1.0)


FULL = drawn(6, 8, 5)
ROWS = FULL.chunk(2, 0)
NOISE = drawn(3, 8, 5) * 0.3


@pytest.mark.parametrize(
    ("layout", "parts"),
    {
        "whole": [FULL] * 4,
        "cut along dim 0 over dp": [ROWS[0], ROWS[0], ROWS[1], ROWS[1]],
        "cut along dim 1 over tp, cut along dim 0 over dp": [p for row in ROWS for p in row.chunk(2, 1)],
        "cut along dim 2 over tp, cut along dim 0 over dp": [p for row in ROWS for p in row.split([2, 3], 2)],
        "in zigzag along dim 1 over tp, cut along dim 0 over dp": [
            torch.cat([row[:, 2 * i : 2 * i + 2], row[:, 6 - 2 * i : 8 - 2 * i]], 1) for row in ROWS for i in (0, 1)
        ],
        "partial sums over tp, cut along dim 0 over dp": [p for row in ROWS for p in (row - NOISE, NOISE)],
        "cut along dim 0 over tp, cut along dim 0 over dp": [FULL[a:b] for a, b in ((0, 1), (1, 3), (3, 5), (5, 6))],
    }.items(),
)
def test_a_layout_that_nobody_declared_is_found(layout: str, parts: list[Tensor]) -> None:
    given = {rank: [part] for rank, part in enumerate(parts)}
    found = fit_parts(given, target(FULL), AXES)
    assert (found.state, found.layout) == (AGREES, layout)
    assert found.summed == ("tp" if "sums" in layout else "")
    for rank, part in enumerate(parts):  # one wrong element on one rank is enough
        wrong = part.clone()
        wrong[0, 0, 0] += 0.01
        assert fit_parts({**given, rank: [wrong]}, target(FULL), AXES).state == DIFFERS


def test_other_dims_and_padding_are_recognised() -> None:
    half = FULL.chunk(2, 1)
    for view in (lambda x: x, lambda x: x.transpose(0, 1), lambda x: x.flatten(0, 1), lambda x: x.unflatten(2, (5, 1))):
        assert fit_parts({rank: [view(half[rank])] for rank in (0, 1)}, target(FULL), PAIR).state == AGREES
    padded = torch.cat([FULL, drawn(6, 8, 1)], 2).chunk(2, 2)
    assert fit_parts({rank: [padded[rank]] for rank in (0, 1)}, target(FULL), PAIR).state == AGREES
    beside = {0: [FULL], 1: [FULL * 2]}  # a second rank of nothing but padding would hide what is wrong there
    assert fit_parts(beside, target(FULL), PAIR).state == DIFFERS


def test_micro_batches_are_rows_in_either_order() -> None:
    pieces = FULL.chunk(6, 0)
    by_rank = {0: list(pieces[:3]), 1: list(pieces[3:])}
    in_turn = {0: list(pieces[::2]), 1: list(pieces[1::2])}
    for handed in (by_rank, in_turn):
        for whole in (target(FULL), target(*pieces), target(*ROWS)):
            assert fit_parts(handed, whole, {"dp": ((0, 1),)}).state == AGREES
        swapped = {0: handed[0][::-1], 1: handed[1]}
        assert fit_parts(swapped, target(FULL), {"dp": ((0, 1),)}).state == DIFFERS
    other_lengths = [FULL[:2, :3], FULL[2:5, :7]]
    split = {rank: [call.tensor_split(2, 1)[rank] for call in other_lengths] for rank in (0, 1)}
    assert fit_parts(split, target(*other_lengths), PAIR).state == AGREES


def test_equal_parts_of_a_sum_differ_and_a_constant_or_a_shape_that_fits_nothing_shows_nothing() -> None:
    assert fit_parts({0: [FULL / 2], 1: [FULL / 2]}, target(FULL), PAIR).state == DIFFERS  # a wrong factor
    for factor, state in ((1, AGREES), (1.001, DIFFERS)):  # in a lower precision, which has limits of its own
        low = {rank: [FULL.float() * factor] for rank in (0, 1)}
        assert fit_parts(low, target(FULL, dtype="float32"), PAIR).state == state
    assert fit_parts({0: [torch.ones(4)], 1: [torch.ones(4)]}, target(torch.ones(4)), PAIR).state == UNKNOWN
    assert fit_parts({0: [drawn(7, 8, 5)], 1: [drawn(7, 8, 5)]}, target(FULL), PAIR).state == UNKNOWN


def test_the_scale_of_a_loss_is_one_factor_of_every_rank_and_call() -> None:
    given = {0: [ROWS[0] / 7], 1: [ROWS[1] / 5]}
    axes = {"dp": ((0, 1),)}
    assert fit_parts(given, target(FULL), axes).state == DIFFERS
    found = fit_parts(given, target(FULL), axes, scaled=True)
    assert found.state == AGREES
    assert found.factors == pytest.approx({(0, 0): 1 / 7, (1, 0): 1 / 5})
    other = {0: [ROWS[0].square() / 7], 1: [ROWS[1].square() / 5]}
    assert fit_parts(other, target(FULL.square()), axes, factors=found.factors).state == AGREES
    assert fit_parts({0: [ROWS[0].abs()], 1: [ROWS[1]]}, target(FULL), axes, scaled=True).state == DIFFERS


def test_stages_of_a_pipeline_are_looked_at_apart() -> None:
    axes = {"tp": ((0, 1), (2, 3)), "pp": ((0, 2), (1, 3))}
    other = [-part for part in ROWS]  # the second stage's layer 0 is another one
    parts = {rank: [part] for rank, part in enumerate([*ROWS, *other])}
    assert fit_parts(parts, target(FULL), axes).state == DIFFERS
    assert [fit_parts(stage, target(FULL), axes).state for stage in stages_of_ranks(parts, axes)] == [AGREES, DIFFERS]
    assert stages_of_ranks(parts, {"tp": axes["tp"]}) == []


def plain_copy(tensor: Tensor) -> tuple[TensorCopy, ...]:
    return (TensorCopy(blocks=(Block(local=tensor, offsets=(0, 0), global_shape=tuple(tensor.shape)),)),)


@pytest.mark.parametrize(("share", "summed"), [(1.0, "tp"), (1.1, "")])
def test_a_sum_left_out_beside_the_residual_stream_is_found_where_its_block_sums_something_else(
    share: float, summed: str
) -> None:
    """Each rank gives the stream and its part of the branch to what came before; 1.1 x is no such part."""
    stream, branch, mixes = drawn(4, 6), drawn(4, 6, seed=1), drawn(6, 6, seed=2)
    parts = (0.3 * branch + drawn(4, 6, seed=3), 0.7 * branch - drawn(4, 6, seed=3))

    def calls(branch: Tensor, before: Tensor) -> ModuleCalls:
        gradients = {"first": before, "block.norm": branch, "block": stream}
        outputs = {path: plain_copy(drawn(4, 6, seed=4)) for path in gradients}
        return ModuleCalls(outputs=outputs, inputs={}, gradients={p: plain_copy(g) for p, g in gradients.items()})

    shares = (1.0, share)
    found = locate_wrong_module(
        Watched(
            ranks=[calls(p, stream + s * p @ mixes) for p, s in zip(parts, shares, strict=True)],
            truth=calls(branch, stream + branch @ mixes),
            axes=PAIR,
            dtype="float64",
            events=[an_event(op="all_reduce", phase="backward", axis="tp", region="block")],
        ),
        forward=False,
        backward=True,
    )
    assert found is not None and found.summed == summed


def test_a_gradient_is_no_place_where_its_output_lies_otherwise() -> None:
    table, rows = drawn(6, 8), drawn(6, 8, seed=1)

    def calls(output: Tensor, gradient: Tensor) -> ModuleCalls:
        outputs, gradients = ({"table": plain_copy(of), "head": plain_copy(rows)} for of in (output, gradient))
        return ModuleCalls(outputs=outputs, inputs={}, gradients=gradients)

    for output, place in ((table.roll(3, 0), ""), (table, "table")):  # its halves as if they were rows of samples
        rank = calls(output, rows.flip(0))
        watched = Watched(ranks=[rank, rank], truth=calls(table, rows), axes=PAIR, dtype="float64")
        found = locate_wrong_module(watched, forward=False, backward=True)
        assert "of the output of table gives" in found.words if found else not place


def test_modules_are_matched_by_equal_names_then_by_their_longest_common_end() -> None:
    mine = ["model.layers.0.mlp", "model.layers.1.mlp", "model.norm", "model.layers.0.wqkv", "head"]
    theirs = ["layers.0.mlp", "layers.1.mlp", "norm", "layers.0.wq", "layers.0.wk", "head"]
    assert same_modules(mine, theirs) == {
        "layers.0.mlp": "model.layers.0.mlp",
        "layers.1.mlp": "model.layers.1.mlp",
        "norm": "model.norm",
        "head": "head",
    }
    assert same_modules(["a.mlp", "b.mlp"], ["c.mlp"]) == {}


NAME = "grad/layers.0.mlp.w2.bias"
W1 = "grad/layers.0.mlp.w1.weight"


def spoiled(tensor: Tensor, number: float) -> Tensor:
    """A copy of which one element is this."""
    return tensor.index_fill(0, torch.tensor([2]), number)


PART = "1 of 2 parts along dim {} (tp) told as the whole: return Shard(local, "
NO_PARTS = "the ranks' parts do not make the full tensor, as the check states"
NO_NUMBER = "on rank 1 it is NaN or infinite"


@pytest.mark.parametrize(
    ("name", "wrong", "known", "words"),
    [
        (NAME, lambda t: t.to(torch.complex128), "layout", NO_PARTS),
        (NAME, lambda t: [t, t.float()], "layout", NO_PARTS),
        (W1, lambda t: t[:4], "layout", PART.format(0)),
        (W1, lambda t: t[:, :3], "layout", PART.format(1)),
        (W1, lambda t: t[:5], "layout", NO_PARTS),
        (W1, lambda t: [Shard(t[:5], (0, 0), (8, 6)), Shard(t[5:], (4, 0), (7, 6))], "layout", NO_PARTS),
        (W1, lambda t: [Shard(t[:4], (0, 0), (8, 6)), Shard(t[3:7], (3, 0), (8, 6))], "layout", NO_PARTS),
        (NAME, lambda t: [t, spoiled(t, torch.nan)], "nan", NO_NUMBER),
        (NAME, lambda t: [t, spoiled(t, torch.inf)], "nan", NO_NUMBER),
    ],
)
def test_another_dtype_or_shape_is_told_by_what_it_looks_like(
    name: str, wrong: Callable[[Tensor], Any], known: str, words: str
) -> None:
    """`wrong` makes what both ranks return, or the list of what each does."""
    made = wrong(truth()[name])
    values = made if isinstance(made, list) else [made] * 2
    seen = evidence(*({**outcome_of(rank, truth()), name: value} for rank, value in enumerate(values)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of complex numbers taken for real ones
        (cause,) = explanation_of(seen, run_checks(seen)).causes
    assert cause.id == known and cause.words.startswith(words)


def test_complex_replicas_that_differ_have_a_diagnosis() -> None:
    value = truth()[NAME].to(torch.complex128)
    torn = evidence(*({**outcome_of(rank, truth()), NAME: value * 1j**rank} for rank in range(2)))
    assert explanation_of(torn, run_checks(torn)).first.name == NAME


TRUTH, CUBE, STACK = drawn(8, 4), drawn(2, 3, 5), drawn(6, 4, 5)
BY_RANK = torch.cat([torch.cat(rows.chunk(4, 1)).reshape(3, 4, 5) for rows in STACK.chunk(2)])
"""Two data ranks of three rows: each gathered its own rows along dim 1 as if they lay along dim 0."""
ORDER, FLAT = "the 4 shards of tp are in another order", "it holds the right numbers as if flat"


SHIFTED = "along dim 0 it is shifted by 1 of 4 shards (tp)"
PERMUTED = "along dim 0 it holds the right rows in another order"
STANDS_IN = "along dim 0 it holds the wrong parts of 2 (dp): 0 in place of 1"
OVER_TP = "its 4 shards along dim 1 (tp)"


@pytest.mark.parametrize(
    ("known", "value", "truth", "axes", "words"),
    [
        ("zero", TRUTH * 0, TRUTH, "tp", "it is zero throughout"),
        ("nan", TRUTH / 0, TRUTH, "tp", "100% of it is NaN or infinite"),
        ("other_part", TRUTH.roll(2, 0), TRUTH, "tp", SHIFTED),
        ("other_part", TRUTH.roll(2, 0), TRUTH, "tp ep", f"{SHIFTED[:-1]} or ep)"),  # parts of one size
        ("other_part", TRUTH[[2, 3, 0, 1, 4, 5, 6, 7]], TRUTH, "tp", f"along dim 0 {ORDER}"),
        ("other_part", TRUTH[:, [1, 0, 3, 2]], TRUTH, "tp", f"along dim 1 {ORDER}"),
        ("other_part", torch.cat([TRUTH[:4]] * 2), TRUTH, "dp", STANDS_IN),
        ("permuted", TRUTH[[1, 0, 2, 3, 4, 5, 7, 6]], TRUTH, "tp", PERMUTED),
        ("permuted", TRUTH.reshape(4, 8, 1).movedim(0, 1).flatten(1), TRUTH, "tp", f"{FLAT} memory were"),
        ("permuted", torch.cat(TRUTH.chunk(4, 1)).reshape(8, 4), TRUTH, "tp", f"{FLAT} memory were"),
        ("permuted", BY_RANK, STACK, "tp dp", f"{FLAT} memory were {OVER_TP}"),
        ("permuted", CUBE.transpose(0, 1).reshape(2, 3, 5), CUBE, "dp", "dims 0 and 1 are exchanged in memory"),
    ],
)
def test_each_pattern_is_recognised_first(known: str, value: Tensor, truth: Tensor, axes: str, words: str) -> None:
    first = from_patterns(value, truth, {axis: {"tp": 4, "dp": 2, "ep": 4}[axis] for axis in axes.split()}, {})[0]
    assert first.id == known and first.words.startswith(words)


def test_only_known_causes_are_told() -> None:
    with pytest.raises(ValueError, match="cause id=gremlins: is not a known cause; legal: missing_call "):
        report_cause("gremlins", state_text(""), "a call")


def test_replicas_that_differ_in_their_last_bits_alone() -> None:
    name = "act/embedding"
    near = evidence(outcome_of(0, truth()), outcome_of(1, {**truth(), name: truth()[name] * (1 + 2**-48)}))
    (drifting,) = diagnose(near, run_checks(near), "replicas").causes
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


def test_a_stale_value_is_told_and_a_right_tensor_has_no_cause() -> None:
    now, before = torch.tensor(3.25), torch.tensor(5.5)
    (stale,) = from_patterns(before, now, {"tp": 2}, {"loss/0": before})
    assert stale.id == "stale" and stale.words == "it equals loss/0 of the dense model"
    assert from_patterns(torch.tensor(3.3), now, {"tp": 2}, {"loss/0": before}) == []
    assert from_patterns(TRUTH, TRUTH, {"tp": 4}, {}) == []
    assert from_patterns(torch.zeros(0), torch.zeros(0), {"tp": 4}, {}) == []
    assert from_patterns(TRUTH, TRUTH[:4], {"tp": 4}, {}) == []
