"""Predictions of cases with experts: bytes and memory by load, by hand; stages that differ in the kind of their layers.

With skew=1/4 the first 32 of 128 tokens all go to experts 0 and 1, which rank 0 of a stage holds.
"""

import json
import math
from pathlib import Path
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


def told(folder: Path, words: str) -> dict[str, Any]:
    assert main(["predict", words, "--out", str(folder)]) == 0
    (path,) = folder.glob("*/predict.json")
    (one,) = json.loads(path.read_text())
    return dict(one)


def test_bytes_by_stage_and_call_and_memory_follow_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks exchange; of the 64 tokens of the even ones 32 are loaded, with skew=1 all of all ranks."""
    one, out = told(tmp_path, SIZES), capsys.readouterr().out
    assert "Memory of every stage by load" in out and "Bytes of every stage and call" in out
    assert "peak equal skew=0.25" in out and "equal skew=1.0" in out
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


def test_a_load_that_is_said_is_the_only_one(tmp_path: Path) -> None:
    one = told(tmp_path / "experts", "mode=tp tp=1 dp=2 ep=2 experts=4 routing=skewed steps=1")
    assert [row["ledger"] for row in one["candidates"]] == [EQUAL]
    assert {row["load"] for row in one["calls"]} == {"routing=skewed"} and one["loads"] == []
    assert told(tmp_path / "none", "mode=tp tp=2")["calls"] == [], "no experts"


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


def test_a_deep_model_with_dense_layers_is_a_line_behind_them(dry: DryEngine) -> None:
    """Three first layers have no experts; what is held and computed is exactly that of the whole model."""
    words = "layers=16 recompute=full recompute_layers=2"
    case = Case.parse(f"mode=tp tp=1 dp=2 ep=2 dense_layers=3 experts=4 routing=equal positions=rope micro=1 {words}")
    made = forecast(case, subject, CLUSTER, dry)
    (itself,) = dry_run(case.but(steps=1), subject, dry, (0,), text="")
    assert made.depths and made.depths[1] < case.layers and made.ledger == EQUAL
    assert (made.memory.parameters, made.flops) == (itself.parameter_bytes, itself.flops)
