"""Calls in flight, and why ranks are desynchronised, in one line with the ranks to blame.

In flight are collectives that not every rank has issued, and messages without their other end. Ranks are desynchronised
by a mismatch, a skipped call or a deadlock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from shardproof.harness.engines.calls.arithmetic import Disagreement
from shardproof.harness.engines.calls.matching import GroupCall, compare_calls, message_text
from shardproof.harness.engines.calls.signature import Signature, describe_signature
from shardproof.harness.errors import Position, name_ranks, ranks_text

_WORLD, _UNNAMED = "default_pg", "undefined"
"""torch's names of groups without a name by the user: the group of all ranks, and any other."""
ANY = -1
"""The peer of a receive from any source."""


@dataclass(slots=True, eq=False)
class PendingCollective:
    """A collective in flight, identified by its group and its number in the group.

    `signature` is that of the first rank that issued it, `missing` how many ranks have not done so yet. By group rank:
    `issued` (what the rank brings, None until then) and `differing` (the signatures that differ from the first).
    `waiters` are the ranks that wait for it. `error` is why it could not be computed.
    """

    signature: Signature
    missing: int
    issued: list[Any]
    differing: dict[int, Signature] = field(default_factory=dict)
    waiters: list[int] = field(default_factory=list)
    done: bool = False
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class PendingMessage:
    """An end of a point-to-point call: group rank `member` sends to `peer`, or receives from it (or from ANY).

    `number` counts the sends and receives of the member in the group.
    """

    member: int
    number: int
    peer: int
    tag: int
    signature: Signature
    tensor: Tensor
    waiters: list[int] = field(default_factory=list)
    done: bool = False
    error: ClassVar[None] = None

    def matches(self, other: "PendingMessage") -> bool:
        """Whether one of the two sends what the other receives."""
        return (
            self.signature.op != other.signature.op
            and self.tag == other.tag
            and self.peer in {other.member, ANY}
            and other.peer in {self.member, ANY}
        )


@dataclass(slots=True, eq=False)
class RankGroup:
    """Ranks that communicate, in group order; shared by the process groups of all its ranks.

    `description` is torch's `group_desc`, `name` its `group_name`; `life` counts how often the world was initialised;
    `label` names the group in texts (`label_group`). `numbers` and `posted` count each member's collectives and
    point-to-point calls. `collectives` and `messages` are those in flight. `store` is the group's key-value store.
    """

    ranks: tuple[int, ...]
    description: str
    life: int = 1
    name: str = ""
    label: str = ""
    numbers: list[int] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)
    collectives: dict[int, PendingCollective] = field(default_factory=dict)
    messages: list[PendingMessage] = field(default_factory=list)
    store: Any = None

    def __post_init__(self) -> None:
        self.set_label("world" if self.description == _WORLD else self.description)
        self.numbers = [0] * len(self.ranks)
        self.posted = [0] * len(self.ranks)

    def set_label(self, words: str) -> None:
        """Make the label from these words, the ranks, and the life if it is not the first."""
        self.label = f"{words} ({ranks_text(self.ranks)})" + (f" of life {self.life}" if self.life > 1 else "")

    def enter(self, member: int, signature: Signature, brings: object) -> tuple[int, PendingCollective]:
        """The number and state of a member's next collective, which notes a signature that is not the first rank's."""
        number = self.numbers[member]
        self.numbers[member] = number + 1
        collective = self.collectives.get(number)
        if collective is None:
            size = len(self.ranks)
            collective = self.collectives[number] = PendingCollective(signature, size, [None] * size)
        elif collective.signature is not signature and collective.signature != signature:
            collective.differing[member] = signature
        collective.issued[member] = brings
        return number, collective

    def counterpart(self, mine: PendingMessage) -> PendingMessage | None:
        """The other end of a message that a member has just issued. None if there is none yet; then the message is in
        flight.
        """
        self.posted[mine.member] += 1
        other = next((message for message in self.messages if message.matches(mine)), None)
        if other is None:
            self.messages.append(mine)
        return other


GroupsByRanks = dict[tuple[int, tuple[int, ...], str], list[RankGroup]]
"""The groups of a run by life, ranks and description."""


def label_group(made: RankGroup, known: GroupsByRanks) -> None:
    """Add a group to those known and label it: its description, or "group 3", the third that `new_group` made.

    Groups with the same ranks and description get both: "tp, group 3". A group that its members alone made (with local
    synchronisation, or by `split_group`) has no number in the world: "local group 2" is the second of these.
    """
    alike = known.setdefault((made.life, made.ranks, made.description), [])
    alike.append(made)
    if made.description == _WORLD or (made.description != _UNNAMED and len(alike) == 1):
        return
    local = [group for group in alike if not group.name.isdigit()]
    for group in alike:
        number = f"local group {local.index(group) + 1}" if group in local else f"group {group.name}"
        group.set_label(number if group.description == _UNNAMED else f"{group.description}, {number}")


MAKES_GROUP = Signature("new_group", "single", "", -1, "", ())
"""The signature under which the making of a group is compared."""


def world_of(world_size: int) -> RankGroup:
    """The group of all ranks, for calls that no process group issues."""
    return RankGroup(tuple(range(world_size)), _WORLD)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks that issue one call with different arguments: their signatures differ, or what `words` says.

    `collective` is the call in which they meet, None for a message and for the making of a group.
    """

    group: RankGroup
    number: int
    signature: Signature
    collective: PendingCollective | None = None
    ranks: tuple[int, ...] = ()
    words: str = ""

    @classmethod
    def of_sizes(cls, group: RankGroup, number: int, met: PendingCollective, sizes: Disagreement) -> "Mismatch":
        """Two ranks of an all_to_all of which one sends another size than the other expects."""
        ranks = tuple(group.ranks[member] for member in sizes.ranks)
        return cls(group, number, met.signature, met, ranks, str(sizes).format(*ranks))

    @classmethod
    def of_messages(cls, group: RankGroup, one: PendingMessage, other: PendingMessage) -> "Mismatch | None":
        """The mismatch between a send and its receive, reported for the receive; None if they agree."""
        send, receive = (one, other) if one.signature.op == "send" else (other, one)
        if (send.signature.dtype, send.signature.shapes) == (receive.signature.dtype, receive.signature.shapes):
            return None
        sender, receiver = group.ranks[send.member], group.ranks[receive.member]
        words = message_text(sender, send.signature, receiver, receive.signature)
        return cls(group, receive.number, receive.signature, ranks=(sender, receiver), words=words)

    @classmethod
    def of_groups(cls, world_size: int, number: int, made: dict[int, tuple[int, ...]]) -> "Mismatch":
        """Two ranks (rank -> ranks of the group) that make the world's group `number` with different ranks."""
        (first, ranks), (other, others) = made.items()
        words = f"rank {first} makes it of ranks {ranks_text(ranks)}, rank {other} of ranks {ranks_text(others)}"
        return cls(world_of(world_size), number, MAKES_GROUP, ranks=(first, other), words=words)


class IssuedCall(Protocol):
    """A call that a rank has issued: the work of an in-process rank, or a call from a process's flight recorder.

    `number` is the number of the rank's earlier calls in the group. `signature` is the rank's own, `event` the state of
    the call over all ranks.
    """

    rank: int
    group: RankGroup
    number: int
    signature: Signature
    event: PendingCollective | PendingMessage


class RootCause(NamedTuple):
    """The root cause in one line, and the ranks to blame; `kind`: Desynchronised.kind, UNSERVED of inproc, or ""."""

    text: str
    ranks: tuple[int, ...]
    kind: str = ""


def position_in_call(call: IssuedCall, state: str, caller: str, stack: tuple[str, ...] = ()) -> Position:
    """The position of a rank in a call, or after it."""
    return Position(
        rank=call.rank,
        state=state,
        op=call.signature.op,
        number=call.number,
        group=call.group.label,
        detail=_detail_of_call(call),
        caller=caller,
        stack=stack,
    )


def call_text(call: IssuedCall) -> str:
    """A call in messages: "all_reduce #3 of tp (0 1)"."""
    return f"{call.signature.op} #{call.number} of {call.group.label}"


def of_mismatch(mismatch: Mismatch) -> RootCause:
    """The argument in which ranks disagree, with its value on every rank."""
    group, collective = mismatch.group, mismatch.collective
    if collective is None or mismatch.words:
        call = f"{mismatch.signature.op} #{mismatch.number} of {mismatch.group.label}"
        return RootCause(f"ranks disagree in {call}: {mismatch.words}", mismatch.ranks, "mismatch")
    calls = {
        rank: GroupCall(collective.differing.get(member, collective.signature))
        for member, rank in enumerate(group.ranks)
        if collective.issued[member] is not None
    }
    found = compare_calls((group.name, group.ranks, ""), mismatch.number, calls, group.label)
    assert found is not None, "a mismatch is two signatures that differ"
    return RootCause(found.text, found.ranks, "mismatch")


def of_deadlock(done: Sequence[bool], waiting: Sequence[IssuedCall | None]) -> RootCause:
    """No rank can go on: follow which rank waits for which, to a rank that has finished or round a circle."""
    rank = done.index(False)
    path: list[tuple[int, IssuedCall]] = []
    while rank not in [waiter for waiter, _ in path]:
        call = waiting[rank]
        if call is None:
            break
        path.append((rank, call))
        missing = _missing_ranks(call)
        rank = next((other for other in missing if done[other]), missing[0])
    if done[rank]:
        waiter, call = path[-1]
        text = f"rank {rank} has finished, but rank {waiter} waits for it in {call_text(call)}"
        return RootCause(text, (rank,), "skipped")
    start = next(i for i, (waiter, _) in enumerate(path) if waiter == rank)
    circle = path[start:]
    after = [waiter for waiter, _ in circle[1:]] + [rank]
    steps = (
        f"rank {waiter} waits for rank {other} in {call_text(call)}"
        for (waiter, call), other in zip(circle, after, strict=True)
    )
    return RootCause(f"no rank can go on: {', '.join(steps)}", tuple(waiter for waiter, _ in circle), "deadlock")


def of_skipped(groups: Sequence[RankGroup]) -> RootCause | None:
    """After every rank has finished: a call that some ranks never issued; None if there is none."""
    for group in groups:
        for number, collective in group.collectives.items():
            absent = [rank for rank, brought in zip(group.ranks, collective.issued, strict=True) if brought is None]
            call = f"{collective.signature.op} #{number} of {group.label}"
            text = f"every rank has finished, but {name_ranks(absent)} never made {call}"
            return RootCause(text, tuple(absent), "skipped")
        for message in group.messages:
            peer = "any rank" if message.peer == ANY else f"rank {group.ranks[message.peer]}"
            what = f"rank {group.ranks[message.member]}'s {message.signature.op} in {group.label}"
            text = f"every rank has finished, but {what} was never met by {peer}"
            return RootCause(text, () if message.peer == ANY else (group.ranks[message.peer],), "skipped")
    return None


def _missing_ranks(call: IssuedCall) -> list[int]:
    """The ranks that a waiting rank waits for."""
    ranks, event = call.group.ranks, call.event
    if isinstance(event, PendingCollective):
        return [rank for rank, brought in zip(ranks, event.issued, strict=True) if brought is None]
    if event.peer != ANY:
        return [ranks[event.peer]]
    return [rank for rank in ranks if rank != call.rank]


def _detail_of_call(call: IssuedCall) -> str:
    if not isinstance(call.event, PendingMessage):
        return describe_signature(call.signature)
    peer = "any rank" if call.event.peer == ANY else f"rank {call.group.ranks[call.event.peer]}"
    tag = f" tag {call.event.tag}" if call.event.tag else ""
    return f"{describe_signature(call.signature)} {'to' if call.signature.op == 'send' else 'from'} {peer}{tag}"
