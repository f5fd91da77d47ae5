"""Two recorded launches judged: right ones agree under every layout, each mistake is found where it was made."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.harness.parity.alive import check_alive
from shardproof.harness.parity.judging import Further, judge_launches
from shardproof.harness.parity.recorded import Launch, read_launch
from shardproof.harness.running.result import CaseResult
from shardproof.harness.verdicts.facts import FailedCheck
from tests.harness.parity.toy_launches import BATCH, WIDTH, Edit, Rank, Toy, initial_values

pytest.importorskip("safetensors", reason="needs safetensors")

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "one": {},
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "dp+tp": {"dp": 2, "tp": 2},
    "dp+tp+pp": {"dp": 2, "tp": 2, "pp": 2},
    "dp of blocks": {"dp": 2, "order": lambda dp, rank: [*range(rank * BATCH // dp, (rank + 1) * BATCH // dp)]},
    "dp and micro-batches": {"dp": 2, "micro": 2},
    "micro-batches": {"micro": 2},
}


def judged(folder: Path, first: Toy, second: Toy, *, further: bool = True) -> CaseResult:
    """The result of two toy launches; a perturbed run begins with initial values that are moved by rounding."""
    mine, theirs = (read_launch(toy.launch(folder / name)) for name, toy in (("a", first), ("b", second)))

    def again(number: int = 0) -> Any:
        run = replace(first, noise=number * 1e-3)
        return read_launch(run.launch(folder / f"again-{number}"))

    runs = Further(again=again, perturbed=again) if further else Further()
    return judge_launches(mine, theirs, further=runs)


def failures(result: CaseResult) -> dict[str, FailedCheck]:
    return {one.check: one.failure for one in result.verdicts if one.failure is not None}


def statements(result: CaseResult, verdict: str) -> dict[str, str]:
    return {one.check: one.statement for one in result.verdicts if one.verdict == verdict}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_right_launch_agrees_under_every_layout(layout: str, tmp_path: Path) -> None:
    result = judged(tmp_path, Toy(), Toy(**LAYOUTS[layout]))
    assert statements(result, "fail") == statements(result, "unknown") == {}
    axes = {word for word in layout.split(maxsplit=1)[0].split("+") if word in ("dp", "tp", "pp")}
    assert {*result.case.axes} == axes
    decided = [counts for one in result.verdicts for counts in one.decided.values()]
    assert decided and all(known == of > 0 for known, of in decided)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_right_launch_is_accused(seed: int, dtype: torch.dtype, tmp_path: Path) -> None:
    result = judged(tmp_path, Toy(seed=seed, dtype=dtype), Toy(seed=seed, dtype=dtype, dp=2, tp=2))
    assert statements(result, "fail") == statements(result, "unknown") == {}


_TWICE: Callable[..., Any] = lambda name, own, data: torch.stack(own).sum(0)  # noqa: E731


def stale() -> Callable[..., Any]:
    """Gradients averaged, to which those of the step before are added."""
    before: dict[str, Any] = {}

    def average(name: str, own: Any, data: int) -> Any:
        mean = torch.stack(own).mean(0)
        found = mean + before[name] if name in before else mean
        before[name] = mean
        return found

    return average


def first_block_twice(values: Mapping[str, Any], data: int) -> dict[str, Any]:
    return {name: values[name.replace("layers.1", "layers.0")] for name in values}


EDITS: Mapping[str, tuple[Mapping[str, Any], tuple[str, str, str], str]] = {
    "a block in the place of another": (
        {"dp": 2, "edits": {"start": first_block_twice}},
        ("forward", "layers.1.norm", "init/layers.1.norm.weight"),
        "begins at two places: rank 0 has it as layers.1.",
    ),
    "a block on the stage of another": (
        {"pp": 2, "edits": {"start": first_block_twice}},
        ("forward", "layers.1.norm", "init/layers.1.norm.weight"),
        "begins at two places: rank 1 has it as layers.0.",
    ),
    "a seed by rank": (
        {"dp": 2, "edits": {"start": lambda values, data: initial_values(data)}},
        ("forward", "tokens", "init/tokens.weight"),
        "on rank 1 alone, as where every rank has a seed of its own",
    ),
    "a sampler's seed by rank": (
        {"dp": 2, "edits": {"samples": lambda rows, step, data: [(row * (1 + data) + data) % 4 for row in rows]}},
        ("data", "", "sample/0"),
        "step 0: 1 of launch A's 4 samples is read by no rank",
    ),
    "the same batch on all data ranks": (
        {"dp": 2, "edits": {"samples": lambda rows, step, data: [0, 1]}},
        ("data", "", "sample/0"),
        "ranks 0 1 read the same batch, as if they were one data rank",
    ),
    "the samples of another step": (
        {"edits": {"samples": lambda rows, step, data: rows if step == 0 else [0, 0, 1, 2]}},
        ("data", "", "sample/1"),
        "step 1: 1 of launch A's 4 samples is read by no rank",
    ),
    "gradients that are not averaged": (
        {"dp": 2, "edits": {"grad": lambda name, own, data: own[data]}},
        ("grad_sync", "head", "grad/head.weight"),
        "the mean over the ranks of dp=2 is the truth",
    ),
    "gradients added up, not averaged": (
        {"dp": 2, "edits": {"grad": _TWICE}},
        ("grad_sync", "head", "grad/head.weight"),
        "all are 2 x the truth; 2 is the size of dp",
    ),
    "a loss over all ranks' tokens that is averaged again": (
        {"dp": 2, "edits": {"loss": lambda loss, data, counted: loss / 2}},
        ("loss", "", "loss/0"),
        "it and all wrong gradients are 0.5 x the truth; 0.5 is 1 / the size of dp",
    ),
    "a norm of one rank's parts": (
        {"tp": 2, "edits": {"norm": lambda norm: norm / 2**0.5}},
        ("grad_sync", "", "grad_norm/0"),
        "it counts 1 of 2 ranks of tp in everything",
    ),
    "no clip": (
        {"tp": 2, "edits": {"clip": lambda name, grad, scale: grad}},
        ("step", "", "exp_avg_sq_after/0/head.weight"),
        "the gradients of step 0 are",
    ),
    "a replicated gradient that is not summed": (
        {"tp": 2, "edits": {"grad": lambda name, own, data: own[0] / 2 if "norm" in name else own[0]}},
        ("grad_sync", "layers.1.norm", "grad/layers.1.norm.weight"),
        "all are 0.5 x the truth; 0.5 is 1 / the size of tp",
    ),
    "gradients of the step before": (
        {"tp": 2, "edits": {"grad": stale()}},
        ("grad_sync", "head", "grad/head.weight"),
        "they hold the gradients of step 0 too, as where nothing sets them to zero",
    ),
    "a wrong output": (
        {"tp": 2, "edits": {"output": lambda name, x: x * 1.5 if name == "layers.1.w2" else x}},
        ("forward", "layers.1.w2", "loss/0"),
        "it is 1.5 x the truth",
    ),
    "a parameter that stays": (
        {"tp": 2, "edits": {"after": lambda name, new, old: old if name == "layers.1.w2.weight" else new}},
        ("step", "", "param_after/0/layers.1.w2.weight"),
        "as before the first step",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_mistake_is_found_where_it_was_made(edit: str, tmp_path: Path) -> None:
    words, (phase, region, name), cause = EDITS[edit]
    result = judged(tmp_path, Toy(), Toy(**words))
    found = failures(result)
    assert found, statements(result, "unknown")
    for failure in found.values():
        first = failure.first
        assert first.step == (1 if "before" in edit or "another step" in edit else 0)
        assert (first.phase, first.region if region else "", first.name) == (phase, region, name)
        assert cause in "; ".join(one.fact.text for one in failure.causes)


DEAD: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "no parameter moves": ({"after": lambda name, new, old: old}, "no parameter moves in 2 steps"),
    "gradients are zero": ({"grad": lambda name, own, data: own[0] * 0}, "every gradient is zero throughout in step 0"),
    "the loss is nothing": ({"loss": lambda loss, data, counted: loss * 0}, "its loss is 0 in step 0 on every rank"),
    "the loss is no number": ({"loss": lambda loss, data, counted: loss / 0}, "its loss is no number in step 0"),
}


@pytest.mark.parametrize("what", DEAD)
def test_launches_that_are_dead_alike_do_not_pass(what: str, tmp_path: Path) -> None:
    edits, words = DEAD[what]
    result = judged(tmp_path, Toy(edits=edits), Toy(edits=edits, dp=2))
    assert words in statements(result, "fail")["alive"]


def test_data_ranks_that_train_on_one_batch_are_named_and_ranks_of_another_axis_are_not(tmp_path: Path) -> None:
    x, w = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.ones(3)

    def launch(name: str, axes: list[tuple[str, int, int]], outputs: list[float]) -> Launch:
        for number, (axis, output) in enumerate(zip(axes, outputs, strict=True)):
            rank = Rank(number)
            rank.add("param", 0, "w", w, stated_by="ddp" if axis[1] > 1 else "", axes=(axis,))
            for kind, tensor in (("grad", w), ("param_after", w * 2)):
                rank.add(kind, 0, "w", tensor)
            rank.add("sample", 0, "args/0", x)
            rank.add("output", 0, "layer", x * output)
            rank.add("loss", 0, "", torch.tensor(0.5))
            rank.write(tmp_path / name, len(axes))
        return read_launch(tmp_path / name)

    for folder in ("one", "data", "sequence", "tensor"):
        (tmp_path / folder).mkdir()
    one = launch("one", [("ddp", 1, 0)], [0.5])
    dead = check_alive(one, launch("data", [("ddp", 2, 0), ("ddp", 2, 1)], [0.5, 0.5]))
    assert dead.verdict == "fail" and "ranks 0 1 share a data axis (ddp)" in dead.message
    parts = launch("sequence", [("ddp", 2, 0), ("ddp", 2, 1)], [0.25, 0.75])
    assert check_alive(one, parts).verdict == "pass", "each has a part of the sequence"
    peers = launch("tensor", [("ddp", 2, 0), ("ddp", 2, 0)], [0.5, 0.5])
    assert check_alive(one, peers).verdict == "pass", "of one place in two groups"


def test_what_forward_draws_makes_numbers_undecided(tmp_path: Path) -> None:
    drawn = {"output": lambda name, x: x * 1.1 if name == "layers.0" else x}
    drops = {"drawn": ["layers.0"]}
    result = judged(tmp_path / "both", Toy(about=drops), Toy(edits=drawn, about=drops))
    assert statements(result, "fail") == {}
    assert "numbers are drawn in layers.0" in statements(result, "unknown")["forward"]
    failure = failures(judged(tmp_path / "second", Toy(), Toy(edits=drawn, about=drops)))["forward"]
    assert failure.first.region == "layers.0"
    assert [cause.fact.text for cause in failure.causes] == [
        "random numbers are drawn in layers.0 on rank 0 of launch B, and nowhere in launch A"
    ]


def test_a_buffer_of_other_values_is_the_cause_of_a_wrong_forward(tmp_path: Path) -> None:
    scale = torch.ones(WIDTH)
    wrong: dict[str, Edit] = {
        "buffers": lambda data: {"scale": scale * (1 + data)},
        "output": lambda name, x: x + x.square() if name == "tokens" else x,
    }
    first, second = Toy(edits={"buffers": lambda _: {"scale": scale}}), Toy(dp=2, edits=wrong)
    causes = failures(judged(tmp_path, first, second))["forward"].causes
    assert [cause.fact.text for cause in causes] == [
        "the buffer scale begins with other values than in launch A on rank 1"
    ]


def test_a_launch_that_does_not_repeat_itself_accuses_nobody(tmp_path: Path) -> None:
    calls = iter(range(5, 100))
    first = Toy(edits={"start": lambda values, data: initial_values(next(calls))})
    result = judged(tmp_path, first, Toy())
    assert statements(result, "fail") == {}
    assert "two runs of launch A differ in init/tokens.weight" in statements(result, "unknown")["determinism"]


def test_rounding_is_not_told_from_errors_without_a_perturbed_run(tmp_path: Path) -> None:
    slight = {"loss": lambda loss, data, counted: loss * (1 + 1e-5)}
    first, second = Toy(dtype=torch.float32), Toy(dtype=torch.float32, edits=slight)
    undecided = statements(judged(tmp_path / "without", first, second, further=False), "unknown")
    assert "no run of launch A with its rounding moved" in undecided["forward"]
    assert "forward" in statements(judged(tmp_path / "with", first, second), "fail")


def test_adam_makes_a_whole_step_of_rounding_which_no_run_has_to_show(tmp_path: Path) -> None:
    def tiny(share: float) -> Callable[..., Tensor]:
        def mean(name: str, own: list[Tensor], data: int) -> Tensor:
            found = torch.stack(own).mean(0)
            if name == "head.weight":
                found[0, 0] = share * found.abs().max()
            return found

        return mean

    first = Toy(dtype=torch.float32, steps=1, edits={"grad": tiny(1e-7)})
    right = replace(first, edits={"grad": tiny(-1e-7)})
    result = judged(tmp_path / "right", first, right, further=False)
    assert statements(result, "fail") == {} and "no run of launch A" in statements(result, "unknown")["update"]
    wrong = replace(right, edits={**right.edits, "after": lambda name, new, old: old + 1.01 * (new - old)})
    assert "update" in statements(judged(tmp_path / "wrong", first, wrong, further=False), "fail")


def test_a_loss_that_ranks_share_out_is_added_up_where_gradients_are_right(tmp_path: Path) -> None:
    shares: Mapping[str, Any] = {"loss": lambda loss, data, counted: loss / 2, "grad": _TWICE}
    result = judged(tmp_path, Toy(), Toy(dp=2, edits=shares))
    assert statements(result, "fail") == statements(result, "unknown") == {}
    assert "the sum over data ranks" in statements(result, "pass")["partners"]


def test_a_parameter_without_a_partner_is_named(tmp_path: Path) -> None:
    first, second = (read_launch(Toy(pp=pp).launch(tmp_path / str(pp))) for pp in (1, 2))
    lacking = type(second)(ranks=second.ranks[:1], folder=second.folder)
    unknown = statements(judge_launches(first, lacking), "unknown")
    assert "layers.1.norm.weight" in unknown["partners"] and "rank 1 of launch B recorded" in unknown["partners"]


def test_a_launch_without_a_whole_step_is_unknown(tmp_path: Path) -> None:
    dead = {"after": lambda name, new, old: old}
    for number, edits in enumerate(({}, dead)):
        result = judged(tmp_path / str(number), Toy(edits=edits), Toy(about={"steps": []}))
        assert "no step was recorded whole" in statements(result, "unknown")["samples"]
        assert result.verdict == ("fail" if edits else "unknown")


def test_what_a_recorder_says_of_its_work_is_told(tmp_path: Path) -> None:
    about = {"narrow": {"rope": "float32"}, "same_init": {"head.weight": "no layout"}, "failed": "Trace\nOSError: full"}
    result = judged(tmp_path, Toy(), Toy(about=about))
    assert "the recorder of rank 0 of launch B failed: OSError: full" in statements(result, "unknown")["partners"]
    notes = [note.reason for one in result.verdicts for note in one.notes]
    assert "below float64: rope (float32)" in notes
    assert "without launch A's initial values: head.weight (no layout)" in notes


def test_weights_that_a_parameter_did_not_get_are_unknown_and_no_failure(tmp_path: Path) -> None:
    about = {"same_init": {"head.weight": "no one cut of (13, 8) gives (13, 4)"}}
    result = judged(tmp_path, Toy(), Toy(dp=2, seed=3, about=about))
    assert result.verdict == "unknown"
    assert "head.weight did not get launch A's initial value" in statements(result, "unknown")["forward"]


def test_a_stage_that_got_the_first_layer_of_its_number_is_unknown_and_no_failure(tmp_path: Path) -> None:
    fed: list[Mapping[str, Any]] = [{"fed_by": -1}, {"fed_by": 0}]
    toy = Toy(pp=2, edits={"start": first_block_twice})
    launch = read_launch(toy.launch(tmp_path / "b"))
    first = read_launch(Toy().launch(tmp_path / "a"))
    assert judge_launches(first, _with_about(launch, fed)).verdict == "fail", "it drew the same numbers twice"
    given = [{**about, "options": {"same_init": True}} for about in fed]
    result = judge_launches(first, _with_about(launch, given))
    assert statements(result, "fail") == {}
    told = statements(result, "unknown")["forward"]
    assert "its stage numbers its layers by itself, and it is layers.1.w1.weight of launch A" in told


def _with_about(launch: Launch, about: Sequence[Mapping[str, Any]]) -> Launch:
    ranks = (replace(rank, about={**rank.about, **own}) for rank, own in zip(launch.ranks, about, strict=True))
    return replace(launch, ranks=tuple(ranks))


@pytest.mark.parametrize(
    "edits",
    [
        {"loss": lambda loss, data, counted: loss * 2 * counted / 14},
        {"loss": lambda loss, data, counted: loss * counted / 14, "grad": _TWICE},
        {"grad": lambda name, own, data: (8 * own[0] + 6 * own[1]) / 14},
    ],
    ids=["the mean of sums over a global count", "the sum of them", "gradients weighted by targets"],
)
def test_losses_over_the_targets_of_a_step_are_right_however_they_are_written(
    edits: Mapping[str, Any], tmp_path: Path
) -> None:
    result = judged(tmp_path, Toy(masked=True), Toy(masked=True, dp=2, edits=edits))
    assert statements(result, "fail") == statements(result, "unknown") == {}


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ({"dp": 2}, "every data rank divides by the tokens that it counted itself, not by those of all data ranks"),
        ({"micro": 2}, "every micro-batch is divided by its own tokens, not by those of the step"),
    ],
)
def test_a_mean_of_means_over_other_targets_fails_with_its_denominator(
    layout: Mapping[str, Any], told: str, tmp_path: Path
) -> None:
    failed = failures(judged(tmp_path, Toy(masked=True), Toy(masked=True, **layout)))
    assert {"forward", "parameter_gradients", "update"} <= {*failed}
    for failure in failed.values():
        assert (failure.first.phase, failure.first.name) == ("loss", "loss/0")
        assert [cause.fact.text for cause in failure.causes] == [told]


def test_unlike_losses_are_unknown_where_samples_are_not_recorded(tmp_path: Path) -> None:
    mine, theirs = (read_launch(toy.launch(tmp_path / name)) for name, toy in (("a", Toy()), ("b", Toy(dp=2))))
    for budget, why in (("too small", "left out by the budget; legal: a larger --budget"), ("", "receive nothing")):
        kept = [
            replace(
                rank,
                rows=tuple(
                    replace(row, key="", left_out=budget) if row.kind == "sample" else row
                    for row in rank.rows
                    if budget or row.kind != "sample"
                ),
            )
            for rank in theirs.ranks
        ]
        result = judge_launches(mine, Launch(ranks=tuple(kept), folder=theirs.folder))
        unknown = statements(result, "unknown")
        assert statements(result, "fail") == {} and why in unknown["samples"]
        assert "which samples each rank has read is not known" in unknown["replicas"]


def test_weights_that_are_no_numbers_on_both_sides_are_dead(tmp_path: Path) -> None:
    broken = Toy(edits={"grad": lambda name, own, data: own[0] * (math.nan if name == "layers.1.w2.weight" else 1)})
    found = check_alive(*(read_launch(broken.launch(tmp_path / name)) for name in "ab"))
    assert found.verdict == "fail"
    assert "its gradient of layers.1.w2.weight is no number in step 0" in "".join(fact.text for fact in found.facts)
