"""The order in which a rank computes, for each schedule.

GPipe, 1F1B and interleaved are one rule with different warm-ups: `warm` forwards, then forward and backward in turn,
then the backwards that are left. ZB-H1 is 1F1B with each weight gradient put off by as many backwards as the rank's
number. Sources: Megatron-Core 0.16.1 `pipeline_parallel/schedules.py` (around.md 13.1, 13.2), arXiv:2401.10241
sections 2.1 and 6 (around.md 13.3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from parallel.schedules.pipeline import Action, Kind, Pipeline

__all__ = ["backward_table", "forward_table", "order", "orders", "warm_up"]


def warm_up(pipeline: Pipeline, rank: int) -> int:
    """Forwards of a rank before its first backward's own forward; for ZBV all forwards of the first chunk alone."""
    pp, micro, after = pipeline.pp, pipeline.micro, pipeline.pp - 1 - rank
    match pipeline.schedule:
        case "gpipe":
            return micro
        case "interleaved":
            return min(2 * after + (pipeline.chunks - 1) * pipeline.in_a_row, micro * pipeline.chunks)
        case "zbv":
            return min(2 * (pp - rank) - 1, micro)
        case _:
            return min(after, micro)


def forward_table(pipeline: Pipeline) -> tuple[tuple[int, int], ...]:
    """(chunk, micro-batch) of all forwards of any rank of a looped pipeline, in order."""
    group = pipeline.in_a_row if pipeline.chunks > 1 else pipeline.micro
    return tuple(
        (chunk, micro)
        for first in range(0, pipeline.micro, group)
        for chunk in range(pipeline.chunks)
        for micro in range(first, min(first + group, pipeline.micro))
    )


def backward_table(pipeline: Pipeline) -> tuple[tuple[int, int], ...]:
    """(chunk, micro-batch) of all backwards of any rank of a looped pipeline: the last chunk comes first."""
    return tuple((pipeline.chunks - 1 - chunk, micro) for chunk, micro in forward_table(pipeline))


def order(pipeline: Pipeline, rank: int) -> tuple[Action, ...]:
    """All computations of a rank in one step of training, in order. Raises CaseError when there is no such rank."""
    pipeline.check_rank(rank)
    if pipeline.schedule == "zbv":
        return _zbv(pipeline, rank)
    warm = warm_up(pipeline, rank)
    forwards = [pipeline.action(Kind.F, rank, *place) for place in forward_table(pipeline)]
    backwards = [pipeline.action(Kind.B, rank, *place) for place in backward_table(pipeline)]
    steady = chain.from_iterable(zip(forwards[warm:], backwards, strict=False))
    made = (*forwards[:warm], *steady, *backwards[len(forwards) - warm :])
    return _with_weights(made, put_off=rank) if pipeline.splits_backward else made


def orders(pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
    """The computations of all ranks."""
    return tuple(order(pipeline, rank) for rank in range(pipeline.pp))


def _with_weights(made: Sequence[Action], put_off: int) -> tuple[Action, ...]:
    """Every backward's weight gradient, `put_off` backwards later; those that are left come at the end."""
    weights = iter([action._replace(kind=Kind.W) for action in made if action.kind is Kind.B])
    filled: list[Action] = []
    seen = 0
    for action in made:
        filled.append(action)
        if action.kind is Kind.B:
            seen += 1
            if seen > put_off:
                filled.append(next(weights))
    return (*filled, *weights)


def _zbv(pipeline: Pipeline, rank: int) -> tuple[Action, ...]:
    """ZBV for at least 2pp-1 micro-batches, without the actions of those that the pipeline does not have."""
    pp, drawn = pipeline.pp, max(2 * pipeline.pp - 1, pipeline.micro)
    down, up = [(kind, 0) for kind in (Kind.F, Kind.B, Kind.W)], [(kind, 1) for kind in (Kind.F, Kind.B, Kind.W)]
    with_forward = drawn - (2 * pp - 1 - rank)
    phases = [
        down[:1] * (2 * (pp - rank) - 1),
        [up[0], down[0]] * rank,
        up * (pp - rank),
        (down + up) * with_forward,
        (down[1:] + up) * (drawn - pp - with_forward),
        [down[1], up[1]] * rank,
        down[1:] * (pp - rank),
        [up[2]] * rank,
        [down[2]] * rank,
    ]
    counted: Counter[tuple[Kind, int]] = Counter()
    made: list[Action] = []
    for kind, chunk in chain.from_iterable(phases):
        micro = counted[kind, chunk]
        counted[kind, chunk] += 1
        if micro < pipeline.micro:
            made.append(pipeline.action(kind, rank, chunk, micro))
    return tuple(made)
