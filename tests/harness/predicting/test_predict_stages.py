"""Predictions of pipelines and experts: bytes are the recorded run's or by hand, memory that of every stage run whole.

With skew=1/4 the first 32 of 128 tokens all go to experts 0 and 1, which rank 0 of a stage holds.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.errors import NotComputed, RequestError
from shardproof.harness.predicting.dry_run import dry_run
from shardproof.harness.predicting.figures import EQUAL, Traffic
from shardproof.harness.predicting.forecast import forecast_case
from shardproof.parallel.communication.expectation import CompleteTerm
from shardproof.parallel.communication.schedules import Program
from shardproof.parallel.pipeline import CasePipeline
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import shapes
from shardproof.reports.commands.cli import main
from shardproof.reports.predicting.loads import load_tables
from shardproof.reports.predicting.prediction import LOADS, parse_candidates, predict_text
from shardproof.suites.session.prover import Prover
from tests.deep import deep
from tests.harness.toy_subjects import Changed

SIZES = "heads=6 kv_heads=3 hidden=24 ffn=42 vocab=389 seq=18 batch=2 steps=1"
CASES = (
    "mode=tp tp=1 dp=2 pp=4 layers=5 first_layers=2 micro=6 bucket=300 overlap=true",
    "mode=isp tp=1 dp=2 wp=2 pp=3 layers=4 first_layers=1 last_layers=1 micro=2 tied=false optimizer=adamw",
    "mode=tp-sp tp=3 pp=3 layers=4 first_layers=1 last_layers=1 micro=2 tied=false optimizer=adamw",
    "mode=tp tp=1 dp=2 pp=2 layers=8 micro=4 schedule=interleaved chunks=2 zero=1",
    "mode=tp-sp tp=3 cp=3 pp=2 layers=3 last_layers=2 micro=3 schedule=gpipe recompute=full",
)


def stage_ranks(case: Case) -> tuple[int, ...]:
    return next(ranks for ranks in case.axes["pp"] if 0 in ranks)


@pytest.mark.parametrize("words", [*CASES[:2], *deep("six CPU seconds each", *CASES[2:])])
def test_bytes_are_those_of_the_recorded_run_and_memory_of_every_stage_run_whole(
    prover: Prover, words: str, dry: DryEngine
) -> None:
    """Forecast from one rank of each kind of stage and few micro-batches; run whole, every stage in its own order."""
    case = Case.parse(f"{SIZES} {words}")
    events = prover.proof(case, subject).events
    stages = forecast_case(case, subject, dry).stages
    run = dry_run(case, subject, dry, stage_ranks(case), text="")
    assert [stage.ledger for stage in stages] == [EQUAL] * case.pp
    for stage, itself in zip(stages, run, strict=True):
        own = [event for event in events if event.rank == itself.rank]
        sent = [event for event in own if (event.phase, event.op) == ("pipeline", "send")]
        assert stage.traffic == Traffic(
            calls=len(own),
            payload_bytes=sum(event.payload_bytes for event in own),
            wire_bytes=sum(event.wire_bytes for event in own),
            messages=len(sent),
            message_bytes=sum(event.payload_bytes for event in sent),
        )
        memory = stage.memory
        assert (memory.parameters, memory.gradients) == (itself.parameter_bytes, itself.gradient_bytes)
        assert (memory.trained, memory.optimizer) == (itself.trained, itself.optimizer_bytes)
        later = memory.optimizer  # what AdamW keeps is there in all of the second step, and in the end of the first
        assert 0.97 * itself.peak_bytes <= memory.peak <= 1.03 * itself.peak_bytes + later
        assert memory.saved == pytest.approx(itself.saved_bytes, rel=0.25)
    live = {"gpipe": [case.micro] * case.pp, "interleaved": [5, 3]}  # at most min(2(pp-1-r) + (v-1)pp + 1, mv)
    straight = [min(case.pp - index, case.micro) for index in range(case.pp)]
    assert [stage.live for stage in stages] == live.get(case.schedule, straight)


class _Longer(CasePipeline):
    @property
    def programs(self) -> tuple[Program, ...]:
        return CasePipeline(case=self.case.but(micro=self.case.micro + 1)).programs


def _halved(case: Case) -> Iterator[CompleteTerm]:
    """The closed form, of which the second stage's messages are too small."""
    for term in subject.expected(case):
        wrong = term.phase == "pipeline" and term.op == "send" and term.at["pp"] == 1
        yield replace(term, payload_bytes=term.payload_bytes // 2) if wrong else term


def test_a_wrong_stages_bytes_are_found_at_that_stage(dry: DryEngine) -> None:
    case = Case.parse(f"{SIZES} {CASES[1]}")
    one = forecast_case(case, Changed(subject, expected=_halved), dry)
    found = [stage.index for stage in one.stages if stage.ledger != EQUAL]
    assert found == [1] and one.ledger.startswith("differs: ") and "over pp" in one.ledger


def test_a_rank_that_does_not_follow_its_program_is_named(dry: DryEngine) -> None:
    case = Case.parse(f"{SIZES} mode=tp tp=1 pp=2 micro=3")
    with pytest.raises(NotComputed, match="issued 6 messages between stages .* program has 8 and 8"):
        forecast_case(case, Changed(subject, pipeline=lambda case: _Longer(case=case)), dry)


def test_a_subject_that_says_nothing_of_its_stages_is_refused(dry: DryEngine) -> None:
    def silent(case: Case, device: torch.device) -> Any:
        return subject(case, device)

    with pytest.raises(RequestError, match="pp=2: .* attribute pipeline, .*; legal: pp=1"):
        forecast_case(Case.parse("pp=2 micro=3"), silent, dry)


def test_the_command_shows_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", f"{SIZES} {CASES[1]}"]) == 0
    assert "Memory and messages of every stage" in capsys.readouterr().out


KINDS = "mode=tp tp=1 pp=3 layers=7 first_layers=1 last_layers=2 dense_layers=1 positions=rope"
EXPERTS = f"{KINDS} dp=8 ep=4 experts=8 micro=4 seq=32 batch=2 hidden=64 zero=1"


def test_bytes_by_stage_and_call_and_memory_follow_the_load(dry: DryEngine) -> None:
    """Four ranks exchange; of the 64 tokens of the even ones 32 are loaded, with skew=1 all of all ranks."""
    one = predict_text(EXPERTS, subject, 80.0, dry)
    memory, calls = load_tables(one.loads, one.calls)
    assert (memory.title, calls.title) == ("Memory of every stage by load", "Bytes of every stage and call")
    assert "peak equal skew=0.25" in memory.headers and "equal skew=1.0" in calls.headers
    assert list(one.rows["ledger"]) == [EQUAL] * 3
    received = dict(zip(LOADS, (64 * 2, 2 * 32 * 2 + (2 * 32 + 2 * 64) * 2 // 4, 4 * 64 * 2), strict=True))
    sent = {
        (row["load"], row["phase"]): (row["calls"], row["payload_bytes"])
        for row in one.calls.to_dict("records")
        if (row["stages"], row["module"], row["op"]) == ("1", "layers.*.mlp", "all_to_all")
    }
    for load, rows in received.items():
        for phase, weights in (("forward", 64 * 2), ("backward", rows)):
            assert sent[load, phase] == (4 * 4 * 3, 4 * 4 * 2 * (64 * 2 * 64 + weights + rows * 64)), (load, phase)
    loads = one.loads.to_dict("records")
    saved = {row["load"]: row["saved_bytes"] for row in loads if row["stage"] == 1}
    equal, some, all_ = (saved[load] for load in LOADS)
    few, more, most = (received[load] for load in LOADS)
    assert some > equal and (all_ - equal) / (most - few) == pytest.approx((some - equal) / (more - few))
    alike = {(row["stage"], row["load"]): row["parameters_bytes"] for row in loads}
    assert all(alike[stage, load] == alike[stage, LOADS[0]] for stage, load in alike)
    whole = Case.parse(f"{EXPERTS} routing=equal")
    layer = {name: math.prod(shape) for name, shape in shapes(whole).items() if name.startswith("layers.2.")}
    experts = sum(count for name, count in layer.items() if ".experts." in name)
    assert alike[1, LOADS[0]] == 4 * 2 * (sum(layer.values()) - experts * 3 // 4)


def test_a_load_that_is_said_is_the_only_one(dry: DryEngine) -> None:
    one = predict_text("mode=tp tp=1 dp=2 ep=2 experts=4 routing=skewed steps=1", subject, 80.0, dry)
    assert list(one.rows["ledger"]) == [EQUAL]
    assert {*one.calls["load"]} == {"routing=skewed"} and one.loads.empty
    assert predict_text("mode=tp tp=2", subject, 80.0, dry).calls.empty, "no experts"


def test_choices_that_cannot_be_counted_are_refused() -> None:
    words = "preset=deepseek-v3 mode=tp tp=1 dp=64 ep=64"
    assert [one.case is not None for one in parse_candidates(words, subject)] == [True] * 3
    with pytest.raises(RequestError, match=r"routing=skewed: .* 8e\+09 choices are too many; legal: routing=equal"):
        parse_candidates(f"{words} routing=skewed", subject)


def test_stages_with_other_kinds_of_layers_are_other_stages() -> None:
    """Two layers each: dense ones, one of each kind, experts, experts and the head."""
    case = Case.parse("mode=tp tp=1 pp=5 layers=10 dense_layers=3 experts=4 routing=equal micro=5 positions=rope")
    assert CasePipeline(case=case).alike == (0, 1, 2, 2, 4)


@pytest.mark.deep("ten CPU seconds")
def test_deep_stages_are_no_line_where_a_short_one_would_have_other_kinds_of_layers(dry: DryEngine) -> None:
    """The second of two stages has one dense layer and 15 with experts; with six layers each it would have none."""
    words = "mode=tp tp=1 dp=2 ep=2 pp=2 layers=18 first_layers=2 dense_layers=3 experts=4 routing=equal micro=2"
    case = Case.parse(f"{words} positions=rope hidden=16 heads=2 kv_heads=2 ffn=24 expert_ffn=8 vocab=16 seq=8")
    stages = forecast_case(case, subject, dry).stages
    itself = dry_run(case.but(steps=1), subject, dry, (0, 2), text="")
    assert [stage.memory.parameters for stage in stages] == [rank.parameter_bytes for rank in itself]


def test_a_deep_model_with_dense_layers_is_a_line_behind_them(dry: DryEngine) -> None:
    """Three first layers have no experts; what is held is exactly that of the whole model."""
    words = "layers=16 recompute=full recompute_layers=2"
    case = Case.parse(f"mode=tp tp=1 dp=2 ep=2 dense_layers=3 experts=4 routing=equal positions=rope micro=1 {words}")
    made = forecast_case(case, subject, dry)
    (itself,) = dry_run(case.but(steps=1), subject, dry, (0,), text="")
    assert made.depths and made.depths[1] < case.layers and made.ledger == EQUAL
    assert made.memory.parameters == itself.parameter_bytes
