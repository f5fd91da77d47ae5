"""Calls in flight: groups, the meeting of a collective, the two posts of a point-to-point call, and their faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from harness.engines.calls.arithmetic import Operands
from harness.engines.calls.signature import Signature
from harness.errors import ranks_text
from harness.ledger import shape_text

__all__ = ["ANY", "Fault", "Group", "Meeting", "Post", "SameRanks", "mail_fault", "tell_apart"]

_WORLD, _UNNAMED = "default_pg", "undefined"
"""What torch calls the groups that the user did not name: that of all ranks, and any other."""
ANY = -1
"""The peer of a receive that takes from anybody."""


class Meeting:
    """One collective in flight. `said` is what the first rank to come said; by group rank: `operands` (None: not come
    yet) and `parted` (who says something else).
    """

    __slots__ = ("done", "missing", "operands", "parted", "said", "waiters")

    def __init__(self, said: Signature, size: int) -> None:
        self.said = said
        self.operands: list[Operands | None] = [None] * size
        self.missing = size
        self.parted: dict[int, Signature] = {}
        self.waiters: list[int] = []
        self.done = False


class Post:
    """One end of a point-to-point call: group rank `member` sends to `peer`, or receives from it (or from ANY).

    `number` counts the member's sends and receives in the group.
    """

    __slots__ = ("done", "member", "number", "peer", "said", "tag", "tensor", "waiters")

    def __init__(self, member: int, number: int, peer: int, tag: int, said: Signature, tensor: Tensor) -> None:
        self.member, self.number, self.peer, self.tag = member, number, peer, tag
        self.said, self.tensor = said, tensor
        self.waiters: list[int] = []
        self.done = False

    def meets(self, other: Post) -> bool:
        """Whether one sends what the other is to receive."""
        return (
            self.said.op != other.said.op
            and self.tag == other.tag
            and self.peer in {other.member, ANY}
            and other.peer in {self.member, ANY}
        )


@dataclass(slots=True, eq=False)
class Group:
    """Ranks that communicate, in group order; shared by the process groups of all its ranks.

    `description` is torch's `group_desc`, `name` its `group_name`, `life` counts how often the world was initialised;
    `label` is what messages call the group (`tell_apart`). `numbers` and `posted` count each member's collectives and
    point-to-point calls; `meetings` and `posts` are those that are not complete; `store` is what torch code asks a
    group for.
    """

    ranks: tuple[int, ...]
    description: str
    life: int = 1
    name: str = ""
    label: str = ""
    numbers: list[int] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)
    meetings: dict[int, Meeting] = field(default_factory=dict)
    posts: list[Post] = field(default_factory=list)
    store: Any = None

    def __post_init__(self) -> None:
        self.call_it("world" if self.description == _WORLD else self.description)
        self.numbers = [0] * len(self.ranks)
        self.posted = [0] * len(self.ranks)

    def call_it(self, words: str) -> None:
        """Make these words, the ranks and the life the label."""
        self.label = f"{words} ({ranks_text(self.ranks)})" + (f" of life {self.life}" if self.life > 1 else "")


SameRanks = dict[tuple[int, tuple[int, ...], str], list[Group]]
"""The groups of a run by life, ranks and description."""


def tell_apart(made: Group, known: SameRanks) -> None:
    """Add a group to those known and label it: its description, or "group 3", the third that `new_group` made.

    Groups of the same ranks and description have both: "tp, group 3". A group that its members alone made (with local
    synchronisation, or by `split_group`) has no number in the world: "local group 2" is the second that was seen.
    """
    alike = known.setdefault((made.life, made.ranks, made.description), [])
    alike.append(made)
    if made.description == _WORLD or (made.description != _UNNAMED and len(alike) == 1):
        return
    local = [group for group in alike if not group.name.isdigit()]
    for group in alike:
        number = f"local group {local.index(group) + 1}" if group in local else f"group {group.name}"
        group.call_it(number if group.description == _UNNAMED else f"{group.description}, {number}")


@dataclass(frozen=True, slots=True)
class Fault:
    """Ranks that do not agree: in what they say in a `meeting`, or over a size they tell each other (`words`).

    `kind` "race": one rank changed a tensor of a call in flight, as `words` say.
    """

    group: Group
    number: int
    said: Signature
    meeting: Meeting | None = None
    ranks: tuple[int, ...] = ()
    words: str = ""
    kind: str = "mismatch"


def mail_fault(group: Group, one: Post, other: Post) -> Fault | None:
    """What is wrong between a send and the receive that it meets, told of the receive; None when they agree."""
    send, receive = (one, other) if one.said.op == "send" else (other, one)
    if (send.said.dtype, send.said.shapes) == (receive.said.dtype, receive.said.shapes):
        return None
    sender, receiver = group.ranks[send.member], group.ranks[receive.member]
    words = f"rank {sender} sends {_content(send.said)} to rank {receiver}, which receives {_content(receive.said)}"
    return Fault(group, receive.number, receive.said, ranks=(sender, receiver), words=words)


def _content(said: Signature) -> str:
    return f"{said.dtype} {shape_text(said.shapes) or 'scalar'}"
