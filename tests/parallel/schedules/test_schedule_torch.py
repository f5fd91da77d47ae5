"""The orders of torch.distributed.pipelining, action by action; laws that break where a bug is planted."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from parallel.schedules.messages import Program, groups_between, programs
from parallel.schedules.pipeline import Action, Kind, Pipeline, order
from tests.parallel.schedules.laws import Sends, check_legal
from tests.parallel.schedules.shapes import broken, every

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


def ours(pipeline: Pipeline, rank: int) -> list[Place]:
    return [(action.kind.value, action.stage, action.micro) for action in order(pipeline, rank)]


def listed(pipeline: Pipeline, rank: int) -> list[Place]:
    """The order that torch's schedule lists for a rank, without its waiting."""
    stages: Any = [Stage(pipeline, rank, chunk) for chunk in range(pipeline.chunks)]
    schedule = theirs.ScheduleInterleaved1F1B(stages, pipeline.micro)
    found = [action for action in schedule.pipeline_order[rank] if action is not None]
    return [
        (KINDS[a.computation_type.name], a.stage_index, a.microbatch_index)
        for a in found
        if a.microbatch_index is not None
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
            assert ours(pipeline, rank) == listed(pipeline, rank), (pipeline, rank)


Steps = list[list[Action]]
Bug = Callable[[Steps], Steps]
PLAIN = Pipeline(schedule="1f1b", ranks=4, micro=6)


def first(steps: Steps, kind: Kind, nth: int = 0) -> int:
    """The step of the n-th action of a kind."""
    return [index for index, step in enumerate(steps) if kind in [action.kind for action in step]][nth]


def without(kind: Kind, nth: int) -> Bug:
    """Leave out the n-th message of a kind."""

    def leave_out(steps: Steps) -> Steps:
        at = first(steps, kind, nth)
        kept = [action for action in steps[at] if action.kind is not kind]
        return steps[:at] + [kept] * bool(kept) + steps[at + 1 :]

    return leave_out


def all_forwards_first(steps: Steps) -> Steps:
    """GPipe under the name of 1F1B: the computations in another order, each with its own receive and send."""
    parts: dict[bool, Steps] = {True: [], False: []}
    kept = {
        True: (Kind.F, Kind.RECV_FORWARD, Kind.SEND_FORWARD),
        False: (Kind.B, Kind.RECV_BACKWARD, Kind.SEND_BACKWARD),
    }
    for forward, kinds in kept.items():
        parts[forward] = [[action] for step in steps for action in step if action.kind in kinds]
    return parts[True] + parts[False]


BUGS: dict[str, tuple[Pipeline, int | None, Bug, set[str]]] = {
    "last receive missing": (PLAIN, 3, without(Kind.RECV_FORWARD, 5), {"legal"}),
    "first gradient not sent": (PLAIN, 3, without(Kind.SEND_BACKWARD, 0), {"legal", "sends"}),
    "all forwards first": (PLAIN, None, all_forwards_first, {"live"}),
    "last backward missing": (PLAIN, 3, without(Kind.B, 5), {"complete", "legal", "time"}),
}


def planted(pipeline: Pipeline, rank: int | None, bug: Bug) -> list[Program]:
    """The programs with a bug on one rank, or on all."""
    made = [[list(step) for step in steps] for steps in programs(pipeline)]
    return [tuple(map(tuple, bug(s) if rank in (None, index) else s)) for index, s in enumerate(made)]


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_by_these_checks(name: str) -> None:
    pipeline, rank, bug, checks = BUGS[name]
    assert not broken(pipeline, programs(pipeline))
    found = broken(pipeline, planted(pipeline, rank, bug))
    assert set(found) == checks, found


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
