"""Laws of every schedule, over every small pipeline and drawn larger ones."""

import re
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given

from parallel.schedules.messages import programs
from parallel.schedules.pipeline import SCHEDULES, Kind, Pipeline
from parallel.schedules.timing import Span, bubble_stated, played
from tests import ROOT
from tests.parallel.schedules.laws import Sends, bubble, check_legal, live, orders, sends_stated, timeline
from tests.parallel.schedules.shapes import broken, every, larger

SIZES = {"interleaved": (5, 11)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_small_pipeline_keeps_all_laws(schedule: str) -> None:
    for pipeline in every(schedule, *SIZES.get(schedule, (8, 20))):
        assert not broken(pipeline, programs(pipeline)), pipeline


def test_there_are_hundreds_of_them() -> None:
    assert sum(1 for schedule in SCHEDULES for _ in every(schedule, *SIZES.get(schedule, (8, 20)))) > 400


@given(pipeline=larger())
def test_a_larger_pipeline_keeps_all_laws(pipeline: Pipeline) -> None:
    assert not broken(pipeline, programs(pipeline))


@given(pipeline=larger())
def test_all_ranks_together_send_each_micro_batch_once_over_each_border_and_way(pipeline: Pipeline) -> None:
    sent = sum(sum(sends_stated(pipeline, rank)) for rank in range(pipeline.ranks))
    assert sent == 2 * pipeline.micro * (pipeline.virtual_stages - 1)


@pytest.mark.parametrize("lasts", [{Kind.F: 2, Kind.B: 5}, {Kind.F: 1, Kind.B: 1}])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_is_its_closed_form_whatever_forward_and_backward_take(
    schedule: str, lasts: dict[Kind, int]
) -> None:
    for pipeline in every(schedule, 4, 9):
        stated = bubble_stated(pipeline)
        if stated is not None:
            assert bubble(timeline(pipeline, orders(pipeline), lasts)) == stated, pipeline


def with_free_messages(pipeline: Pipeline, lasts: dict[Kind, int]) -> tuple[tuple[Span, ...], ...]:
    made = programs(pipeline)
    return played(pipeline, made, lambda action: Fraction(lasts[action.kind], pipeline.chunks), lambda *_: 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_programs_whose_messages_take_no_time_take_as_long_as_their_orders(schedule: str) -> None:
    """Interleaved ranks wait for their whole batch, so that they are never faster."""
    lasts = {Kind.F: 2, Kind.B: 4}
    for pipeline in every(schedule, 4, 6):
        free = with_free_messages(pipeline, lasts)
        ordered = timeline(pipeline, orders(pipeline), lasts)
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


def test_live_chunks_of_the_runs_of_megatron() -> None:
    """Numbers of around.md 13.2, from runs of Megatron-Core 0.16.1."""
    interleaved = Pipeline(schedule="interleaved", ranks=4, micro=8, chunks=2)
    assert [live(steps) for steps in programs(interleaved)] == [11, 9, 7, 5]
    in_fives = Pipeline(schedule="interleaved", ranks=4, micro=5, chunks=2, group=5)
    assert [live(steps) for steps in programs(in_fives)] == [10, 10, 8, 6]


def test_batches_of_1f1b_are_those_of_a_run_of_megatron() -> None:
    """Closed form of around.md 13.1: batches of one message and of two."""
    for pipeline in every("1f1b", 6, 9):
        for rank, steps in enumerate(programs(pipeline)):
            sizes = [len(step) for step in steps if not step[0].kind.computes]
            first, last = rank == 0, rank == pipeline.ranks - 1
            warm = min(pipeline.ranks - 1 - rank, pipeline.micro)
            steady = pipeline.micro - warm
            assert sizes.count(1) == (not first) * (2 * warm + 2 * (steady > 0)) + (not last) * 2 * warm
            assert sizes.count(2) == (not last) * steady + (not first) * max(steady - 1, 0)


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
    code = "import sys, parallel.schedules.timing, parallel.schedules.messages; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
