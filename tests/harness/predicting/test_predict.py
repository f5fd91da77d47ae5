"""Predictions: depths that lie on a line, candidates and their memory, what the command says.

Nothing depends on the number of ranks: what is run is one rank of each kind. A case that no machine can hold is refused
before anything of it is allocated, and large ones still run on shapes.
"""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from shardproof import prove
from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.plain_case import Vocabulary
from shardproof.harness.predicting.dry_run import dry_run
from shardproof.harness.predicting.figures import EQUAL, mixed_adamw
from shardproof.harness.predicting.forecast import forecast_case
from shardproof.harness.protocols import CaseLike
from shardproof.harness.running.ranks.capacity import admit
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import shapes
from shardproof.reference.training.size import sizes_by_part, word_of_size
from shardproof.reports.commands.cli import main
from shardproof.reports.predicting.prediction import parse_candidates, predict_text
from tests.deep import deep
from tests.harness import own_words
from tests.harness.command_line import CommandLine
from tests.harness.proofs import ran

MODES = ("tp", "tp-sp", "mtp", "msp", "fsp", "isp", "autotp")
TINY = "family=llama hidden=32 heads=4 kv_heads=2 ffn=32 vocab=64 seq=8 dtype=bfloat16"


@pytest.mark.parametrize(
    "words",
    [
        "mode=autotp tp=2 layers=2 micro=5",  # computes before the first call of a micro-batch
        "mode=tp dp=2 zero=3 no_sync=true overlap=true layers=6 micro=5",  # gradients are summed in the last one
        "mode=tp tp=2 dp=2 zero=1 layers=2 micro=1",
        *deep(
            "two CPU seconds each",
            "mode=isp tp=2 dp=3 layers=6 micro=2 optimizer=adamw recompute=full",
            "mode=tp tp=2 dp=2 bucket=5000 overlap=true layers=2 micro=4",
            "mode=tp tp=2 dp=2 wgrad=deferred layers=6 micro=4",  # what follows the last one grows with each
        ),
    ],
)
def test_a_forecast_from_three_micro_batches_and_two_depths_is_the_whole_step(words: str, dry: DryEngine) -> None:
    case = Case.parse(f"{TINY} {words}")
    one = forecast_case(case, subject, dry)
    (itself,) = dry_run(case.but(steps=1), subject, dry, (0,), text="")
    assert (one.ledger, one.depths) == (EQUAL, (3, 5) if case.layers > 5 else ())
    assert one.memory.peak == pytest.approx(itself.peak_bytes + itself.optimizer_bytes, abs=64)  # scalars of the loop


def test_a_program_that_shows_no_backward_is_measured_whole(dry: DryEngine) -> None:
    def forwards(case: CaseLike, device: torch.device) -> dict[str, torch.Tensor]:
        weight = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
        for _ in range(case.micro):
            dist.all_reduce(weight @ weight)
        return {}

    one = forecast_case(Case.parse(f"{TINY} mode=tp tp=2 layers=1 micro=7"), forwards, dry)
    assert one.memory.peak >= 2 * 8**2 * 2 and not one.stages  # a weight and a product of two bytes an element


def layer_by_layer(case: CaseLike, device: torch.device) -> dict[str, torch.Tensor]:
    """A backward for every layer: as many as micro-batches in a model of three layers, more in one of five."""
    weight = torch.ones(8, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
    for _ in range(int(getattr(case, "layers", 0))):
        (weight @ weight).sum().backward()
    return {}


def test_a_program_of_other_backwards_at_another_depth_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    subject = ("--subject", "tests.harness.predicting.test_predict:layer_by_layer")
    assert main(["predict", f"{TINY} mode=tp tp=1 layers=9 micro=3", *subject]) == 2
    assert "its forwards and backwards are others in a deeper model" in capsys.readouterr().err


def test_memory_is_never_less_than_that_of_the_run_itself(dry: DryEngine) -> None:
    case = Case.parse(f"{TINY} mode=tp-sp tp=2 dp=3 layers=6 micro=2 steps=2 optimizer=adamw")
    memory = forecast_case(case, subject, dry).memory
    (itself,) = dry_run(case, subject, dry, (0,), text="")
    assert memory.parameters == pytest.approx(itself.parameter_bytes)
    assert memory.gradients == pytest.approx(itself.gradient_bytes)
    assert memory.optimizer == pytest.approx(itself.optimizer_bytes)
    assert memory.saved == pytest.approx(itself.saved_bytes)
    told = 32 * (case.steps - 1)  # scalars of the steps before: loss, norm and token count, and of what they were made
    assert itself.peak_bytes <= memory.peak + told
    assert memory.peak <= itself.peak_bytes + itself.optimizer_bytes


def test_a_text_without_a_mode_stands_for_all_of_them() -> None:
    found = parse_candidates("preset=internlm2-7b tp=16", subject)
    assert [candidate.words for candidate in found] == [f"mode={mode}" for mode in MODES]
    legal = [candidate.case.mode for candidate in found if candidate.case]
    assert legal == ["isp"], "16 ranks cannot share 8 kv heads elsewhere"
    assert "kv_heads=8: must be a multiple of tp=16 in mode=tp; legal: kv_heads=16" in found[0].reason
    assert parse_candidates("mode=all tp=4 kv_heads=4", subject)[0].text == "tp=4 kv_heads=4 dtype=bfloat16 mode=tp"
    assert [c.words for c in parse_candidates("preset=internlm2-7b tp=2", subject) if c.case] == [
        f"mode={m}" for m in MODES
    ]
    with pytest.raises(RequestError, match="kv_heads=2: must be a multiple of tp=8 in mode=tp"):
        parse_candidates("mode=tp tp=8", subject)


def test_what_needs_least_is_told_and_whether_it_fits(dry: DryEngine) -> None:
    """The room is exactly that of the third case."""
    text = f"{TINY} tp=2 layers=2"
    peaks = predict_text(text, subject, 80.0, dry).rows["peak_bytes"]
    assert peaks.is_monotonic_increasing and peaks[2] < peaks[3]
    told = predict_text(text, subject, peaks[2] / 2**30, dry)
    assert list(told.rows["fits"]) == ["yes"] * 3 + ["no"] * 4
    assert told.answer.startswith("3 of 7 fit in ")
    assert f" GiB: {told.rows.iloc[0]['words']} needs least, " in told.answer
    assert set(told.rows["ledger"]) == {EQUAL}
    none = predict_text(f"{text} mode=tp", subject, 1e-05, dry)
    assert none.answer.startswith(f"does not fit in 1e-05 GiB: {text} mode=tp needs ")


def test_several_cases_are_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The table says of which step it is, and what FSDP is called."""
    texts = [f"{TINY} mode={mode} layers=1 tp={tp} dp=3 batch=3 micro=5" for mode in ("fsp", "tp") for tp in (2, 1)]
    assert main(["predict", *texts]) == 0
    told = capsys.readouterr().out
    assert f"a step: seq=8 batch=3 micro=5 on every data rank, {8 * 3 * 5 * 3} tokens on all" in told
    assert "FSDP (ZeRO-3, FSDP2) is zero=3" in told
    assert told.count("needs GiB") == told.count("Memory of a rank") == told.count("4 of 4 fit in 80 GiB") == 1
    table = told[told.index("needs GiB") :].split("\n\n", maxsplit=1)[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith(("tp=", "mode="))]
    assert main(["predict", *texts, "--json"]) == 0
    peaks = [one["candidates"][0]["peak_bytes"] / 2**30 for one in json.loads(capsys.readouterr().out)]
    assert [float(line.split("yes")[1].split()[1]) for line in rows] == pytest.approx(sorted(peaks), rel=0.01)


def test_without_words_parameters_are_bfloat16_and_adamw_trains_in_mixed_precision(dry: DryEngine) -> None:
    """By hand: hidden 32, 2 of 4 query and 1 of 2 kv heads, half of ffn and vocabulary, norms whole; 18 bytes each.

    With 2 bytes of gradients and none of an optimizer the same program needs 2 + 12 bytes a parameter less.
    """
    words = "family=llama hidden=32 heads=4 kv_heads=2 ffn=32 vocab=64 seq=8 mode=tp-sp tp=2 layers=2 micro=1"
    trained = 2 * (32 * 16 + 2 * 32 * 8 + 16 * 32 + 3 * 32 * 16 + 2 * 32) + 32 + 2 * 32 * 32
    usual = predict_text(words, subject, 80.0, dry)
    said = predict_text(f"{words} dtype=bfloat16 optimizer=sgd micro=2", subject, 80.0, dry)
    (row,), (plain,) = usual.rows.to_dict("records"), said.rows.to_dict("records")
    kept = [row[f"{name}_bytes"] for name in ("parameters", "gradients", "optimizer")]
    assert kept == [2 * trained, 4 * trained, 12 * trained] and sum(kept) == 18 * trained
    assert [plain[f"{name}_bytes"] for name in ("parameters", "gradients", "optimizer")] == [2 * trained] * 2 + [0]
    assert row["peak_bytes"] - plain["peak_bytes"] == (2 + 12) * trained
    assert (row["ledger"], plain["ledger"]) == (EQUAL, EQUAL)
    assert "18 bytes a parameter (parameter 2, gradient 4, master 4, moments 8)" in usual.states and not said.states


@pytest.mark.parametrize(("dtype", "together"), [("float16", 18), ("float32", 16), ("float64", 32)])
def test_the_bytes_of_a_parameter_are_megatrons(dtype: str, together: int) -> None:
    assert mixed_adamw(dtype).together == together
    with pytest.raises(ValueError, match="dtype=int8: must be a floating-point dtype; legal: bfloat16"):
        mixed_adamw("int8")


def test_a_candidate_that_cannot_be_leaves_the_numbers_of_the_others_whole(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", f"{TINY} layers=1 tp=4"]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "kv_heads=2: must be a multiple of tp=4" in told
    assert "mode=isp" in told and "equal" in told and " fit in 80 GiB" in told
    assert main([*command, "--json"]) == 0
    told = capsys.readouterr().out
    rows = json.loads(told)[0]["candidates"]
    assert {type(row["calls"]) for row in rows} == {type(row["ranks"]) for row in rows} == {int, type(None)}
    assert {row["ranks"] for row in rows} == {4, None}


def test_own_words_have_no_tokens_and_tensors_on_the_cpu_are_counted(dry: DryEngine) -> None:
    told = predict_text("tp=2 dp=3 width=7 dtype=float32", own_words.subject, 80.0, dry)
    (row,) = told.rows.to_dict("records")
    assert pd.isna(row["tokens"]) and told.answer.startswith("fits in 80 GiB: tp=2 dp=3 width=7 dtype=float32 needs ")
    weights = 4 * 2 * (24 // 2) * 7
    assert row["peak_bytes"] >= 2 * weights  # with their gradients; its optimizer is a loop by hand


def test_a_ledger_that_is_not_the_closed_form_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    subject = ("--subject", "tests.harness.threads.test_dry:_surplus")
    assert main(["predict", f"{TINY} tp=2 layers=1 mode=tp", *subject]) == 1
    assert "differs: extra event" in capsys.readouterr().out


def reads(_case: CaseLike, device: torch.device) -> dict[str, torch.Tensor]:
    if (x := torch.ones(2, device=device)).sum().item() > 2:
        dist.all_reduce(x)
    return {}


def test_a_subject_that_looks_at_numbers_cannot_be_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "mode=tp tp=2", "--subject", "tests.harness.predicting.test_predict:reads"]) == 2
    assert "cannot be run dry: rank 0 of 2 cannot go on with shapes alone" in capsys.readouterr().err


class TwoSteps(own_words.Network):
    """Takes two steps, no more and no less."""

    words: Any = {**own_words.WORDS, "steps": (2,)}


two_steps = TwoSteps()


def test_a_case_of_which_no_single_step_can_be_run_is_not_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "dp=2", "--subject", "tests.harness.predicting.test_predict:two_steps"]) == 2
    told = "cannot be predicted, which runs fewer steps, micro-batches or layers of it: steps=1: is none of its values"
    assert f"{told}; legal: 2" in capsys.readouterr().err


GIB = 2**30


@pytest.mark.parametrize(
    "words", ["micro=2000000000", "layers=999999999", "mode=isp preset=tiny-internlm2 seq=2000000000"]
)
def test_a_vast_case_is_refused_naming_its_word_and_a_legal_value(words: str, tmp_path: Path) -> None:
    key, _, value = words.rsplit(maxsplit=1)[-1].partition("=")
    legal = f"; legal: {key}={getattr(Case(), key)}, --engine dry, or shardproof predict"
    with pytest.raises(RequestError) as refused:
        ran(tmp_path, "shardproof.parallel.subject:subject", words)
    assert f": {key}={value}: dense model and data in float64 come to " in str(refused.value)
    assert str(refused.value).endswith(legal)
    assert not list(tmp_path.iterdir())


def test_the_sentence_has_the_numbers() -> None:
    case = Case.parse("vocab=1024 tied=true")
    with pytest.raises(RequestError) as refused:
        admit([case], "inproc", limit_bytes=2**20)
    # Weights: 1024 * 64 of tokens, 32 * 64 of positions, 128 of the last norm, and two blocks of 2 * 128 of norms,
    # 96 * 65 of queries, keys and values, 64 * 65, 256 * 65 and 64 * 257; four times. Attention: 2 * 2 * 8 * 32 * 32.
    # Logits: 64 * 1024. Data: 4 * 2 * 2 * 64.
    head = "case 'vocab=1024': dense model and data in float64 come to 0.00537 GiB (weights and gradients 0.00463, "
    tail = "attention 0.000244, logits 0.000488, data 7.63e-06), and this machine has 0.000977; legal: smaller sizes, "
    assert str(refused.value) == head + tail + "--engine dry, or shardproof predict"


@pytest.mark.parametrize(
    "words",
    [
        "mode=isp preset=tiny-internlm2",
        "layers=4 recompute=full recompute_layers=2",
        "pp=2 layers=4 micro=4 schedule=interleaved chunks=2 variant=two-stage-swap",
    ],
)
def test_weights_of_all_layers_are_counted_as_their_shapes_are(words: str) -> None:
    case = Case.parse(words)
    assert sizes_by_part(case)["weights and gradients"] == 4 * sum(map(math.prod, shapes(case).values()))


def test_shapes_alone_need_room_for_one_micro_batch() -> None:
    vast = [Case.parse(words) for words in ("preset=llama3-405b mode=tp-sp tp=8 dp=2048", "micro=2000000000")]
    admit(vast, "dry", limit_bytes=GIB)
    with pytest.raises(RequestError, match=r"seq=2000000000: its first micro-batch comes to 119 GiB "):
        admit([Case.parse("seq=2000000000")], "dry", limit_bytes=GIB)
    with pytest.raises(RequestError, match=r"'preset=llama3-405b': dense model .*; legal: smaller sizes, --engine dry"):
        admit([Case.parse("preset=llama3-405b")], "inproc", limit_bytes=64 * GIB)


def test_no_word_is_blamed_that_another_one_needs() -> None:
    case = Case.parse("tp=64 heads=64 kv_heads=64 hidden=1048576 ffn=1048576")
    assert word_of_size(case, GIB) is None


@pytest.mark.parametrize(
    ("words", "engine", "rule"),
    [
        ("tp=100000", "inproc", "tp=100000: comes to 100000 ranks, and engine inproc runs at most 4096 threads"),
        ("tp=2 dp=3000", "inproc", "dp=3000: comes to 6000 ranks, .*; legal: at most dp=2048, or --engine"),
        ("dp=999999 tp=999999 pp=999999", "pool", r"tp=999999: comes to \d+ ranks, .* processes .*; legal: smaller "),
    ],
)
def test_every_case_has_a_bound_on_its_ranks(words: str, engine: str, rule: str) -> None:
    own = Vocabulary.of(own_words.WORDS)
    with pytest.raises(RequestError, match=rule):
        admit([own.parse("tp=2"), own.parse(words)], engine)
    admit([own.parse("tp=2 dp=3"), Case.parse("mode=tp tp=2")], engine)
    admit([own.parse(words)], "dry")


def test_too_many_ranks_are_refused_before_the_truth_is_computed(shardproof_here: CommandLine) -> None:
    with pytest.raises(RequestError, match=r"dp=5000: .* legal: at most dp=4096, or --engine dry"):
        prove("dp=5000", own_words.subject)
    shardproof_here.refused("faults", "--subject", "tests.harness.own_words:subject", "tp=2 dp=5000")
