"""The collective matcher of in-process ranks: calls are matched by rank, compared, computed, and waited for.

A collective is one PendingCollective per (group, number of the call in the group); the last rank to issue it computes
it for all. Send and receive are two PendingMessages, matched by group, receiver and tag, in order; the wait of a send
returns when the message was received, as on NCCL. `issue` and `post` see every call before anything happens, and
`_complete` every result before any rank gets it: a subclass that alters, drops or poisons calls does it there.

A rank whose signature differs from the first one's never returns from its call, and the driver is woken: the rank never
sees an error that it could swallow.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from threading import current_thread, get_ident
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from harness.callers import Caller, issued_at
from harness.engines.calls.arithmetic import Disagreement, Operands, meet, perform
from harness.engines.calls.pending import (
    ANY,
    MAKES_GROUP,
    GroupCall,
    GroupsByRanks,
    Mismatch,
    PendingCollective,
    PendingMessage,
    RankGroup,
    label_group,
    world_of,
)
from harness.engines.calls.signature import Signature, call_of
from harness.engines.engine import Unwaited
from harness.engines.threads.rank_threads import Aborted
from harness.engines.threads.scheduler import Scheduler
from harness.ledger import Call, Observer
from harness.torch_internals.groups import answers_torch

__all__ = ["CollectiveMatcher", "Race", "Work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A rank changed a tensor of its own call in flight, as `text` reports."""

    rank: int
    text: str


@answers_torch
class Work(dist.Work):
    """A call that was issued. `wait` and `get_future` let other ranks run until the call is complete."""

    outputs: Sequence[Tensor] = ()
    ticket: int | None = None
    origin: Caller | None = None
    waited = False

    def __init__(
        self,
        matcher: CollectiveMatcher,
        rank: int,
        call: GroupCall,
        number: int,
        event: PendingCollective | PendingMessage,
    ) -> None:
        super().__init__()
        self.matcher = matcher
        self.rank = rank
        self.call = call
        self.number = number
        self.event = event

    @property
    def group(self) -> RankGroup:
        """The group of the call."""
        return self.call.group

    @property
    def signature(self) -> Signature:
        """The rank's own signature."""
        return self.call.signature

    def wait(self, timeout: object = None) -> bool:
        """Return when the call is complete; another rank may run meanwhile."""
        if not self.event.done:
            self.matcher.sleep(self)
        if not self.waited:
            self.matcher.close(self)
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call is complete, without waiting."""
        return self.event.done

    def is_success(self) -> bool:
        """The same as `is_completed`: a call that fails ends the run."""
        return self.is_completed()

    def exception(self) -> None:
        """None: a call that fails ends the run."""

    def result(self) -> list[Tensor]:
        """The outputs, when complete."""
        self.wait()
        return list(self.outputs)

    def get_future(self) -> Future[list[Tensor]]:
        """A completed future of the outputs. It waits first: C++ would wait for it and no other rank could run."""
        future: Future[list[Tensor]] = Future()
        future.set_result(self.result())
        return future

    def source_rank(self) -> int:
        """The group rank of the sender, of a receive that is complete. Raises RuntimeError for other calls."""
        if not isinstance(self.event, PendingMessage) or self.signature.op != "recv":
            raise RuntimeError(f"source_rank: only a receive has a source, this is {self.signature.op}")
        return self.event.peer


class CollectiveMatcher:
    """All groups, calls and works of one run. Only the rank whose turn it is uses it."""

    def __init__(self, world_size: int, scheduler: Scheduler, observer: Observer | None) -> None:
        self.scheduler = scheduler
        self.observer = observer
        self.groups: dict[tuple[int, str, tuple[int, ...]], RankGroup] = {}
        self._known: GroupsByRanks = {}
        self.waiting: list[Work | None] = [None] * world_size
        self.open: list[dict[Work, None]] = [{} for _ in range(world_size)]
        self.failure: Mismatch | Race | None = None
        self._made: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self._calls: dict[tuple[object, ...], Call] = {}

    def group(self, life: int, name: str, ranks: tuple[int, ...], description: str) -> RankGroup:
        """The group of this name and these ranks, in this life of the world; the same object on all ranks."""
        found = self.groups.get((life, name, ranks))
        if found is None:
            found = self.groups[life, name, ranks] = RankGroup(ranks, description, life, name)
            label_group(found, self._known)
        return found

    def agree_on_group(self, rank: int, life: int, number: int, ranks: tuple[int, ...]) -> None:
        """Rank `rank` makes the world's group `number`; of the same ranks as the first rank to make it, else it is
        parked."""
        first, others = self._made.setdefault((life, number), (rank, ranks))
        if others != ranks:
            size = len(self.waiting)
            call = GroupCall(world_of(size), rank, MAKES_GROUP, Operands((), ()), meet, (), False)
            work = Work(self, rank, call, number, PendingCollective(MAKES_GROUP, size))
            self._park(work, Mismatch.of_groups(size, number, {first: others, rank: ranks}))

    def issue(self, call: GroupCall) -> Work:
        """A rank issues a collective. Returns its work, complete when every rank has issued it."""
        group, member, signature, operands, combine, payload, is_async, _, _ = call
        rank = self._rank(call)
        number = group.numbers[member]
        collective = group.collectives.get(number)
        if collective is None:
            collective = group.collectives[number] = PendingCollective(signature, len(group.ranks))
        group.numbers[member] += 1
        work = Work(self, rank, call, number, collective)
        work.outputs = operands.outputs
        if is_async:
            self._follow(work)
        if self.observer is not None:
            root = group.ranks[signature.root] if signature.root >= 0 else -1
            work.ticket = self.observer.issued(rank, self._ledger_call(call, root))
        if collective.signature != signature:
            collective.differing[member] = signature
            self._park(work, Mismatch(group, number, collective.signature, collective))
        collective.operands[member] = operands
        collective.missing -= 1
        if not collective.missing:
            self._complete(work, collective)
        return work

    def post(self, call: GroupCall) -> Work:
        """A rank sends to its peer or receives from it. Returns its work, complete when both have called."""
        rank, group = self._rank(call), call.group
        (tensor,) = call.payload
        mine = PendingMessage(call.member, group.posted[call.member], call.peer, call.tag, call.signature, tensor)
        work = Work(self, rank, call, mine.number, mine)
        work.outputs = call.operands.outputs
        if call.is_async:
            self._follow(work)
        if self.observer is not None:
            peer_rank = group.ranks[call.peer] if call.peer != ANY else -1
            work.ticket = self.observer.issued(rank, self._ledger_call(call, peer_rank))
        other = group.counterpart(mine)
        if other is None:
            return work
        if mismatch := Mismatch.of_messages(group, mine, other):
            self._park(work, mismatch)
        group.messages.remove(other)
        mine.peer, other.peer = other.member, mine.member
        send, receive = (other, mine) if call.signature.op == "recv" else (mine, other)
        perform(call.combine, (Operands((), (send.tensor,)), Operands((receive.tensor,), ())), "", -1)
        mine.done = other.done = True
        for waiter in other.waiters:
            self.scheduler.wake(waiter)
        return work

    def sleep(self, work: Work) -> None:
        """Let other ranks run until the work's event is done. Raises Aborted when the run ends before."""
        event = work.event
        self.waiting[work.rank] = work
        while not event.done:
            event.waiters.append(work.rank)
            self.scheduler.wait(work.rank)
        self.waiting[work.rank] = None

    def close(self, work: Work) -> None:
        """The first wait of a work has returned."""
        work.waited = True
        if work.origin is not None:
            del self.open[work.rank][work]
        if work.ticket is not None and self.observer is not None:
            self.observer.completed(work.rank, work.ticket)

    def unwaited(self) -> tuple[Unwaited, ...]:
        """After the run: asynchronous works that were never waited for; the observer gets their completion now."""
        found = []
        for rank, works in enumerate(self.open):
            for work in works:
                place = work.origin.place if work.origin is not None else ""
                found.append(
                    Unwaited(rank=rank, op=work.signature.op, number=work.number, group=work.group.label, caller=place)
                )
                if work.ticket is not None and self.observer is not None:
                    self.observer.completed(rank, work.ticket)
        return tuple(found)

    def _rank(self, call: GroupCall) -> int:
        """The rank that calls. Raises RuntimeError outside its thread, Aborted when the run has ended."""
        rank = call.group.ranks[call.member]
        if get_ident() != self.scheduler.idents[rank]:
            raise RuntimeError(
                f"{call.signature.op} on rank {rank}: the in-process engine takes calls from the rank's own thread "
                f"only, while the run lasts; this is thread {current_thread().name!r}"
            )
        if self.scheduler.stopping:
            raise Aborted
        return rank

    def _follow(self, work: Work) -> None:
        """Remember an asynchronous work, and the line that issued it, until it is waited for."""
        work.origin = issued_at(sys._getframe(3))
        self.open[work.rank][work] = None

    def _complete(self, work: Work, collective: PendingCollective) -> None:
        """The last rank has issued the collective: compute, and wake the ranks that wait."""
        members = [operands for operands in collective.operands if operands is not None]
        group, signature = work.group, collective.signature
        try:
            perform(work.call.combine, members, signature.reduce_op, signature.root)
        except Disagreement as sizes:
            ranks = tuple(group.ranks[member] for member in sizes.ranks)
            self._park(work, Mismatch(group, work.number, signature, ranks=ranks, words=str(sizes).format(*ranks)))
        collective.done = True
        del group.collectives[work.number]
        collective.operands.clear()
        for rank in collective.waiters:
            self.scheduler.wake(rank)

    def _park(self, work: Work, failure: Mismatch | Race) -> NoReturn:
        """Keep this rank in its call until the run is stopped; the first failure of a run is its root cause."""
        self.failure = self.failure or failure
        self.waiting[work.rank] = work
        self.scheduler.halt()
        while True:
            self.scheduler.wait(work.rank)

    def _ledger_call(self, call: GroupCall, peer: int) -> Call:
        """The ledger's Call, kept for the run: a program issues the same calls over and over."""
        group, payload = call.group, call.payload
        if len(payload) > 1:
            return call_of(call.signature, payload, group.ranks, group.description, peer, call.is_async)
        key = (group, call.signature, payload[0].shape if payload else None, peer, call.is_async)
        found = self._calls.get(key)
        if found is None:
            found = self._calls[key] = call_of(
                call.signature, payload, group.ranks, group.description, peer, call.is_async
            )
        return found
