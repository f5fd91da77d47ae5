"""The orders of torch.distributed.pipelining, action by action.

Of GPipe and 1F1B the order is taken from a step that torch runs over a stage that computes nothing; of the others from
their `pipeline_order`. torch refuses 1F1B with fewer micro-batches than ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from parallel.schedules.pipeline import Kind, Pipeline, order
from tests.parallel.schedules.shapes import every

Place = tuple[str, int, int]
"""Kind, virtual stage, micro-batch."""
KINDS = {"FORWARD": Kind.F, "FULL_BACKWARD": Kind.B, "BACKWARD_INPUT": Kind.B, "BACKWARD_WEIGHT": Kind.W}
MANY = {
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "zb-h1": theirs.ScheduleInterleavedZeroBubble,
    "zbv": theirs.ScheduleZBVZeroBubble,
}


class Stage:
    """Stands for a stage of torch's pipeline; notes what it is called for."""

    def __init__(self, pipeline: Pipeline, rank: int, chunk: int = 0) -> None:
        self.stage_index, self.num_stages = pipeline.stage(rank, chunk), pipeline.virtual_stages
        self.group_rank, self.group_size = rank, pipeline.ranks
        self.is_first, self.is_last = self.stage_index == 0, self.stage_index == self.num_stages - 1
        self.has_backward, self.submod = True, None
        self.done: list[Place] = []

    def get_fwd_recv_ops(self, micro: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def forward_one_chunk(self, micro: int, *args: Any, **words: Any) -> None:
        self.done.append(("F", self.stage_index, micro))

    def backward_one_chunk(self, micro: int, **words: Any) -> None:
        self.done.append(("B", self.stage_index, micro))

    def perform_reduce_grad(self, factor: int) -> None:
        pass


def ours(pipeline: Pipeline, rank: int) -> list[Place]:
    return [(action.kind.value, action.stage, action.micro) for action in order(pipeline, rank)]


def listed(pipeline: Pipeline, rank: int) -> list[Place]:
    """The order that torch's schedule lists for a rank, without its waiting."""
    stages: Any = [Stage(pipeline, rank, chunk) for chunk in range(pipeline.chunks)]
    schedule = MANY[pipeline.schedule](stages, pipeline.micro)
    found = [action for action in schedule.pipeline_order[rank] if action is not None]
    return [
        (KINDS[a.computation_type.name], a.stage_index, a.microbatch_index)
        for a in found
        if a.microbatch_index is not None
    ]


def rounds(schedule: str, pp: int, micro: int) -> Iterator[Pipeline]:
    """Those that torch runs: whole rounds, for the interleaved one in groups of its own number."""
    for pipeline in every(schedule, pp, micro):
        whole, rest = divmod(pipeline.micro, max(1, pipeline.micro // pipeline.ranks))
        if schedule == "zbv" or (not rest and pipeline.group in (None, whole)):
            yield pipeline


@pytest.mark.parametrize("schedule", MANY)
def test_the_order_is_the_one_that_torch_lists(schedule: str) -> None:
    pipelines = list(rounds(schedule, 4, 10))
    assert len(pipelines) > 20
    for pipeline in pipelines:
        for rank in range(pipeline.ranks):
            assert ours(pipeline, rank) == listed(pipeline, rank), (pipeline, rank)


@pytest.mark.parametrize(("schedule", "runs"), [("gpipe", theirs.ScheduleGPipe), ("1f1b", theirs.Schedule1F1B)])
def test_the_order_is_the_one_that_torch_runs(schedule: str, runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_initialize_stage", lambda *args, **words: None)
    for pipeline in every(schedule, 4, 7):
        if schedule == "1f1b" and pipeline.micro < pipeline.ranks:
            continue
        for rank in range(pipeline.ranks):
            stage = Stage(pipeline, rank)
            runs(stage, pipeline.micro)._step_microbatches([()] * pipeline.micro, [{}] * pipeline.micro)
            assert ours(pipeline, rank) == stage.done, (pipeline, rank)


def test_another_order_would_be_seen() -> None:
    pipeline = Pipeline(schedule="zb-h1", ranks=4, micro=8)
    assert listed(pipeline, 1) == ours(pipeline, 1) != ours(pipeline, 2)
    plain = ours(Pipeline(schedule="1f1b", ranks=4, micro=8), 1)
    assert [place for place in listed(pipeline, 1) if place[0] != Kind.W] == plain != listed(pipeline, 1)
