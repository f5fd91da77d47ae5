"""Drawn schedules and stressed buffers: a missing wait, a reused buffer or a dependence on order becomes a failing run.

`Raced` errors and poisoned results are facts about the program, not about luck: which rank runs next and when results
arrive is a value, `Schedule`, and the same value gives the same run. Under any schedule

    the outputs of an asynchronous call hold poison (NaN, the largest integer) from its issue until its result arrives,
    which is at its first wait, or, where the schedule says so, as soon as every rank has called
    its tensors, inputs and outputs, must not be written between issue and wait: what is found changed at the wait ends
    the run with rank, call and the lines of both

Inputs are read at the issue, so a later write never makes a wrong sum, it is named instead. What was never waited for
stays poison for ever. Interleavings are those of the hand-offs: a rank runs until it waits.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from harness.callers import caller_at
from harness.engines.calls.arithmetic import Combine, Operands
from harness.engines.calls.pending import Fault, Group, Meeting
from harness.engines.calls.signature import Signature
from harness.engines.engine import Engine
from harness.engines.faults import spoiled
from harness.engines.threads.intervention import Intervened, Plain
from harness.engines.threads.matcher import Exchange, Work
from harness.engines.threads.rank_state import Private
from harness.engines.threads.rank_threads import Worker
from harness.engines.threads.scheduler import Baton
from harness.ledger import Observer
from harness.merging import same_bits
from harness.torch_internals.modes import unseen

__all__ = ["Explored", "Schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`turns`: at each hand-off, which of the ready ranks, by the time they have waited, goes on; modulo their number.
    `early`: of each asynchronous call, whether its result arrives before the wait. After the last entry: the rank that
    has waited longest; in the wait.
    """

    turns: tuple[int, ...] = ()
    early: tuple[bool, ...] = ()


class Explored(Intervened):
    """An engine in which every run follows the schedule, its buffers stressed."""

    def __init__(self, engine: Engine, schedule: Schedule) -> None:
        super().__init__(engine, _Exploration(schedule))


class _Exploration(Plain):
    """The intervention that follows a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def baton(self, workers: Sequence[Worker], private: Private, timeout_s: float) -> Baton:
        """Handed out as the schedule says."""
        return _DrawnBaton(workers, private, timeout_s, self._schedule.turns)

    def exchange(self, world_size: int, baton: Baton, observer: Observer | None) -> Exchange:
        """Results arrive as the schedule says."""
        return _StressedExchange(world_size, baton, observer, self._schedule.early)


class _DrawnBaton(Baton):
    """Hands the baton to the ready rank that the schedule names."""

    def __init__(self, workers: Sequence[Worker], private: Private, timeout_s: float, turns: Sequence[int]) -> None:
        super().__init__(workers, private, timeout_s)
        self._drawn = iter(turns)

    def _next(self) -> int:
        place = next(self._drawn, 0) % len(self._ready)
        rank = self._ready[place]
        del self._ready[place]
        return rank


class _Look(NamedTuple):
    """A tensor as it was: its numbers, and how often it had been written."""

    copy: Tensor
    version: int


@dataclass(slots=True, eq=False)
class _Flight:
    """An asynchronous call in flight: the program's own tensors, what stands in for them, and what they looked like
    when they were last touched by us.
    """

    tensors: Sequence[Tensor]
    seen: Sequence[_Look]
    outputs: Sequence[Tensor]
    results: Sequence[Tensor]
    early: bool
    arrived: bool = False


class _StressedExchange(Exchange):
    """Asynchronous calls work on copies; their results arrive when the schedule says so."""

    def __init__(self, world_size: int, baton: Baton, observer: Observer | None, early: Sequence[bool]) -> None:
        super().__init__(world_size, baton, observer)
        self._early = itertools.chain(early, itertools.repeat(False))
        self._flights: dict[Work, _Flight] = {}
        self._begun: dict[tuple[Group, int], list[_Flight]] = {}

    def issue(
        self,
        group: Group,
        member: int,
        said: Signature,
        operands: Operands,
        combine: Combine,
        payload: Sequence[Tensor],
        is_async: bool,
    ) -> Work:
        """As in any exchange, on copies."""
        if not is_async:
            return super().issue(group, member, said, operands, combine, payload, is_async)
        with unseen():
            copies = spoiled.copied(operands)
        only_sends = (said.op == "broadcast" and member == said.root) or (said.op == "reduce" and member != said.root)
        flight = self._flight(operands, copies.outputs, poison=not only_sends)
        self._begun.setdefault((group, group.numbers[member]), []).append(flight)
        work = super().issue(group, member, said, copies, combine, payload, is_async)
        work.outputs = operands.outputs
        self._flights[work] = flight
        return work

    def post(
        self, group: Group, member: int, said: Signature, peer: int, tag: int, tensor: Tensor, is_async: bool
    ) -> Work:
        """As in any exchange, on a copy."""
        if not is_async:
            return super().post(group, member, said, peer, tag, tensor, is_async)
        with unseen():
            copy = tensor.clone()
        receives = said.op == "recv"
        operands = Operands((tensor,), ()) if receives else Operands((), (tensor,))
        flight = self._flight(operands, (copy,) if receives else (), poison=receives)
        work = super().post(group, member, said, peer, tag, copy, is_async)
        work.outputs = operands.outputs
        self._flights[work] = flight
        return work

    def close(self, work: Work) -> None:
        """As in any exchange; the result is there now, and nobody may have touched the tensors before."""
        flight = self._flights.pop(work, None)
        if flight is not None:
            if changed := _changed(flight):
                self._park(work, self._race(work, changed))
            if not flight.arrived:
                spoiled.overwrite(flight.outputs, flight.results)
        super().close(work)

    def _complete(self, work: Work, meeting: Meeting, combine: Combine) -> None:
        super()._complete(work, meeting, combine)
        for flight in self._begun.pop((work.group, work.number), []):
            if flight.early and not _changed(flight):
                spoiled.overwrite(flight.outputs, flight.results)
                flight.seen, flight.arrived = _seen(flight.tensors), True

    def _flight(self, operands: Operands, results: Sequence[Tensor], *, poison: bool) -> _Flight:
        outputs = list(operands.outputs)
        if poison:
            with unseen():
                for output in outputs:
                    output.copy_(spoiled.poison(output))
        tensors = [*outputs, *(operands.inputs if operands.inputs is not operands.outputs else ())]
        return _Flight(tensors, _seen(tensors), outputs, results, next(self._early))

    def _race(self, work: Work, tensor: str) -> Fault:
        """The fault that says who changed what, and where it was issued and waited for."""
        waited = caller_at(sys._getframe())
        issued, until = (at.place if at is not None else "an unknown line" for at in (work.origin, waited))
        call = f"{work.said.op} #{work.number} of {work.group.label}"
        words = f"rank {work.rank} changed the {tensor} of {call} between its issue at {issued} and the wait at {until}"
        return Fault(work.group, work.number, work.said, ranks=(work.rank,), words=words, kind="race")


def _seen(tensors: Sequence[Tensor]) -> list[_Look]:
    with unseen():
        return [_Look(tensor.clone(), _version(tensor)) for tensor in tensors]


def _changed(flight: _Flight) -> str:
    """Which tensor of a call in flight is no longer as it was: "output", "input" or ""."""
    with unseen():
        for i, (tensor, look) in enumerate(zip(flight.tensors, flight.seen, strict=True)):
            # NaN + 1 has the bits of NaN; of a part of a larger buffer the count of writes tells nothing
            written = _version(tensor) != look.version and tensor.nbytes == tensor.untyped_storage().nbytes()
            if written or not same_bits(tensor, look.copy):
                return "output" if i < len(flight.outputs) else "input"
    return ""


def _version(tensor: Tensor) -> int:
    """How often the tensor's memory was written; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version
