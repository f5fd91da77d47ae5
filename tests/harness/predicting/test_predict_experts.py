"""Predictions of cases with experts: bytes and memory by load, by hand; stages that differ in the kind of their layers.

With skew=1/4 the first 32 of 128 tokens all go to experts 0 and 1, which rank 0 of a stage holds.
"""

import json
import math
from typing import Any

import pytest

from harness.engines.shapes.dry import DryEngine
from harness.errors import RequestError
from harness.predicting.clusters import PRESETS
from harness.predicting.dry_run import dry_run
from harness.predicting.figures import EQUAL
from harness.predicting.forecast import forecast
from parallel.pipeline.prediction import CasePipeline
from parallel.subject import subject
from reference.case import Case
from reference.model.parameters import shapes
from reports.commands.cli import main
from reports.predicting.planning import LOADS, candidates

CLUSTER = PRESETS["8xH100-NVLink-IB400"]
LAYERS = "mode=tp tp=1 pp=3 layers=7 first_layers=1 last_layers=2 dense_layers=1 positions=rope"
SIZES = f"{LAYERS} dp=8 ep=4 experts=8 micro=4 seq=32 batch=2 hidden=64 zero=1"


def told(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    assert main(["predict", words, "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    return dict(one)


def test_bytes_by_stage_and_call_and_memory_follow_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks exchange; of the 64 tokens of the even ones 32 are loaded, with skew=1 all of all ranks."""
    one = told(capsys, SIZES)
    assert [row["ledger"] for row in one["candidates"]] == [EQUAL] * 3
    received = dict(zip(LOADS, (64 * 2, 2 * 32 * 2 + (2 * 32 + 2 * 64) * 2 // 4, 4 * 64 * 2), strict=True))
    sent = {
        (row["load"], row["phase"]): (row["calls"], row["payload_bytes"])
        for row in one["calls"]
        if (row["stages"], row["module"], row["op"]) == ("1", "layers.*.mlp", "all_to_all")
    }
    for load, rows in received.items():
        for phase, weights in (("forward", 64 * 2), ("backward", rows)):
            assert sent[load, phase] == (4 * 4 * 3, 4 * 4 * 2 * (64 * 2 * 64 + weights + rows * 64)), (load, phase)
    saved = {row["load"]: row["saved_bytes"] for row in one["loads"] if row["stage"] == 1}
    equal, some, all_ = (saved[load] for load in LOADS)
    few, more, most = (received[load] for load in LOADS)
    assert some > equal and (all_ - equal) / (most - few) == pytest.approx((some - equal) / (more - few))
    alike = {(row["stage"], row["load"]): row["parameters_bytes"] for row in one["loads"]}
    assert all(alike[stage, load] == alike[stage, LOADS[0]] for stage, load in alike)
    whole = Case.parse(f"{SIZES} routing=equal")
    layer = {name: math.prod(shape) for name, shape in shapes(whole).items() if name.startswith("layers.2.")}
    experts = sum(count for name, count in layer.items() if ".experts." in name)
    assert alike[1, LOADS[0]] == 4 * 2 * (sum(layer.values()) - experts * 3 // 4)


def test_the_table_has_a_column_for_every_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", SIZES]) == 0
    out = capsys.readouterr().out
    assert "Memory of every stage by load" in out and "Bytes of every stage and call" in out
    assert "peak equal skew=0.25" in out and "equal skew=1.0" in out


def test_a_load_that_is_said_is_the_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    one = told(capsys, "mode=tp tp=1 dp=2 ep=2 experts=4 routing=skewed steps=1")
    assert [row["ledger"] for row in one["candidates"]] == [EQUAL]
    assert {row["load"] for row in one["calls"]} == {"routing=skewed"} and one["loads"] == []
    assert told(capsys, "mode=tp tp=2")["calls"] == [], "no experts"


def test_choices_that_cannot_be_counted_are_refused() -> None:
    words = "preset=deepseek-v3 mode=tp tp=1 dp=64 ep=64"
    assert [one.case is not None for one in candidates(words, subject)] == [True] * 3
    with pytest.raises(RequestError, match=r"routing=skewed: .* 8e\+09 choices are too many; legal: routing=equal"):
        candidates(f"{words} routing=skewed", subject)


def test_stages_with_other_kinds_of_layers_are_other_stages() -> None:
    """Two layers each: dense ones, one of each kind, experts, experts and the head."""
    case = Case.parse("mode=tp tp=1 pp=5 layers=10 dense_layers=3 experts=4 routing=equal micro=5 positions=rope")
    assert CasePipeline(case=case).alike == (0, 1, 2, 2, 4)


@pytest.mark.deep("ten CPU seconds")
def test_deep_stages_are_no_line_where_a_short_one_would_have_other_kinds_of_layers(dry: DryEngine) -> None:
    """The second of two stages has one dense layer and 15 with experts; with six layers each it would have none."""
    words = "mode=tp tp=1 dp=2 ep=2 pp=2 layers=18 first_layers=2 dense_layers=3 experts=4 routing=equal micro=2"
    case = Case.parse(f"{words} positions=rope hidden=16 heads=2 kv_heads=2 ffn=24 expert_ffn=8 vocab=16 seq=8")
    stages = forecast(case, subject, CLUSTER, dry).stages
    itself = dry_run(case.but(steps=1), subject, dry, (0, 2), text="")
    assert [stage.memory.parameters for stage in stages] == [rank.parameter_bytes for rank in itself]
    assert [stage.flops for stage in stages] == [rank.flops for rank in itself]


@pytest.mark.parametrize("words", ["layers=12", "layers=16 recompute=full recompute_layers=2"])
def test_a_deep_model_with_dense_layers_is_a_line_behind_them(words: str, dry: DryEngine) -> None:
    """Three first layers have no experts; what is held and computed is exactly that of the whole model."""
    case = Case.parse(f"mode=tp tp=1 dp=2 ep=2 dense_layers=3 experts=4 routing=equal positions=rope micro=1 {words}")
    made = forecast(case, subject, CLUSTER, dry)
    (itself,) = dry_run(case.but(steps=1), subject, dry, (0,), text="")
    assert made.depths and made.depths[1] < case.layers and made.ledger == EQUAL
    assert (made.memory.parameters, made.flops) == (itself.parameter_bytes, itself.flops)


@pytest.mark.deep("30 CPU seconds")
def test_671_billion_parameters_on_2048_ranks_in_16_uneven_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: three dense layers and the table, fourteen times four layers with experts, two with the module behind.

    A rank has 4 of 256 experts. Of 4096 tokens on each of 64 ranks a share s sends a row to each of experts 0 to 3. The
    others send 8 rows to one of 256.
    """
    words = "preset=deepseek-v3 mode=tp tp=1 dp=128 ep=64 pp=16 first_layers=3 last_layers=2 zero=1 micro=120"
    one = told(capsys, f"{words} recompute=full")
    assert [(row["ranks"], row["ledger"]) for row in one["candidates"]] == [(2048, EQUAL)] * 3
    h, expert, table = 7168, 3 * 7168 * 2048, 129280 * 7168
    attention = h * 1536 + 1536 + 1536 * 128 * 192 + h * 576 + 512 + 512 * 128 * 256 + 128 * 128 * h + 2 * h
    layer = attention + 5 * expert + 256 * h
    last = 3 * layer + 2 * h * h + 3 * h + h + 2 * table  # the module behind embeds with a copy of the table
    held = [3 * (attention + 3 * h * 18432) + table, *[4 * layer] * 14, last]
    for load in LOADS:
        stages = [row for row in one["loads"] if row["load"] == load]
        assert [row["layers"] for row in stages] == [3, *[4] * 14, 2]
        assert [row["parameters_bytes"] for row in stages] == [2 * count for count in held]
        assert [row["gradients_bytes"] for row in stages] == [4 * count for count in held]
        dense = [count - layers * 4 * expert for count, layers in zip(held, [0, *[4] * 14, 3], strict=True)]
        kept = [12 * (own / 128 + (count - own) / 2) for own, count in zip(dense, held, strict=True)]
        assert [row["optimizer_bytes"] for row in stages] == pytest.approx(kept, rel=1e-3)  # buckets are padded
    for load, share in zip(LOADS, (0, 0.25, 1), strict=True):
        rows = int(64 * 4096 * (share * 4 + (1 - share) * 8 * 4 / 256))
        (sent,) = (
            row["payload_bytes"]
            for row in one["calls"]
            if (row["load"], row["stages"], row["phase"], row["op"]) == (load, "1-14", "forward", "all_to_all")
        )
        assert sent == 120 * 4 * 2 * (4096 * 8 * (h + 1) + rows * h)
