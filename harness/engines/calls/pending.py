"""Calls in flight: collectives that not every rank has issued, messages without their other end, and mismatches."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from shardproof.harness.engines.calls.arithmetic import Disagreement
from shardproof.harness.engines.calls.matching import message_text
from shardproof.harness.engines.calls.signature import Signature
from shardproof.harness.errors import ranks_text

_WORLD, _UNNAMED = "default_pg", "undefined"
"""torch's names of groups that the user did not name: the group of all ranks, and any other."""
ANY = -1
"""The peer of a receive from any source."""


@dataclass(slots=True, eq=False)
class PendingCollective:
    """A collective in flight, identified by its group and its number in the group.

    `signature` is that of the first rank that issued it, `missing` ranks have not issued it yet. By group rank:
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
    `label` names the group in messages (`label_group`). `numbers` and `posted` count each member's collectives and
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
        """Make the label of these words, the ranks, and the life where it is not the first."""
        self.label = f"{words} ({ranks_text(self.ranks)})" + (f" of life {self.life}" if self.life > 1 else "")

    def enter(self, member: int, signature: Signature, brings: object) -> tuple[int, PendingCollective]:
        """The next collective of a member, and its number; it is `differing` where its signature is not the first's."""
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
        """The other end of a message that a member has just issued; None, and it is in flight, when there is none."""
        self.posted[mine.member] += 1
        other = next((message for message in self.messages if message.matches(mine)), None)
        if other is None:
            self.messages.append(mine)
        return other


GroupsByRanks = dict[tuple[int, tuple[int, ...], str], list[RankGroup]]
"""The groups of a run by life, ranks and description."""


def label_group(made: RankGroup, known: GroupsByRanks) -> None:
    """Add a group to those known and label it: its description, or "group 3", the third that `new_group` made.

    Groups of the same ranks and description get both: "tp, group 3". A group that only its members made (with local
    synchronisation, or by `split_group`) has no number in the world. "local group 2" is the second of these.
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

    `collective` is the one in which they meet, None for a message and for the making of a group.
    """

    group: RankGroup
    number: int
    signature: Signature
    collective: PendingCollective | None = None
    ranks: tuple[int, ...] = ()
    words: str = ""

    @classmethod
    def of_sizes(cls, group: RankGroup, number: int, met: PendingCollective, sizes: Disagreement) -> "Mismatch":
        """Two ranks of an all_to_all expect other sizes of each other."""
        ranks = tuple(group.ranks[member] for member in sizes.ranks)
        return cls(group, number, met.signature, met, ranks, str(sizes).format(*ranks))

    @classmethod
    def of_messages(cls, group: RankGroup, one: PendingMessage, other: PendingMessage) -> "Mismatch | None":
        """The mismatch between a send and its receive, reported for the receive; None when they agree."""
        send, receive = (one, other) if one.signature.op == "send" else (other, one)
        if (send.signature.dtype, send.signature.shapes) == (receive.signature.dtype, receive.signature.shapes):
            return None
        sender, receiver = group.ranks[send.member], group.ranks[receive.member]
        words = message_text(sender, send.signature, receiver, receive.signature)
        return cls(group, receive.number, receive.signature, ranks=(sender, receiver), words=words)

    @classmethod
    def of_groups(cls, world_size: int, number: int, made: dict[int, tuple[int, ...]]) -> "Mismatch":
        """Two ranks (rank -> ranks of the group) make the world's group `number` of different ranks."""
        (first, ranks), (other, others) = made.items()
        words = f"rank {first} makes it of ranks {ranks_text(ranks)}, rank {other} of ranks {ranks_text(others)}"
        return cls(world_of(world_size), number, MAKES_GROUP, ranks=(first, other), words=words)
