"""Tests of communication/schedules: laws of every schedule, over every small pipeline and drawn larger ones."""

import re
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given

from shardproof.parallel.communication.schedules import Kind, Pipeline, bubble_closed_form, programs
from tests import ROOT
from tests.parallel.schedules.laws import SCHEDULES, Sends, broken, bubble, check_legal, every, larger, orders, timeline


@pytest.mark.parametrize(("schedule", "sizes"), [("gpipe", (8, 20)), ("1f1b", (8, 20)), ("interleaved", (5, 11))])
def test_every_small_pipeline_keeps_all_laws(schedule: str, sizes: tuple[int, int]) -> None:
    pipelines = [*every(schedule, *sizes)]
    assert len(pipelines) > 100
    for pipeline in pipelines:
        assert not broken(pipeline, programs(pipeline)), pipeline


@given(pipeline=larger())
def test_a_larger_pipeline_keeps_all_laws(pipeline: Pipeline) -> None:
    assert not broken(pipeline, programs(pipeline))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_is_its_closed_form(schedule: str) -> None:
    """Forward and backward take any time."""
    for pipeline in every(schedule, 4, 9):
        simulated = bubble(timeline(pipeline, orders(pipeline), {Kind.F: 2, Kind.B: 5}))
        assert bubble_closed_form(pipeline) in (None, simulated), pipeline


def test_one_message_at_a_time_waits_forever_in_1f1b_but_not_in_gpipe() -> None:
    for pipeline in every("gpipe", 5, 7):
        assert not check_legal(pipeline, programs(pipeline), Sends.BLOCKING, 1)
    pipeline = Pipeline(schedule="1f1b", ranks=2, micro=2)
    assert check_legal(pipeline, programs(pipeline), Sends.BLOCKING, 1) == [
        "rank 0: waits forever in send_forward of micro-batch 1 on stage 0",
        "rank 1: waits forever in send_backward of micro-batch 0 on stage 1",
    ]


def test_the_picture_of_the_docs_is_the_timeline() -> None:
    pipeline = Pipeline(schedule="1f1b", ranks=4, micro=6)
    spans, page = timeline(pipeline, orders(pipeline)), (ROOT / "docs/splitting.md").read_text()
    for rank, own in enumerate(spans):
        (drawn,) = re.findall(rf"^rank {rank} \|(.*)$", page, re.MULTILINE)
        found = [(drawn[at : at + 2], Fraction(at // 3)) for at in range(0, len(drawn), 3) if drawn[at] in "FB"]
        assert found == [(f"{span.action.kind}{span.action.micro}", span.start) for span in own]
    assert f"\nbubble {bubble(spans)}, closed form {bubble_closed_form(pipeline)}\n" in page


def test_schedules_need_no_torch() -> None:
    code = "import sys, shardproof.parallel.communication.schedules; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
