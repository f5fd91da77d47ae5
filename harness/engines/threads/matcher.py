"""Where the ranks of a run meet: calls are matched, checked against each other, computed, and waited for.

A collective is one Meeting per (group, number of the call in the group); the last rank to arrive computes it for all.
Send and receive are two Posts that find each other by group, receiver and tag, in order; a send's wait returns when it
was received, as on NCCL. `issue` and `post` see every call before anything happens, and `_complete` every result before
anybody gets it: whoever wants to alter, drop or poison calls does it there.

A rank that says something else than the others in a call is parked in it, and the driver is told; the rank never sees
an error that it could swallow.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from threading import current_thread, get_ident
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from harness.callers import Caller, issued_at
from harness.engines.calls.arithmetic import Combine, Disagreement, Operands, perform, transfer
from harness.engines.calls.pending import ANY, Fault, Group, Meeting, Post, SameRanks, mail_fault, tell_apart
from harness.engines.calls.signature import Signature, call_of
from harness.engines.engine import Unwaited
from harness.engines.threads.rank_threads import Aborted
from harness.engines.threads.scheduler import Baton
from harness.errors import ranks_text
from harness.ledger import Call, Observer
from harness.torch_internals.groups import answers_torch

__all__ = ["Exchange", "Work"]


@answers_torch
class Work(dist.Work):
    """A call that was issued. `wait` hands the baton on until the call is complete; so does `get_future`."""

    outputs: Sequence[Tensor] = ()
    ticket: int | None = None
    origin: Caller | None = None
    waited = False

    def __init__(
        self, exchange: Exchange, rank: int, group: Group, number: int, said: Signature, event: Meeting | Post
    ) -> None:
        super().__init__()
        self.exchange = exchange
        self.rank = rank
        self.group = group
        self.number = number
        self.said = said
        self.event = event

    def wait(self, timeout: object = None) -> bool:
        """Return when the call is complete; another rank may run meanwhile."""
        if not self.event.done:
            self.exchange.sleep(self)
        if not self.waited:
            self.exchange.close(self)
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
        """A completed future of the outputs. It waits first: C++ would wait for it with the baton in its hand."""
        future: Future[list[Tensor]] = Future()
        future.set_result(self.result())
        return future

    def source_rank(self) -> int:
        """The group rank of the sender, of a receive that is complete."""
        if not isinstance(self.event, Post) or self.said.op != "recv":
            raise RuntimeError(f"source_rank: only a receive has a source, this is {self.said.op}")
        return self.event.peer


class Exchange:
    """All groups, calls and works of one run. Only the rank that holds the baton touches it."""

    def __init__(self, world_size: int, baton: Baton, observer: Observer | None) -> None:
        self.baton = baton
        self.observer = observer
        self.groups: dict[tuple[int, str, tuple[int, ...]], Group] = {}
        self._same_ranks: SameRanks = {}
        self.waiting: list[Work | None] = [None] * world_size
        self.open: list[dict[Work, None]] = [{} for _ in range(world_size)]
        self.fault: Fault | None = None
        self._made: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self._calls: dict[tuple[object, ...], Call] = {}

    def group(self, life: int, name: str, ranks: tuple[int, ...], description: str) -> Group:
        """The group that all members know by this name, in this life of the world."""
        found = self.groups.get((life, name, ranks))
        if found is None:
            found = self.groups[life, name, ranks] = Group(ranks, description, life, name)
            tell_apart(found, self._same_ranks)
        return found

    def agree_on_group(self, rank: int, life: int, number: int, ranks: tuple[int, ...]) -> None:
        """Rank `rank` makes the world's group `number`; the rank that made it first has said of which ranks."""
        first, theirs = self._made.setdefault((life, number), (rank, ranks))
        if theirs != ranks:
            said = Signature("new_group", "single", "", -1, "", ())
            world = Group(tuple(range(len(self.waiting))), "default_pg")
            work = Work(self, rank, world, number, said, Meeting(said, len(world.ranks)))
            words = f"rank {first} makes it of ranks {ranks_text(theirs)}, rank {rank} of ranks {ranks_text(ranks)}"
            self._park(work, Fault(work.group, number, said, ranks=(first, rank), words=words))

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
        """Group rank `member` calls a collective. Returns its work, complete when every rank has called."""
        rank = self._rank(group, member, said.op)
        number = group.numbers[member]
        meeting = group.meetings.get(number)
        if meeting is None:
            meeting = group.meetings[number] = Meeting(said, len(group.ranks))
        group.numbers[member] += 1
        work = Work(self, rank, group, number, said, meeting)
        work.outputs = operands.outputs
        if is_async:
            self._follow(work)
        if self.observer is not None:
            root = group.ranks[said.root] if said.root >= 0 else -1
            work.ticket = self.observer.issued(rank, self._call(group, said, payload, root, is_async))
        if meeting.said != said:
            meeting.parted[member] = said
            self._park(work, Fault(group, number, meeting.said, meeting))
        meeting.operands[member] = operands
        meeting.missing -= 1
        if not meeting.missing:
            self._complete(work, meeting, combine)
        return work

    def post(
        self, group: Group, member: int, said: Signature, peer: int, tag: int, tensor: Tensor, is_async: bool
    ) -> Work:
        """Group rank `member` sends to `peer` or receives from it. Returns its work, complete when both have called."""
        rank = self._rank(group, member, said.op)
        mine = Post(member, group.posted[member], peer, tag, said, tensor)
        work = Work(self, rank, group, mine.number, said, mine)
        group.posted[member] += 1
        if is_async:
            self._follow(work)
        if said.op == "recv":
            work.outputs = (tensor,)
        if self.observer is not None:
            peer_rank = group.ranks[peer] if peer != ANY else -1
            work.ticket = self.observer.issued(rank, self._call(group, said, (tensor,), peer_rank, is_async))
        other = next((post for post in group.posts if post.meets(mine)), None)
        if other is None:
            group.posts.append(mine)
            return work
        if fault := mail_fault(group, mine, other):
            self._park(work, fault)
        group.posts.remove(other)
        mine.peer, other.peer = other.member, mine.member
        send, receive = (other, mine) if said.op == "recv" else (mine, other)
        perform(transfer, (Operands((), (send.tensor,)), Operands((receive.tensor,), ())), "", -1)
        mine.done = other.done = True
        for waiter in other.waiters:
            self.baton.wake(waiter)
        return work

    def sleep(self, work: Work) -> None:
        """Hand the baton on until the work's event is done. Raises Aborted when the run ends before."""
        event = work.event
        self.waiting[work.rank] = work
        while not event.done:
            event.waiters.append(work.rank)
            self.baton.wait(work.rank)
        self.waiting[work.rank] = None

    def close(self, work: Work) -> None:
        """The first wait of a work has returned."""
        work.waited = True
        if work.origin is not None:
            del self.open[work.rank][work]
        if work.ticket is not None and self.observer is not None:
            self.observer.completed(work.rank, work.ticket)

    def unwaited(self) -> tuple[Unwaited, ...]:
        """After the run: the asynchronous works that nobody waited for; the observer hears that they are complete."""
        found = []
        for rank, works in enumerate(self.open):
            for work in works:
                place = work.origin.place if work.origin is not None else ""
                found.append(
                    Unwaited(rank=rank, op=work.said.op, number=work.number, group=work.group.label, caller=place)
                )
                if work.ticket is not None and self.observer is not None:
                    self.observer.completed(rank, work.ticket)
        return tuple(found)

    def _rank(self, group: Group, member: int, op: str) -> int:
        """The rank that calls. Raises RuntimeError outside of its thread, Aborted when the run has ended."""
        rank = group.ranks[member]
        if get_ident() != self.baton.idents[rank]:
            raise RuntimeError(
                f"{op} on rank {rank}: the in-process engine takes calls from the rank's own thread only, while "
                f"the run lasts; this is thread {current_thread().name!r}"
            )
        if self.baton.stopping:
            raise Aborted
        return rank

    def _follow(self, work: Work) -> None:
        """Remember an asynchronous work, and who issued it, until somebody waits for it."""
        work.origin = issued_at(sys._getframe(3))
        self.open[work.rank][work] = None

    def _complete(self, work: Work, meeting: Meeting, combine: Combine) -> None:
        """The last rank has come: compute, and wake those who wait."""
        members = [operands for operands in meeting.operands if operands is not None]
        group, said = work.group, meeting.said
        try:
            perform(combine, members, said.reduce_op, said.root)
        except Disagreement as parted:
            ranks = tuple(group.ranks[member] for member in parted.ranks)
            self._park(work, Fault(group, work.number, said, ranks=ranks, words=str(parted).format(*ranks)))
        meeting.done = True
        del group.meetings[work.number]
        meeting.operands.clear()
        for rank in meeting.waiters:
            self.baton.wake(rank)

    def _park(self, work: Work, fault: Fault) -> NoReturn:
        """Keep this rank in its call until the run is stopped; the first fault of a run is its root cause."""
        self.fault = self.fault or fault
        self.waiting[work.rank] = work
        self.baton.fault()
        while True:
            self.baton.wait(work.rank)

    def _call(self, group: Group, said: Signature, payload: Sequence[Tensor], peer: int, is_async: bool) -> Call:
        """The ledger's Call, remembered within the run: a program says the same things over and over."""
        if len(payload) > 1:
            return call_of(said, payload, group.ranks, group.description, peer, is_async)
        key = (group, said, payload[0].shape if payload else None, peer, is_async)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = call_of(said, payload, group.ranks, group.description, peer, is_async)
        return call
