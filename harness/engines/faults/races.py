"""Drawn schedules and stressed buffers: a missing wait, a reused buffer or a dependence on order becomes a failing run.

Runs repeat: a `Schedule` says which rank runs next and when results arrive, and the same schedule gives the same run.
Under any schedule

    the outputs of an asynchronous call hold poison (NaN, the largest integer) from its issue until its result arrives:
    at its first wait, or, for a collective that is early in the schedule, as soon as every rank has issued it
    its tensors, inputs and outputs, must not be written between issue and wait: if one is found changed at the wait,
    the run ends, and the error names the rank, the call and both lines

Inputs are read when the call is issued, so a later write never makes a wrong sum but is reported. A result that was
never waited for stays poison. A rank runs until it waits; only then others run.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from shardproof.harness.engines.calls.arithmetic import Operands
from shardproof.harness.engines.calls.callers import caller_at
from shardproof.harness.engines.calls.pending import PendingCollective, RankGroup, call_text
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.faults.disturbance import copy_operands, overwrite_tensors, poison_like
from shardproof.harness.engines.threads.inproc import Intervened, Intervention
from shardproof.harness.engines.threads.matcher import CollectiveMatcher, Race, RankCall
from shardproof.harness.engines.threads.rank_state import PerRankState
from shardproof.harness.engines.threads.rank_threads import RankThread
from shardproof.harness.engines.threads.scheduler import Scheduler
from shardproof.harness.ledger import Observer
from shardproof.harness.outcome.merging import same_bits
from shardproof.harness.torch_internals.autograd import version_of
from shardproof.harness.torch_internals.dispatch import hide_from_modes


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`turns`: which rank goes on at each change, by its place among the ready ranks modulo their number; the rank that
    has waited longest has place 0. `early`: for each asynchronous call, whether its result arrives before the wait.
    After the last entries, the rank that has waited longest goes on, and results arrive in the wait.
    """

    turns: tuple[int, ...] = ()
    early: tuple[bool, ...] = ()


class Explored(Intervened):
    """An engine whose runs all follow the schedule, with stressed buffers."""

    def __init__(self, engine: Engine, schedule: Schedule) -> None:
        super().__init__(engine, _Exploration(schedule))


class _Exploration(Intervention):
    """The intervention that follows a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def scheduler(self, threads: Sequence[RankThread], state: PerRankState, timeout_s: float) -> Scheduler:
        """Turns as the schedule lists them."""
        return _DrawnScheduler(threads, state, timeout_s, self._schedule.turns)

    def matcher(self, world_size: int, scheduler: Scheduler, observer: Observer | None) -> CollectiveMatcher:
        """Results arrive as the schedule lists them."""
        return _StressedMatcher(world_size, scheduler, observer, self._schedule.early)


class _DrawnScheduler(Scheduler):
    """Gives the turn to the ready rank that the schedule names."""

    def __init__(
        self, threads: Sequence[RankThread], state: PerRankState, timeout_s: float, turns: Sequence[int]
    ) -> None:
        super().__init__(threads, state, timeout_s)
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
    """An asynchronous call in flight: the program's own tensors, and the copies that stand in for them.

    `seen` is the content of the program's tensors as the matcher last wrote it.
    """

    tensors: Sequence[Tensor]
    seen: Sequence[_Look]
    outputs: Sequence[Tensor]
    results: Sequence[Tensor]
    early: bool
    arrived: bool = False


class _StressedMatcher(CollectiveMatcher):
    """Asynchronous calls work on copies; their results arrive at the time that the schedule gives."""

    def __init__(self, world_size: int, scheduler: Scheduler, observer: Observer | None, early: Sequence[bool]) -> None:
        super().__init__(world_size, scheduler, observer)
        self._early = itertools.chain(early, itertools.repeat(False))
        self._flights: dict[RankCall, _Flight] = {}
        self._begun: dict[tuple[RankGroup, int], list[_Flight]] = {}

    def issue(self, call: RankCall) -> None:
        """As in the base class, on copies of the operands of an asynchronous call."""
        if call.is_async:
            group, member, signature, operands = call.group, call.member, call.signature, call.operands
            with hide_from_modes():
                call.operands = copies = copy_operands(operands)
            is_root = member == signature.root
            only_sends = (signature.op == "broadcast" and is_root) or (signature.op == "reduce" and not is_root)
            flight = self._flight(operands, copies.outputs, poison=not only_sends)
            self._begun.setdefault((group, group.numbers[member]), []).append(flight)
            self._flights[call] = flight
        super().issue(call)

    def post(self, call: RankCall) -> None:
        """As in the base class, on a copy of the tensor of an asynchronous call."""
        if call.is_async:
            operands = call.operands
            with hide_from_modes():
                call.operands = copies = copy_operands(operands)
            call.payload = (*copies.outputs, *copies.inputs)
            self._flights[call] = self._flight(operands, copies.outputs, poison=bool(copies.outputs))
        super().post(call)

    def close(self, call: RankCall) -> None:
        """As in the base class; the result arrives now, and the program must not have written the tensors before."""
        flight = self._flights.pop(call, None)
        if flight is not None:
            if changed := _find_changed_tensor(flight):
                ends = (call.origin, caller_at(sys._getframe()))
                begun, until = (at.place if at is not None else "an unknown line" for at in ends)
                between = f"between its issue at {begun} and the wait at {until}"
                text = f"rank {call.rank} changed the {changed} of {call_text(call)} {between}"
                self._park(call, Race(rank=call.rank, text=text))
            if not flight.arrived:
                overwrite_tensors(flight.outputs, flight.results)
        super().close(call)

    def _complete(self, call: RankCall, collective: PendingCollective) -> None:
        super()._complete(call, collective)
        for flight in self._begun.pop((call.group, call.number), []):
            if flight.early and not _find_changed_tensor(flight):
                overwrite_tensors(flight.outputs, flight.results)
                flight.seen, flight.arrived = _look_at_tensors(flight.tensors), True

    def _flight(self, operands: Operands, results: Sequence[Tensor], *, poison: bool) -> _Flight:
        outputs = list(operands.outputs)
        if poison:
            with hide_from_modes():
                for output in outputs:
                    output.copy_(poison_like(output))
        tensors = [*outputs, *(operands.inputs if operands.inputs is not operands.outputs else ())]
        return _Flight(tensors, _look_at_tensors(tensors), outputs, results, next(self._early))


def _look_at_tensors(tensors: Sequence[Tensor]) -> list[_Look]:
    with hide_from_modes():
        return [_Look(tensor.clone(), version_of(tensor)) for tensor in tensors]


def _find_changed_tensor(flight: _Flight) -> str:
    """Which tensor of a call in flight has changed: "output", "input" or ""."""
    with hide_from_modes():
        for i, (tensor, look) in enumerate(zip(flight.tensors, flight.seen, strict=True)):
            # NaN + 1 has the bits of NaN, so writes count too, except writes to a part of a larger buffer
            written = version_of(tensor) != look.version and tensor.nbytes == tensor.untyped_storage().nbytes()
            if written or not same_bits(tensor, look.copy):
                return "output" if i < len(flight.outputs) else "input"
    return ""
