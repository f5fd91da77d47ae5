"""The fingerprint check: what the ranks wrote on their boards is put together again, as if they met in this process.

gloo and NCCL do not compare what ranks say: another dtype, reduce op or shape of the same size passes silently, another
size or op hangs. Here every call is matched with the same call of the group's other ranks by its number, sends with
receives by sender, receiver and tag. The first that does not match is the fault; its time is when the second one came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from harness.engines.calls.arithmetic import Operands
from harness.engines.calls.pending import ANY, Fault, Group, Meeting, Post, SameRanks, mail_fault, tell_apart
from harness.engines.calls.signature import Signature
from harness.engines.engine import Unwaited
from harness.engines.processes.flight_recorder import Fact
from harness.errors import ranks_text
from harness.ledger import OTHER

__all__ = ["WAITING_IN", "Board", "Replay", "Written"]

WAITING_IN = ("interposer.py", "waits.py", "distributed_c10d.py", "_functional_collectives.py", "kept_groups.py")
"""Files whose code stands innermost in a rank that waits for a call to complete."""

_HERE = Operands((), ())
_NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A call that a rank wrote down."""

    rank: int
    group: Group
    number: int
    fact: Fact
    event: Meeting | Post
    at_s: float

    @property
    def said(self) -> Signature:
        """What the rank says in it."""
        return self.fact.said


class Board(Protocol):
    """Where a rank's calls are read: a flight_recorder.Reader, or what a rank elsewhere has told of it."""

    def new(self) -> Iterator[tuple[float, Fact]]:
        """The calls written since the last time: when, and what."""
        ...

    def inside(self) -> bool:
        """Whether the call written last is a synchronous one that is not known to be complete."""
        ...

    def waits(self) -> int:
        """1 + the place, among the asynchronous calls, of the one for which the rank waits; 0 for none."""
        ...


class Replay:
    """Reads the boards of a run. `last` by rank is the call written last, `fault` the first that does not match.

    `at_fault` by rank is what was written in that call, `later` by rank the asynchronous calls in order. A rank that
    makes a group waits there for all others to make it, as in a call.
    """

    def __init__(self, boards: Sequence[Board]) -> None:
        self._boards = boards
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._same_ranks: SameRanks = {}
        self.last: list[Written | None] = [None] * len(boards)
        self.fault: Fault | None = None
        self.fault_at_s = 0.0
        self.at_fault: dict[int, Written] = {}
        self.later: list[list[Written]] = [[] for _ in boards]
        self.written = 0
        self._made: dict[str, dict[int, tuple[int, ...]]] = {}
        self._making: dict[str, Meeting] = {}
        self._in_making: list[Written | None] = [None] * len(boards)
        self._met: dict[Meeting, list[Written]] = {}

    @property
    def groups(self) -> list[Group]:
        """All groups in which somebody called, in the order in which they were seen; at last the world, where groups
        are made that not all of their members have made. Where a backend was kept, nobody waits for that.
        """
        making = Group(tuple(range(len(self.last))), "default_pg")
        for number, made in self._made.items():
            if set(next(iter(made.values()))) - made.keys():  # else the members alone may do (local synchronisation)
                making.meetings[int(number)] = self._making[number]
        return [*self._groups.values(), *([making] if making.meetings else [])]

    def read(self) -> None:
        """Take in what was written since the last time."""
        for rank, board in enumerate(self._boards):
            for at_s, fact in board.new():
                self._take(rank, at_s, fact)

    def inside(self, rank: int) -> Written | None:
        """The call that a rank has not seen complete and in which it waits, if not every rank has issued it."""
        board = self._boards[rank]
        waits = board.waits()
        if waits:
            call = self.later[rank][waits - 1] if waits <= len(self.later[rank]) else None
        else:
            call = self.last[rank] if board.inside() else self._in_making[rank]
        return call if call is not None and not call.event.done else None

    def unwaited(self, places: Sequence[Sequence[int]]) -> tuple[Unwaited, ...]:
        """The works that nobody waited for, given by rank as their places among the asynchronous calls."""
        calls = [self.later[rank][place] for rank, mine in enumerate(places) for place in mine]
        return tuple(
            Unwaited(
                rank=call.rank,
                op=call.said.op,
                number=call.number,
                group=call.group.label,
                caller=call.fact.caller.rpartition(" in ")[0],
            )
            for call in calls
        )

    def _take(self, rank: int, at_s: float, fact: Fact) -> None:
        self.written += 1
        if fact.said.op == "new_group":
            self._make(rank, at_s, fact)
            return
        self._in_making[rank] = None
        key = (fact.group, fact.ranks)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(fact.ranks, fact.description, name=fact.group)
            tell_apart(group, self._same_ranks)
        member = fact.ranks.index(rank)
        if fact.said.op == OTHER:  # who takes part in it is not known: nobody waits in it, and it parts no ranks
            self.last[rank] = Written(rank, group, group.numbers[member], fact, _met_alone(fact.said), at_s)
        elif fact.said.op in {"send", "recv"}:
            mine = Post(member, group.posted[member], _member(fact), fact.tag, fact.said, _NOTHING)
            self._post(mine, group, rank, at_s, fact)
        else:
            self._meet(member, group, rank, at_s, fact)
        last = self.last[rank]
        if fact.is_async and last is not None:
            self.later[rank].append(last)

    def _meet(self, member: int, group: Group, rank: int, at_s: float, fact: Fact) -> None:
        number = group.numbers[member]
        group.numbers[member] += 1
        meeting = group.meetings.get(number)
        if meeting is None:
            meeting = group.meetings[number] = Meeting(fact.said, len(group.ranks))
            self._met[meeting] = []
        self.last[rank] = written = Written(rank, group, number, fact, meeting, at_s)
        self._met[meeting].append(written)
        if meeting.said != fact.said:
            meeting.parted[member] = fact.said
            self._part(Fault(group, number, meeting.said, meeting), at_s)
        else:
            meeting.operands[member] = _HERE
        if self.fault is not None and self.fault.meeting is meeting:
            self.at_fault = {met.rank: met for met in self._met[meeting]}
        meeting.missing -= 1
        if not meeting.missing:
            if fact.sends and not meeting.parted:
                self._exchange(group, number, self._met[meeting], at_s)
            meeting.done = not meeting.parted
            del group.meetings[number], self._met[meeting]

    def _post(self, mine: Post, group: Group, rank: int, at_s: float, fact: Fact) -> None:
        group.posted[mine.member] += 1
        self.last[rank] = Written(rank, group, mine.number, fact, mine, at_s)
        other = next((post for post in group.posts if post.meets(mine)), None)
        if other is None:
            group.posts.append(mine)
            return
        if fault := mail_fault(group, mine, other):
            self._part(fault, at_s)
        group.posts.remove(other)
        mine.done = other.done = True

    def _exchange(self, group: Group, number: int, met: list[Written], at_s: float) -> None:
        """All ranks of an all_to_all have come: compare what they send and expect in pairs."""
        facts = {group.ranks.index(written.rank): written.fact for written in met}
        for receiver in range(len(group.ranks)):
            for sender, expected in enumerate(facts[receiver].expects):
                sent = facts[sender].sends[receiver]
                if sent != expected:
                    ends = group.ranks[sender], group.ranks[receiver]
                    rows = " rows" if isinstance(sent, int) else ""
                    words = f"rank {ends[0]} sends {sent}{rows} to rank {ends[1]}, which expects {expected}"
                    self._part(Fault(group, number, facts[sender].said, ranks=ends, words=words), at_s)
                    self.at_fault = self.at_fault or {written.rank: written for written in met}
                    return

    def _make(self, rank: int, at_s: float, fact: Fact) -> None:
        """A rank makes a group of the world, as every rank must; when all have, they must have made the same."""
        made = self._made.setdefault(fact.group, {})
        made[rank] = fact.ranks
        world = Group(tuple(range(len(self.last))), "default_pg")
        making = self._making.setdefault(fact.group, Meeting(fact.said, len(self.last)))
        making.operands[rank] = _HERE
        self._in_making[rank] = Written(rank, world, int(fact.group), fact, making, at_s)
        if len(made) < len(self.last):
            return
        del self._made[fact.group], self._making[fact.group]
        making.done = True
        odd = next((other for other in sorted(made) if made[other] != made[0]), 0)
        if odd:
            words = f"rank 0 makes it of ranks {ranks_text(made[0])}, rank {odd} of ranks {ranks_text(made[odd])}"
            self._part(Fault(world, int(fact.group), fact.said, ranks=(0, odd), words=words), at_s)

    def _part(self, fault: Fault, at_s: float) -> None:
        if self.fault is None:
            self.fault, self.fault_at_s = fault, at_s


def _met_alone(said: Signature) -> Meeting:
    """A call that is complete when it is issued."""
    meeting = Meeting(said, 1)
    meeting.done = True
    return meeting


def _member(fact: Fact) -> int:
    """The group rank of a message's other end."""
    return ANY if fact.peer < 0 else fact.ranks.index(fact.peer)
