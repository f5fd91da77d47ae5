"""How long a step takes on a cluster: the dry run of one rank played against a clock, products here, collectives there.

A rank computes and issues calls in its own order. A synchronous call stops it until the call is done; an asynchronous
one travels while it computes, until it waits. So what overlaps is what the program overlaps, call by call. Calls of one
link follow each other, calls of different links do not hinder each other. All ranks are assumed to do the same at the
same time. Time that the rank waits for a call is exposed, the rest of the call's time is hidden. Unit: seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from shardproof.harness.ledger import Event
from shardproof.harness.predicting.meter import START, WAIT, Stretch

T = TypeVar("T")
Price = Callable[[Event], tuple[str, float]]
"""The link that an event uses, and how long it takes."""
_ROUNDING = 1e-9
AFTER_BACKWARD = ("grad_sync", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of computing, and by phase what calls take that nothing hides, and what is hidden behind computing."""

    compute_s: float = 0.0
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    hidden_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """From beginning to end."""
        return self.compute_s + sum(self.exposed_s.values())


def spent_until(
    ends: Sequence[int], stretches: Sequence[Stretch], events: Sequence[Event], flops_per_s: float, price: Price
) -> list[Times]:
    """Times from the beginning until the first n stretches were done, for each n of `ends`, in order."""
    clock, spent, first = _Clock(flops_per_s, events, price), [], 0
    for end in ends:
        for stretch in stretches[first:end]:
            clock.compute(stretch.flops)
            clock.reach(stretch)
        spent.append(clock.times())
        first = end
    return spent


def together(*parts: tuple[float, T]) -> T:
    """The sum of numbers, mappings or dataclasses of them, each multiplied by its weight."""
    _, first = parts[0]
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return replace(first, **{name: together(*((w, getattr(part, name)) for w, part in parts)) for name in names})
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for _, part in parts for key in part)  # type: ignore[attr-defined]
        sums: Any = {key: together(*((w, part[key]) for w, part in parts if key in part)) for key in keys}  # type: ignore[index,operator]
        return cast(T, sums)
    return cast(T, sum(weight * cast(float, part) for weight, part in parts))


class _Clock:
    """Time of one rank, and when each link is free again."""

    def __init__(self, flops_per_s: float, events: Sequence[Event], price: Price) -> None:
        self._flops_per_s, self._price = flops_per_s, price
        self._events = {event.call_index: event for event in events}
        self._now_s = self._compute_s = 0.0
        self._free_s: dict[str, float] = {}
        self._ends_s: dict[int, tuple[float, str]] = {}
        self._taken_s: dict[str, float] = {}
        self._exposed_s: dict[str, float] = {}

    def compute(self, flops: int) -> None:
        spent = flops / self._flops_per_s
        self._compute_s += spent
        self._now_s += spent

    def reach(self, stretch: Stretch) -> None:
        """Handle the end of a stretch of computing: a call that starts, or is waited for."""
        if stretch.then == START:
            event = self._events[stretch.ticket]
            self._start(event, *self._price(event))
        elif stretch.then == WAIT:
            self._wait(stretch.ticket)

    def _start(self, event: Event, link: str, spent_s: float) -> None:
        end_s = max(self._now_s, self._free_s.get(link, 0.0)) + spent_s
        self._free_s[link] = end_s
        self._taken_s[event.phase] = self._taken_s.get(event.phase, 0.0) + spent_s
        self._ends_s[event.call_index] = end_s, event.phase
        if not event.is_async:
            self._wait(event.call_index)

    def _wait(self, ticket: int) -> None:
        end_s, phase = self._ends_s.pop(ticket, (0.0, ""))
        if end_s > self._now_s:
            self._exposed_s[phase] = self._exposed_s.get(phase, 0.0) + end_s - self._now_s
            self._now_s = end_s

    def times(self) -> Times:
        rest = {phase: (taken_s, taken_s - self._exposed_s.get(phase, 0.0)) for phase, taken_s in self._taken_s.items()}
        # Rounding alone is not hidden, and waiting behind other calls is no part of a call's time.
        hidden = {phase: left if left > _ROUNDING * taken else 0.0 for phase, (taken, left) in rest.items()}
        return Times(compute_s=self._compute_s, exposed_s=dict(self._exposed_s), hidden_s=hidden)
