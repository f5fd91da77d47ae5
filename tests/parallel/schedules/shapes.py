"""Pipelines to check: every small one, and drawn larger ones; and all checks of one, by name."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from hypothesis import strategies as st

from shardproof.parallel.schedules import SCHEDULES, Kind, Pipeline, Program, bubble_stated, groups_between
from tests.parallel.schedules.laws import (
    COMPUTED,
    Sends,
    bubble,
    check_complete,
    check_legal,
    live,
    live_stated,
    sends_stated,
    timeline,
)


def every(schedule: str, pp: int, micro: int) -> Iterator[Pipeline]:
    """Every legal pipeline of a schedule up to these sizes, with 2 or 3 chunks and all groups where it has them."""
    for ranks, batches in product(range(1, pp + 1), range(1, micro + 1)):
        if schedule == "interleaved":
            for chunks, group in product((2, 3), range(ranks, batches + 1)):
                if ranks > 1 and not 0 < batches % group < ranks:
                    yield Pipeline(schedule=schedule, ranks=ranks, micro=batches, chunks=chunks, group=group)
        else:
            yield Pipeline(schedule=schedule, ranks=ranks, micro=batches)


@st.composite
def larger(draw: st.DrawFn) -> Pipeline:
    """A pipeline of up to 12 ranks, with fewer and with more micro-batches than ranks, whole and broken groups."""
    schedule, pp = draw(st.sampled_from(SCHEDULES)), draw(st.integers(2, 12))
    if schedule != "interleaved":
        return Pipeline(schedule=schedule, ranks=pp, micro=draw(st.integers(1, 40)))
    group = draw(st.integers(pp, pp + 4))
    rest = draw(st.sampled_from([0, *range(pp, group)]))
    micro = group * draw(st.integers(1, 3)) + rest
    return Pipeline(schedule=schedule, ranks=pp, micro=micro, chunks=draw(st.integers(2, 4)), group=group)


def broken(pipeline: Pipeline, made: Sequence[Program]) -> dict[str, object]:
    """The checks that programs do not pass, with what each found."""
    try:
        computed = [[action for step in steps for action in step if action.kind in COMPUTED] for steps in made]
        simulated = bubble(timeline(pipeline, computed))
        stated = bubble_stated(pipeline)
        slow = [f"bubble {simulated}, closed form {stated}"] if stated is not None and simulated != stated else []
    except ValueError as forever:
        slow = [str(forever)]
    ranks = range(pipeline.ranks)
    lives = [(live(made[rank]), live_stated(pipeline, rank)) for rank in ranks]
    counts = [Counter(action.kind for step in steps for action in step) for steps in made]
    sends = [(count[Kind.SEND_FORWARD], count[Kind.SEND_BACKWARD]) for count in counts]
    found: dict[str, list[object]] = {
        "complete": [*check_complete(pipeline, made)],
        "legal": [*check_legal(pipeline, made, Sends.BATCHED, groups_between(pipeline))],
        "live": [pair for pair in lives if pair[0] != pair[1]],
        "sends": [rank for rank in ranks if sends[rank] != sends_stated(pipeline, rank)],
        "time": [*slow],
    }
    return {name: breaches for name, breaches in found.items() if breaches}
