"""Tests of communication/schedules. The orders of torch.distributed.pipelining and of Megatron-Core, action by
action; laws that a planted bug breaks.
"""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from shardproof.parallel.communication.schedules import Kind, Pipeline, groups_between, order, programs
from tests.parallel.schedules.laws import COMPUTED, Sends, broken, check_legal, every

Place = tuple[str, int, int]
"""Kind, virtual stage, micro-batch."""
KINDS = {"FORWARD": Kind.F, "FULL_BACKWARD": Kind.B}


class Stage:
    """Stands for a stage of torch's pipeline."""

    def __init__(self, pipeline: Pipeline, rank: int, chunk: int = 0) -> None:
        self.stage_index, self.num_stages = pipeline.stage(rank, chunk), pipeline.virtual_stages
        self.group_rank, self.group_size = rank, pipeline.ranks
        self.is_first, self.is_last = self.stage_index == 0, self.stage_index == self.num_stages - 1
        self.has_backward, self.submod = True, None


def listed(pipeline: Pipeline, rank: int) -> list[Place]:
    """The order that torch's schedule lists for a rank, without its waiting."""
    stages: Any = [Stage(pipeline, rank, chunk) for chunk in range(pipeline.chunks)]
    schedule = theirs.ScheduleInterleaved1F1B(stages, pipeline.micro)
    return [
        (KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
        for action in schedule.pipeline_order[rank]
        if action is not None and action.microbatch_index is not None
    ]


def rounds(pp: int, micro: int) -> Iterator[Pipeline]:
    """Pipelines that torch runs: whole rounds, in groups of its own number."""
    for pipeline in every("interleaved", pp, micro):
        whole, rest = divmod(pipeline.micro, max(1, pipeline.micro // pipeline.ranks))
        if not rest and pipeline.group in (None, whole):
            yield pipeline


def test_the_order_is_the_one_that_torch_lists() -> None:
    pipelines = list(rounds(4, 10))
    assert len(pipelines) > 20
    for pipeline in pipelines:
        for rank in range(pipeline.ranks):
            ours = [(action.kind.value, action.stage, action.micro) for action in order(pipeline, rank)]
            assert ours == listed(pipeline, rank), (pipeline, rank)


def batches(pipeline: Pipeline) -> list[list[tuple[Any, ...]]]:
    """Our steps as `megatron_steps` notes them."""
    return [
        [
            (s[0].kind.value, s[0].chunk, s[0].micro) if s[0].kind in COMPUTED else tuple(a.kind for a in s)
            for s in steps
        ]
        for steps in programs(pipeline)
    ]


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("schedule", "sizes"), [("1f1b", (5, 7)), ("interleaved", (4, 9))])
def test_computations_and_batches_are_those_of_megatron(schedule: str, sizes: tuple[int, int]) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    run = importlib.import_module("tests.parallel.schedules.megatron_steps").run
    pipelines = [pipeline for pipeline in every(schedule, *sizes) if pipeline.ranks > 1]
    assert len(pipelines) > 20
    for pipeline in pipelines:
        for rank, stated in enumerate(batches(pipeline)):
            assert stated == run(pipeline, rank), (pipeline, rank)


PLAIN = Pipeline(schedule="1f1b", ranks=4, micro=6)
LEFT_OUT = {
    (Kind.RECV_FORWARD, 5): {"legal"},
    (Kind.SEND_BACKWARD, 0): {"legal", "sends"},
    (Kind.B, 5): {"complete", "legal", "time"},
}
"""The n-th action of a kind that the last rank leaves out -> the laws that break."""


@pytest.mark.parametrize(("kind", "nth"), LEFT_OUT)
def test_an_action_that_is_left_out_breaks_these_laws(kind: Kind, nth: int) -> None:
    *others, last = programs(PLAIN)
    left_out = [action for step in last for action in step if action.kind is kind][nth]
    steps = (tuple(action for action in step if action != left_out) for step in last)
    found = broken(PLAIN, [*others, tuple(filter(None, steps))])
    assert set(found) == LEFT_OUT[kind, nth], found


def test_all_forwards_first_keep_too_much_alive() -> None:
    assert set(broken(PLAIN, programs(replace(PLAIN, schedule="gpipe")))) == {"live"}


def test_interleaved_on_two_ranks_swaps_activations_and_gradients_in_one_group() -> None:
    """around.md 13.4 PP1: one batch, one peer, two ways. With as many micro-batches as ranks nothing is swapped."""
    pipeline = Pipeline(schedule="interleaved", ranks=2, micro=4, chunks=2)
    assert groups_between(pipeline) == 2
    assert not check_legal(pipeline, programs(pipeline), Sends.BATCHED, 2)
    found = check_legal(pipeline, programs(pipeline), Sends.BATCHED, 1)
    assert any("recv_backward" in breach and "meets send_forward" in breach for breach in found), found
    hidden = Pipeline(schedule="interleaved", ranks=2, micro=2, chunks=2)
    assert not check_legal(hidden, programs(hidden), Sends.BATCHED, 1)
    three = Pipeline(schedule="interleaved", ranks=3, micro=6, chunks=2)
    assert not check_legal(three, programs(three), Sends.BATCHED, 1)
