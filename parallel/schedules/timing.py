"""How long a pipeline takes: its programs played by the clock, and the closed forms of the bubble beside them.

`played` has a time for each computation and message. Times are exact, in any unit: integers or
fractions, or floats as the fractions that they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from parallel.schedules.messages import Program, counterpart, peer
from parallel.schedules.pipeline import Action, Kind, Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """Times of one micro-batch on all chunks of a rank: forward, input gradient, weight gradient."""

    forward: Fraction | int = 1
    input: Fraction | int = 1
    weight: Fraction | int = 1

    @property
    def all(self) -> Fraction:
        """Forward and backward of one micro-batch on one rank."""
        return Fraction(self.forward + self.input + self.weight)

    def of(self, pipeline: Pipeline, kind: Kind) -> Fraction:
        """The time of one computation of one chunk."""
        whole = self.input if pipeline.splits_backward else self.input + self.weight
        return Fraction({Kind.F: self.forward, Kind.B: whole, Kind.W: self.weight}[kind]) / pipeline.chunks


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


def duration_stated(pipeline: Pipeline, times: ComputeTimes | None = None) -> Fraction | None:
    """Closed form of the time of one step of training; None where no closed form is known.

    GPipe, 1F1B: (micro+pp-1)(F+I+W), arXiv:2104.04473 section 2.2.1. Interleaved, group=pp and micro a multiple of pp:
    the part of pp-1 divided by chunks, section 2.2.2. ZB-H1, W <= F and W <= I: (pp-1)(F+I-W) more than the work,
    arXiv:2401.10241 section 2.3. Every micro-batch that is missing to pp costs W more. ZBV, F = I = W and at least
    2pp-1 micro-batches: no rank ever waits once it has begun (section 6). There rank pp-1 begins (pp-1)F/2 after rank
    0.
    """
    times = times or ComputeTimes()
    pp, micro, work = pipeline.ranks, pipeline.micro, pipeline.micro * times.all
    match pipeline.schedule:
        case "gpipe" | "1f1b":
            return work + (pp - 1) * times.all
        case "interleaved" if pipeline.in_a_row == pp and micro % pp == 0:
            return work + Fraction(pp - 1, pipeline.chunks) * times.all
        case "zb-h1" if times.weight <= min(times.forward, times.input):
            return work + (pp - 1) * (times.forward + times.input) - (min(micro, pp) - 1) * times.weight
        case "zbv" if times.forward == times.input == times.weight and micro >= 2 * pp - 1:
            return work + Fraction(pp - 1, 2) * times.forward
        case _:
            return None


def bubble_stated(pipeline: Pipeline, times: ComputeTimes | None = None) -> Fraction | None:
    """Closed form of `bubble`; None where no closed form is known. GPipe, 1F1B: (pp-1)/(micro+pp-1)."""
    times = times or ComputeTimes()
    whole = duration_stated(pipeline, times)
    return None if whole is None else 1 - pipeline.micro * times.all / whole
