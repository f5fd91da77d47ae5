"""The matcher of ranks in processes: recorded calls are matched and compared as if they were issued in one process.

gloo and NCCL do not compare the calls of ranks: another dtype, reduce op or shape of the same size passes silently,
another size or op hangs. Here every call is matched with the calls of the same number on the group's other ranks. Sends
are matched with receives by sender, receiver and tag. The first call that does not match is the mismatch; its time is
that of the later of the two calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from shardproof.harness.engines.calls.arithmetic import Disagreement, compare_sizes
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
from shardproof.harness.engines.calls.signature import Signature
from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.engines.processes.flight_recorder import ReadCalls, RecordedCall
from shardproof.harness.ledger import OTHER

_NOTHING = torch.empty(0)


@dataclass(slots=True, eq=False)
class MatchedCall:
    """A recorded call of a rank, with its number in its group and the state of the call over all ranks."""

    rank: int
    group: RankGroup
    number: int
    recorded: RecordedCall
    event: PendingCollective | PendingMessage
    signature: Signature = field(init=False)

    def __post_init__(self) -> None:
        self.signature = self.recorded.signature


class TraceMatcher:
    """Matches the calls of a run, read from `sources` by rank. `last` by rank is the call recorded last.

    `mismatch` is the first call that does not match, `count` is how many calls were read. A rank that makes a group
    waits for all others to make it, as in a call.
    """

    def __init__(self, sources: Sequence[Callable[[], ReadCalls]]) -> None:
        self._sources = sources
        self._state = [ReadCalls()] * len(sources)
        self._groups: dict[tuple[str, tuple[int, ...]], RankGroup] = {}
        self._known: GroupsByRanks = {}
        self.last: list[MatchedCall | None] = [None] * len(sources)
        self.mismatch: Mismatch | None = None
        self.mismatch_at_s = 0.0
        self._asynchronous: list[list[MatchedCall]] = [[] for _ in sources]
        self.count = 0
        self._made: dict[str, dict[int, tuple[int, ...]]] = {}
        self._making: dict[str, PendingCollective] = {}
        self._in_making: list[MatchedCall | None] = [None] * len(sources)

    @property
    def groups(self) -> list[RankGroup]:
        """All groups in which a rank called, in the order in which they were seen.

        If members of a group have not made it, a group of all ranks comes last, whose calls are such makings: with kept
        backends no rank waits for them.
        """
        making = world_of(len(self.last))
        for number, made in self._made.items():
            # If all members have made it, they may be the only ones to do so (local synchronisation).
            if set(next(iter(made.values()))) - made.keys():
                making.collectives[int(number)] = self._making[number]
        return [*self._groups.values(), *([making] if making.collectives else [])]

    @property
    def at_mismatch(self) -> dict[int, MatchedCall]:
        """By rank, the calls that were matched in the mismatch."""
        collective = self.mismatch.collective if self.mismatch is not None else None
        return {call.rank: call for call in collective.issued if call is not None} if collective is not None else {}

    def read(self) -> None:
        """Match the calls that were recorded since the last time."""
        for rank, source in enumerate(self._sources):
            self._state[rank] = source()
            for at_s, recorded in self._state[rank].new:
                self._take(rank, at_s, recorded)

    def inside(self, rank: int) -> MatchedCall | None:
        """The call in which a rank waits, as far as the rank knows; None if all ranks have issued that call."""
        state, asynchronous = self._state[rank], self._asynchronous[rank]
        if state.waits:
            call = asynchronous[state.waits - 1] if state.waits <= len(asynchronous) else None
        else:
            call = self.last[rank] if state.inside else self._in_making[rank]
        return call if call is not None and not call.event.done else None

    def find_unwaited(self, places: Sequence[Sequence[int]]) -> tuple[Unwaited, ...]:
        """The works that were never waited for. `places` has, by rank, their numbers among its asynchronous calls."""
        calls = [self._asynchronous[rank][place] for rank, mine in enumerate(places) for place in mine]
        return tuple(
            Unwaited(
                rank=call.rank,
                op=call.signature.op,
                number=call.number,
                group=call.group.label,
                caller=call.recorded.caller.rpartition(" in ")[0],
            )
            for call in calls
        )

    def _take(self, rank: int, at_s: float, recorded: RecordedCall) -> None:
        self.count += 1
        if recorded.signature.op == MAKES_GROUP.op:
            self._make(rank, at_s, recorded)
            return
        self._in_making[rank] = None
        group = self._groups.get((recorded.group, recorded.ranks))
        if group is None:
            group = RankGroup(recorded.ranks, recorded.description, name=recorded.group)
            self._groups[recorded.group, recorded.ranks] = group
            label_group(group, self._known)
        member, op = recorded.ranks.index(rank), recorded.signature.op
        if op == OTHER:  # its members are unknown: no rank waits in it, and it cannot mismatch
            complete = PendingCollective(recorded.signature, 1, [None], done=True)
            self.last[rank] = MatchedCall(rank, group, group.numbers[member], recorded, complete)
        elif op in {"send", "recv"}:
            self._post(member, group, rank, at_s, recorded)
        else:
            self._match(member, group, rank, at_s, recorded)
        last = self.last[rank]
        if recorded.is_async and last is not None:
            self._asynchronous[rank].append(last)

    def _match(self, member: int, group: RankGroup, rank: int, at_s: float, recorded: RecordedCall) -> None:
        number, collective = group.enter(member, recorded.signature, recorded)
        self.last[rank] = collective.issued[member] = MatchedCall(rank, group, number, recorded, collective)
        if member in collective.differing:
            self._differ(Mismatch(group, number, collective.signature, collective), at_s)
        collective.missing -= 1
        if not collective.missing:
            if recorded.sends and not collective.differing:
                self._compare_sizes(group, number, collective, at_s)
            collective.done = not collective.differing
            del group.collectives[number]

    def _post(self, member: int, group: RankGroup, rank: int, at_s: float, recorded: RecordedCall) -> None:
        peer = ANY if recorded.peer < 0 else recorded.ranks.index(recorded.peer)
        mine = PendingMessage(member, group.posted[member], peer, recorded.tag, recorded.signature, _NOTHING)
        self.last[rank] = MatchedCall(rank, group, mine.number, recorded, mine)
        other = group.counterpart(mine)
        if other is None:
            return
        if mismatch := Mismatch.of_messages(group, mine, other):
            self._differ(mismatch, at_s)
        group.messages.remove(other)
        mine.done = other.done = True

    def _compare_sizes(self, group: RankGroup, number: int, collective: PendingCollective, at_s: float) -> None:
        """All ranks have issued an all_to_all: compare what they send and expect, in pairs.

        A rank that does not state one size for every rank is refused by its own backend.
        """
        calls = [met.recorded for met in collective.issued]
        if any(len(sizes) != len(calls) for call in calls for sizes in (call.sends, call.expects)):
            return
        try:
            compare_sizes([call.sends for call in calls], [call.expects for call in calls])
        except Disagreement as sizes:
            self._differ(Mismatch.of_sizes(group, number, collective, sizes), at_s)

    def _make(self, rank: int, at_s: float, recorded: RecordedCall) -> None:
        """A rank makes a group of the world, as every rank must; when all have, they must have made the same."""
        size = len(self.last)
        made = self._made.setdefault(recorded.group, {})
        made[rank] = recorded.ranks
        making = self._making.setdefault(recorded.group, PendingCollective(recorded.signature, size, [None] * size))
        making.issued[rank] = recorded
        self._in_making[rank] = MatchedCall(rank, world_of(size), int(recorded.group), recorded, making)
        if len(made) < size:
            return
        del self._made[recorded.group], self._making[recorded.group]
        making.done = True
        odd = next((other for other in sorted(made) if made[other] != made[0]), 0)
        if odd:
            self._differ(Mismatch.of_groups(size, int(recorded.group), {0: made[0], odd: made[odd]}), at_s)

    def _differ(self, mismatch: Mismatch, at_s: float) -> None:
        if self.mismatch is None:
            self.mismatch, self.mismatch_at_s = mismatch, at_s
