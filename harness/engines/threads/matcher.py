"""Calls of in-process ranks, and the matcher that compares, computes and completes them.

A collective is one PendingCollective per (group, number of the call in the group); the last rank to issue it computes
it for all. Send and receive are two PendingMessages, matched by group, sender, receiver and tag, in order. The wait of
a send returns when the message was received, as on NCCL. `issue` and `post` see every call before anything happens, and
`_complete` a collective's result before any rank gets it. A subclass that alters, drops or poisons calls does it there.

A rank whose signature differs from that of the first rank never returns from its call, and the driver is woken. So it
never sees an error that it could swallow.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import current_thread, get_ident
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shardproof.harness.engines.calls.arithmetic import Combine, Disagreement, Operands, meet, perform
from shardproof.harness.engines.calls.callers import Caller, issued_at, waits_when_read
from shardproof.harness.engines.calls.pending import (
    ANY,
    MAKES_GROUP,
    GroupsByRanks,
    Mismatch,
    PendingCollective,
    PendingMessage,
    RankGroup,
    label_group,
    world_of,
)
from shardproof.harness.engines.calls.signature import Signature, address_of, call_of, is_computed, needs_gradient
from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.engines.threads.scheduler import Scheduler
from shardproof.harness.ledger import Call, Observer, notify_waited
from shardproof.harness.torch_internals.world import answers_torch, rank_tables


@dataclass(slots=True, eq=False)
class RankCall:
    """A call of a rank on its process group: what it issues, and from then on the state of the call.

    Group rank `member` of `group`, global rank `rank`, issues the call. `payload` are the tensors whose bytes the
    ledger counts. `peer` (a group rank, or ANY) and `tag` are those of a point-to-point call, whose `operands` have an
    output or an input alone. `outputs` are the program's tensors that it writes. Some fields are set when the call is
    issued: `number` counts the rank's calls in the group, `event` is the state over all ranks, `ticket` is what the
    observer returned, `origin` the user's line of an asynchronous call. `waits_when_read`: whether the program gets a
    result that waits by itself. `waited`: whether a wait has returned.
    """

    group: RankGroup
    member: int
    rank: int
    signature: Signature
    operands: Operands
    outputs: Sequence[Tensor]
    combine: Combine
    payload: Sequence[Tensor]
    is_async: bool
    peer: int = ANY
    tag: int = 0
    event: PendingCollective | PendingMessage = field(init=False)
    number: int = field(init=False)
    ticket: int | None = None
    origin: Caller | None = None
    waits_when_read: bool = False
    waited: bool = False


class _Waited(dist.Work):
    """A work whose other methods follow from `wait`, `is_completed` and `result`. A failed call raises in `wait`."""

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    block_current_stream = synchronize

    def is_success(self) -> bool:
        """The same as `is_completed`."""
        return self.is_completed()

    def exception(self) -> None:
        """None."""

    def get_future(self) -> Future[list[Tensor]]:
        """A completed future of the outputs, made after a wait. If C++ waited for it, no other rank could run."""
        future: Future[list[Tensor]] = Future()
        future.set_result(self.result())
        return future


@answers_torch
class Work(_Waited):
    """An asynchronous call. `wait` and `get_future` let other ranks run until the call is complete."""

    def __init__(self, call: RankCall, wait: Callable[[RankCall], None], ask: Callable[[RankCall], bool]) -> None:
        super().__init__()
        self._call = call
        self._wait = wait
        self._ask = ask

    def wait(self, timeout: object = None) -> bool:
        """Return when the call is complete; another rank may run meanwhile."""
        self._wait(self._call)
        return True

    def is_completed(self) -> bool:
        """Whether the call is complete. If not, other ranks run before this returns: a program may ask in a loop."""
        return self._ask(self._call)

    def result(self) -> list[Tensor]:
        """The outputs, when complete."""
        self.wait()
        return list(self._call.outputs)

    def source_rank(self) -> int:
        """The group rank of the sender, for a receive that is complete; -1 for other calls."""
        event = self._call.event
        return event.peer if isinstance(event, PendingMessage) and self._call.signature.op == "recv" else -1


class _CompleteWork(_Waited):
    """The work of any synchronous call, which returns when it is complete; it has no outputs of its own."""

    def wait(self, timeout: object = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


COMPLETE = _CompleteWork()


class BatchedWorks(_Waited):
    """The works of one coalescing block, waited for together."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = tuple(works)

    def wait(self, timeout: object = None) -> bool:
        """Return when all are complete."""
        return all([work.wait() for work in self._works])

    def is_completed(self) -> bool:
        """Whether all are complete, without waiting."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Tensor]:
        """The outputs of all."""
        return [tensor for work in self._works for tensor in work.result()]


_NONE = Operands((), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A rank changed a tensor of its own call in flight, as `text` reports."""

    rank: int
    text: str


class CollectiveMatcher:
    """All groups, calls and works of one run. Only the rank whose turn it is uses it."""

    def __init__(self, world_size: int, scheduler: Scheduler, observer: Observer | None) -> None:
        self.scheduler = scheduler
        self.observer = observer
        self.groups: dict[tuple[int, str, tuple[int, ...]], RankGroup] = {}
        self._known: GroupsByRanks = {}
        self.waiting: list[RankCall | None] = [None] * world_size
        self.open: list[dict[RankCall, None]] = [{} for _ in range(world_size)]
        self.failure: Mismatch | Race | None = None
        self._made: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self._calls: dict[tuple[object, ...], Call] = {}

    def group(self, life: int, name: str, ranks: tuple[int, ...], description: str) -> RankGroup:
        """The group of this name and these ranks, in this life of the world; the same object on all ranks."""
        group = self.groups.get((life, name, ranks))
        if group is None:
            group = self.groups[life, name, ranks] = RankGroup(ranks, description, life, name)
            label_group(group, self._known)
        return group

    def agree_on_group(self, rank: int, life: int, number: int, ranks: tuple[int, ...]) -> None:
        """Rank `rank` makes the world's group `number` of these ranks. If the first rank made it of others, this call
        never returns.
        """
        first, others = self._made.setdefault((life, number), (rank, ranks))
        if others != ranks:
            size = len(self.waiting)
            call = RankCall(world_of(size), rank, rank, MAKES_GROUP, _NONE, (), meet, (), False)
            call.number, call.event = number, PendingCollective(MAKES_GROUP, size, [None] * size)
            self._park(call, Mismatch.of_groups(size, number, {first: others, rank: ranks}))

    def issue(self, call: RankCall) -> None:
        """A rank issues a collective, which is complete when every rank has issued it.

        Raises RuntimeError outside the rank's threads, Aborted when the run has ended.
        """
        rank, scheduler = call.rank, self.scheduler
        if get_ident() != scheduler.idents[rank] or scheduler.stopping:
            self._admit(call)
        group, member, signature = call.group, call.member, call.signature
        call.number, collective = group.enter(member, signature, call.operands)
        call.event = collective
        if call.is_async:
            self._follow(call)
        if self.observer is not None:
            root = group.ranks[signature.root] if signature.root >= 0 else -1
            call.ticket = self.observer.on_issue(rank, self._ledger_call(call, group, root))
        if collective.differing and member in collective.differing:
            self._park(call, Mismatch(group, call.number, collective.signature, collective))
        collective.missing -= 1
        if not collective.missing:
            self._complete(call, collective)

    def post(self, call: RankCall) -> None:
        """A rank sends to its peer or receives from it; the call is complete when both have issued theirs.

        Raises RuntimeError outside the rank's threads, Aborted when the run has ended.
        """
        if get_ident() != self.scheduler.idents[call.rank] or self.scheduler.stopping:
            self._admit(call)
        group, number = call.group, call.group.posted[call.member]
        (tensor,) = call.payload
        mine = PendingMessage(call.member, number, call.peer, call.tag, call.signature, tensor)
        call.number, call.event = number, mine
        if call.is_async:
            self._follow(call)
        if self.observer is not None:
            peer_rank = group.ranks[call.peer] if call.peer != ANY else -1
            call.ticket = self.observer.on_issue(call.rank, self._ledger_call(call, group, peer_rank))
        other = group.counterpart(mine)
        if other is None:
            return
        if mismatch := Mismatch.of_messages(group, mine, other):
            self._park(call, mismatch)
        group.messages.remove(other)
        mine.peer, other.peer = other.member, mine.member
        send, receive = (other, mine) if call.signature.op == "recv" else (mine, other)
        perform(call.combine, (Operands((), (send.tensor,)), Operands((receive.tensor,), ())), "", -1)
        mine.done = other.done = True
        for waiter in other.waiters:
            self.scheduler.wake(waiter)

    def wait(self, call: RankCall) -> None:
        """Let other ranks run until a call is complete.

        Raises RuntimeError for a call that could not be computed, Aborted when the run ends before.
        """
        event, rank = call.event, call.rank
        while not event.done:
            self.waiting[rank] = call
            event.waiters.append(rank)
            self.scheduler.wait(rank)
        self.waiting[rank] = None
        if not call.waited:
            self.close(call)
        if event.error is not None:
            raise RuntimeError(f"{call.signature.op}: {event.error}") from event.error

    def ask(self, call: RankCall) -> bool:
        """Whether a call is complete. If it is not, the other ranks first have their turn. Raises Aborted.

        If the answer is yes a program needs no wait, except for the error of a call that could not be computed.
        """
        event = call.event
        if not event.done and get_ident() == self.scheduler.idents[call.rank]:
            self.scheduler.pass_turn(call.rank)
        if event.done and event.error is None and not call.waited:
            self.close(call)
        return event.done

    def close(self, call: RankCall) -> None:
        """The first wait of a call has returned."""
        call.waited = True
        if call.is_async:
            del self.open[call.rank][call]
            call.operands, call.payload = _NONE, ()  # the program may keep its work
        if call.ticket is not None and self.observer is not None:
            if call.is_async:
                notify_waited(self.observer, call.rank, call.ticket)
            self.observer.on_completion(call.rank, call.ticket)

    def find_unwaited(self) -> tuple[Unwaited, ...]:
        """After the run: asynchronous works that were never waited for; the observer now gets their completion.

        Results that wait when they are read are not among them: nothing read them.
        """
        found = []
        for rank, calls in enumerate(self.open):
            for call in calls:
                op, number, place = call.signature.op, call.number, call.origin.place if call.origin else ""
                if not call.waits_when_read:
                    found.append(Unwaited(rank=rank, op=op, number=number, group=call.group.label, caller=place))
                if call.ticket is not None and self.observer is not None:
                    self.observer.on_completion(rank, call.ticket)
        return tuple(found)

    def _admit(self, call: RankCall) -> None:
        """A thread other than the one that acts for the rank: it takes over, if the rank started it."""
        mine = rank_tables()
        if mine is None or mine.matcher is not self or mine.rank != call.rank:
            raise RuntimeError(
                f"{call.signature.op} on rank {call.rank}: the in-process engine takes calls from the rank's own "
                f"threads only, while the run lasts; this is thread {current_thread().name!r}"
            )
        self.scheduler.take_over(call.rank, f"{call.signature.op} in thread {current_thread().name!r}")

    def _follow(self, call: RankCall) -> None:
        """Remember an asynchronous call, and the line that issued it, until it is waited for."""
        frame = sys._getframe(3)
        call.origin, call.waits_when_read = issued_at(frame), waits_when_read(frame)
        self.open[call.rank][call] = None

    def _complete(self, call: RankCall, collective: PendingCollective) -> None:
        """The last rank has issued the collective: compute it, and wake the ranks that wait."""
        group, signature = call.group, collective.signature
        try:
            perform(call.combine, collective.issued, signature.reduce_op, signature.root)
        except Disagreement as sizes:
            self._park(call, Mismatch.of_sizes(group, call.number, collective, sizes))
        except Exception as problem:  # what torch cannot compute is an error of every rank, as on a real backend
            collective.error = problem
        collective.done = True
        del group.collectives[call.number]
        collective.issued.clear()
        for rank in collective.waiters:
            self.scheduler.wake(rank)

    def _park(self, call: RankCall, failure: Mismatch | Race) -> NoReturn:
        """Keep this rank in its call until the run is stopped; the first failure of a run is its root cause."""
        self.failure = self.failure or failure
        self.waiting[call.rank] = call
        self.scheduler.halt()
        while True:
            self.scheduler.wait(call.rank)

    def _ledger_call(self, call: RankCall, group: RankGroup, peer: int) -> Call:
        """The ledger's Call, kept for the run: a program issues the same calls over and over."""
        payload = call.payload
        arguments = call.signature, payload, group.ranks, group.description, peer, call.is_async
        if len(payload) > 1:
            return call_of(*arguments)
        shape, address = payload[0].shape if payload else None, address_of(call.signature, payload)
        of_autograd = needs_gradient(call.signature.op, payload), is_computed(payload)
        key = (group, call.signature, shape, peer, call.is_async, address, of_autograd)
        stored = self._calls.get(key)
        if stored is None:
            stored = self._calls[key] = call_of(*arguments)
        return stored
