"""Laws of every schedule, over every small pipeline and drawn larger ones."""

import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given

from shardproof.parallel.schedules.messages import programs
from shardproof.parallel.schedules.pipeline import SCHEDULES, Action, Kind, Pipeline
from shardproof.parallel.schedules.timing import bubble_stated, played
from tests import ROOT
from tests.parallel.schedules.laws import Sends, bubble, check_legal, orders, timeline
from tests.parallel.schedules.shapes import broken, every, larger


@pytest.mark.parametrize(("schedule", "sizes"), [("gpipe", (8, 20)), ("1f1b", (8, 20)), ("interleaved", (5, 11))])
def test_every_small_pipeline_keeps_all_laws(schedule: str, sizes: tuple[int, int]) -> None:
    pipelines = [*every(schedule, *sizes)]
    assert len(pipelines) > 100
    for pipeline in pipelines:
        assert not broken(pipeline, programs(pipeline)), pipeline


@given(pipeline=larger())
def test_a_larger_pipeline_keeps_all_laws(pipeline: Pipeline) -> None:
    assert not broken(pipeline, programs(pipeline))


def compute(lasts: dict[Kind, Fraction]) -> Callable[[Action], Fraction]:
    return lambda action: lasts[action.kind]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_is_its_closed_form_and_messages_without_time_change_none(schedule: str) -> None:
    """Forward and backward take any time. Interleaved ranks wait for their whole batch, so they are never faster."""
    lasts = {Kind.F: 2, Kind.B: 5}
    for pipeline in every(schedule, 4, 9):
        ordered = timeline(pipeline, orders(pipeline), lasts)
        assert bubble_stated(pipeline) in (None, bubble(ordered)), pipeline
        each = {kind: Fraction(last, pipeline.chunks) for kind, last in lasts.items()}
        free = played(pipeline, programs(pipeline), compute(each), lambda *_: 0)
        if schedule == "interleaved":
            assert max(own[-1].end for own in free) >= max(own[-1].end for own in ordered)
        else:
            assert free == ordered


def test_messages_hold_up_sender_and_receiver() -> None:
    """Two stages, two micro-batches, all by hand: computations of one unit, messages of a quarter."""
    pipeline = Pipeline(schedule="1f1b", ranks=2, micro=2)
    spans = played(pipeline, programs(pipeline), lambda _: 1, lambda *_: 0.25)
    starts = [[(str(span.action.kind), float(span.start)) for span in own] for own in spans]
    assert starts == [
        [("F", 0), ("F", 1.25), ("B", 3.5), ("B", 5.75)],
        [("F", 1.25), ("B", 2.25), ("F", 3.5), ("B", 4.5)],
    ]
    half = (programs(pipeline)[0][:1], *programs(pipeline)[1:])
    with pytest.raises(
        ValueError, match="program of rank 1: waits forever in recv_forward of micro-batch 0 on stage 1"
    ):
        played(pipeline, half, lambda _: 1, lambda *_: 0)


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
    spans, page = timeline(pipeline, orders(pipeline)), (ROOT / "docs/schedules.md").read_text()
    for rank, own in enumerate(spans):
        (drawn,) = re.findall(rf"^rank {rank} \|(.*)$", page, re.MULTILINE)
        found = [(drawn[at : at + 2], Fraction(at // 3)) for at in range(0, len(drawn), 3) if drawn[at] in "FB"]
        assert found == [(f"{span.action.kind}{span.action.micro}", span.start) for span in own]
    assert f"\nbubble {bubble(spans)}, closed form {bubble_stated(pipeline)}\n" in page


def test_schedules_need_no_torch() -> None:
    code = "import sys; from shardproof.parallel.schedules import messages, timing; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
