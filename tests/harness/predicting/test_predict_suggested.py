"""Suggested layouts: legal, on the same tokens, estimated near what they are forecast to need and to take."""

from __future__ import annotations

import json

import pytest

from harness.engines.shapes.dry import DryEngine
from harness.errors import RequestError
from harness.predicting.cluster_presets import PRESETS
from harness.predicting.clusters import Cluster, Device, Link
from harness.predicting.figures import Forecast
from harness.predicting.forecast import forecast
from parallel.subject import subject
from reports.commands.cli import main
from reports.predicting.planning import Candidate
from reports.predicting.prediction import predict
from reports.predicting.suggesting import Estimate, estimates

WORDS = "family=llama hidden=512 heads=8 kv_heads=4 ffn=1536 vocab=1024 layers=8 seq=256 batch=2 dtype=bfloat16"
FAST = (Link(name="l", ranks=0, latency_us=0.01, bandwidth_gb_s=1000),)


def cluster(gib: float) -> Cluster:
    return Cluster(
        name="c", device=Device(name="d", memory_gib=gib, peak_tflops={"bfloat16": 10}), links=FAST, algorithm="ring"
    )


def suggested(words: str, world: int) -> list[Estimate]:
    with DryEngine() as engine:

        def measure(one: Candidate) -> Forecast:
            assert one.case is not None
            return forecast(one.case, subject, cluster(1.0), engine, states=one.states)

        return estimates(words, subject, cluster(1.0), world, measure)


def test_every_layout_is_legal_on_the_same_tokens_and_near_its_forecast() -> None:
    found = suggested(f"{WORDS} recompute=none tp=2", 4)
    layouts = [one.candidate.words for one in found]
    assert len(set(layouts)) == len(layouts) == 4
    assert {"mode=tp-sp tp=2 cp=1 pp=2 dp=1 zero=0 recompute=none micro=8"} <= set(layouts)
    for one in found:
        case = one.candidate.case
        assert case is not None and case.world_size == 4
        assert len(case.axes["dp"][0]) * case.micro == 8  # two micro-batches for each of four ranks
    with DryEngine() as engine:
        for one in [found[0], next(one for one in found if " pp=2 " in one.candidate.words)]:
            assert one.candidate.case is not None
            told = forecast(one.candidate.case, subject, cluster(1.0), engine, states=one.candidate.states)
            assert one.peak_bytes == pytest.approx(told.memory.peak, rel=0.25)
            assert one.tokens_per_s_per_rank == pytest.approx(told.tokens_per_s_per_rank, rel=0.25)


def test_the_answer_fits_and_needs_a_number_of_ranks() -> None:
    with DryEngine() as engine:
        told = predict(f"{WORDS} tp=2 recompute=none", subject, cluster(1.0), engine, world=4, suggest=True)
    assert len(told.rows) == 3 and told.fastest.startswith("fastest that fits into the 1 GiB of a d: mode=tp-sp tp=2 ")
    assert set(told.rows["ledger"]) == {"equal"} and set(told.rows["ranks"]) == {4}
    with DryEngine() as engine, pytest.raises(RequestError, match="suggest: needs .*; legal: --suggest --world 64"):
        predict(WORDS, subject, cluster(1.0), engine, suggest=True)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("tp=16", "kv_heads=8: must be a multiple of tp=16"),
        ("tp=0", "tp=0: must be"),
        ("micro=x", "micro=x: must be a"),
    ],
)
def test_what_no_layout_can_be_is_one_message(words: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", f"preset=llama3-8b {words}", "--suggest", "--world", "16"]) == 2
    error = capsys.readouterr().err
    assert rule in error and error.count("\n") == 1


def test_70_billion_parameters_find_a_layout_on_64_ranks(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if request.config.getoption("hypothesis_profile", None) != "deep":
        pytest.skip("20 CPU seconds: --hypothesis-profile deep")
    assert main(["predict", "preset=llama3-70b", "--world", "64", "--suggest", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    best = told["candidates"][0]
    assert (best["fits"], best["ranks"], best["ledger"]) == ("yes", 64, "equal")
    assert best["peak_bytes"] < PRESETS["8xH100-NVLink-IB400"].device.memory_gib * 2**30
