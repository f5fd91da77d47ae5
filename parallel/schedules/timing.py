"""How long a pipeline takes: its programs played by the clock, and the closed form of the bubble beside them.

`played` has a time for each computation and message. Times are exact, in any unit: integers or
fractions, or floats as the fractions that they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from shardproof.parallel.schedules.messages import Program, counterpart, peer
from shardproof.parallel.schedules.pipeline import Action, Kind, Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When one computation runs."""

    action: Action
    start: Fraction
    end: Fraction


def played(
    pipeline: Pipeline,
    made: Sequence[Program],
    compute: Callable[[Action], Fraction | float],
    message: Callable[[int, int], Fraction | float],
) -> tuple[tuple[Span, ...], ...]:
    """Spans of all ranks when each executes its program step by step and waits for every batch of its messages.

    `compute` is the time of a computation, `message` that of a message from one rank to another. A rank goes on when
    its sends have had their time and its receives have arrived, one message's time after their sender issued them.
    Raises ValueError when the programs wait for each other forever.
    """
    now = [Fraction(0)] * len(made)
    place = [0] * len(made)
    issued: dict[Action, Fraction] = {}
    spans: list[list[Span]] = [[] for _ in made]
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(made):
            while place[rank] < len(steps):
                together = steps[place[rank]]
                if together[0].kind.computes:
                    start, now[rank] = now[rank], now[rank] + Fraction(compute(together[0]))
                    spans[rank].append(Span(action=together[0], start=start, end=now[rank]))
                else:
                    ends = [now[rank]]
                    for action in together:
                        if action.kind in _SENT:
                            start = issued.setdefault(action, now[rank])
                            ends.append(start + Fraction(message(rank, peer(pipeline, action))))
                    sources = [counterpart(pipeline, action) for action in together if action.kind not in _SENT]
                    if any(source not in issued for source in sources):
                        break
                    ends += [issued[s] + Fraction(message(pipeline.rank(s.stage), rank)) for s in sources]
                    now[rank] = max(ends)
                place[rank] += 1
                moved = True
    for rank, steps in enumerate(made):
        if place[rank] < len(steps):
            raise ValueError(f"program of rank {rank}: waits forever in {' and '.join(map(str, steps[place[rank]]))}")
    return tuple(map(tuple, spans))


_SENT = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


def bubble_stated(pipeline: Pipeline) -> Fraction | None:
    """Closed form of the share of all ranks' time in which they compute nothing; None where none is known.

    For stages and messages alike that take no time to send. GPipe, 1F1B: (pp-1)/(micro+pp-1), arXiv:2104.04473 section
    2.2.1. Interleaved, group=pp and micro a multiple of pp: (pp-1)/(chunks micro+pp-1), section 2.2.2.
    """
    pp, micro = pipeline.ranks, pipeline.micro
    if pipeline.schedule == "interleaved" and (pipeline.in_a_row != pp or micro % pp):
        return None
    return Fraction(pp - 1, pipeline.chunks * micro + pp - 1)
