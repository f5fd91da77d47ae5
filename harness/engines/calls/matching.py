"""The matcher: the k-th call of a group must agree on all its ranks; who disagrees in which call, in one sentence.

Threads and processes compare one call of all ranks, as they meet in it (`compare_calls`). Recorded runs, dry runs and
the dumps of a hang know sequences of calls (harness.engines.calls.sequences). A field of a call that a feeder cannot
know is NOT_KNOWN, and no difference.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from shardproof.harness.engines.calls.signature import NOT_KNOWN, Signature, described, difference, field_text
from shardproof.harness.errors import ranks_text

Channel = tuple[str, tuple[int, ...], str]
"""Calls counted together: a group's name, its ranks, and "" for collectives or "send 3", "recv 0" for messages."""
_MOST = 8
"""Values that are listed one by one."""
_NOTHING, _NOT_KNOWN = "nothing", "not known"


class GroupCall(NamedTuple):
    """A call of a rank in a group.

    `place` is where it belongs (phase, module, step, micro-batch), which differs between ranks that skipped a call.
    `order` counts the calls of the rank. `complete` and `size_bytes` (of the payload) are None where they are not
    known. `members` are the signatures of the calls in a coalesced one.
    """

    signature: Signature
    place: tuple[object, ...] = ()
    axis: str = ""
    caller: str = ""
    order: int = 0
    complete: bool | None = None
    members: tuple[Signature, ...] = ()
    size_bytes: int | None = None

    @property
    def words(self) -> str:
        """ "all_reduce sum float32 4x8 over tp, layers.3 (backward, step 2)"; what is not known is left out."""
        op = words_of(self.signature) + (f" of {len(self.members)}" if self.members else "")
        if self.signature.shapes is NOT_KNOWN and self.size_bytes is not None:
            op += f" of {self.size_bytes} B"
        phase, region, step, _micro = self.place if len(self.place) == 4 else ("", "", -1, 0)
        where = ", ".join(str(word) for word in (phase, f"step {step}" if step != -1 else "") if word)
        text = (f"{op} over {self.axis}" if self.axis else op) + (f", {region}" if region else "")
        return text + (f" ({where})" if where else "") + (f", at {self.caller}" if self.caller else "")

    @property
    def identity(self) -> tuple[object, ...]:
        """All in which ranks that issue the same calls in the same places agree."""
        return self.signature, self.place, self.members, self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCalls:
    """The known calls of a rank: `calls`: channel -> number -> call; `last`: channel -> number of its last call.

    `ended`: "" while it ran, else how it ended; `lost`: it was killed, and left no calls. `counted`: the numbers of its
    messages are those of the whole run. `whole`: these are all its calls, and no rank waits any more.
    """

    rank: int
    calls: Mapping[Channel, Mapping[int, GroupCall]] = field(default_factory=dict)
    last: Mapping[Channel, int] = field(default_factory=dict)
    ended: str = ""
    lost: bool = False
    counted: bool = True
    whole: bool = False

    @property
    def latest(self) -> tuple[Channel, int, GroupCall] | None:
        """The call in which the rank is, or that it issued last: the oldest incomplete one, else the last of all."""
        calls = [(channel, number, call) for channel, by in self.calls.items() for number, call in by.items()]
        inside = [one for one in calls if one[2].complete is False]
        if inside:
            return min(inside, key=lambda one: one[2].order)
        return max(calls, key=lambda one: one[2].order, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Ranks that diverge, `how` (skipped, extra, differs, behind, gone, cycle, message), in which call of their group.

    `calls` are those that ranks issued as this `number`. `call` is that of most ranks, or the one that is lacking or in
    excess; None where it is not known. `waiting` wait for it. `label` names the group where its name and ranks do not.
    """

    how: str
    ranks: tuple[int, ...]
    channel: Channel
    number: int
    call: GroupCall | None
    calls: Mapping[int, GroupCall] = field(default_factory=dict)
    waiting: tuple[int, ...] = ()
    label: str = ""

    @property
    def text(self) -> str:
        """The divergence in one sentence."""
        who, called = ranks_named(self.ranks), call_named(self.channel, self.number, self.call, self.label)
        what = f": {self.call.words}" if self.call is not None else ""
        waits = f"{'wait' if len(self.waiting) > 1 else 'waits'} for it"
        match self.how:
            case "differs" | "message":
                return f"ranks disagree in {called}: {self._difference()}"
            case "cycle":
                return f"{who} wait for each other: every one of them is in a call that another has not issued"
            case "extra":
                return f"{who} issued {called}, which no other rank issued{what}"
            case "gone":
                are = "is" if len(self.ranks) == 1 else "are"
                return f"{who} {are} gone, and {ranks_named(self.waiting)} issued last {called}{what}"
        if self.channel[2]:
            called = f"the other end of {called}"
        return f"{who} never issued {called}{what}" + (f"; {ranks_named(self.waiting)} {waits}" if self.waiting else "")

    def _difference(self) -> str:
        """The field that differs, with its value on every rank, and where two of them issued it."""
        if self.how == "message":
            (sender, receiver), one = self.ranks, self.calls
            text = message_text(sender, one[sender].signature, receiver, one[receiver].signature)
            return text + (f", at {one[receiver].caller}" if one[receiver].caller else "")
        usual, odd = _two_kinds(self.calls)
        name = differing_field(self.calls[odd], self.calls[usual])
        by_value: dict[str, list[int]] = {_value(name, self.calls[rank]): [] for rank in (odd, usual)}
        for rank, call in self.calls.items():
            by_value.setdefault(_value(name, call), []).append(rank)
        listed = [f"{value} on {ranks_named(ranks)}" for value, ranks in by_value.items()]
        values = ", ".join([*listed[:_MOST], *([f"and {len(listed) - _MOST} values more"] if listed[_MOST:] else [])])
        text = f"{'' if name.startswith('member') else 'the '}{name.removesuffix('s').replace('_', ' ')} is {values}"
        if not self.calls[odd].axis:  # the positions of the ranks tell it
            return text
        return f"{text}; rank {odd} issued {self.calls[odd].words}, rank {usual} {self.calls[usual].words}"


def compare_calls(channel: Channel, number: int, calls: Mapping[int, GroupCall], label: str = "") -> Divergence | None:
    """How ranks differ in one call of their group; None where all that is known agrees. A tie blames all of them."""
    pair = _two_kinds(calls)
    if not pair:
        return None
    usual = calls[pair[0]]
    ranks = tuple(rank for rank, call in calls.items() if differing_field(call, usual))
    ranks = tuple(calls) if 2 * len(ranks) >= len(calls) else ranks
    return Divergence(how="differs", ranks=ranks, channel=channel, number=number, call=usual, calls=calls, label=label)


def differing_field(one: GroupCall, other: GroupCall) -> str:
    """The first in which two calls differ: a field of their signatures, "member 2", "payload"; "" where none is known.

    All ranks of a group must agree in these.
    """
    if name := difference(one.signature, other.signature):
        return name
    all_known = NOT_KNOWN not in (one.signature.op, other.signature.op)  # else further members may follow
    members = enumerate(zip_longest(one.members, other.members), 1)
    if place := next((n for n, (a, b) in members if (difference(a, b) if a and b else all_known)), 0):
        return f"member {place}"
    return "payload" if differing_size(one, other) else ""


def differing_size(one: GroupCall, other: GroupCall) -> bool:
    """Whether two payloads are known to be of other sizes."""
    return None not in (one.size_bytes, other.size_bytes) and one.size_bytes != other.size_bytes


def words_of(signature: Signature) -> str:
    """A signature in words, its op first."""
    return f"{signature.op or 'coalesced'} {described(signature)}".strip()


def message_text(sender: int, sent: Signature, receiver: int, received: Signature) -> str:
    """Words for the two ends of a message that differ."""
    return f"rank {sender} sends {_content(sent)} to rank {receiver}, which receives {_content(received)}"


def ranks_named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0 1"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


def call_named(channel: Channel, number: int, call: GroupCall | None, label: str = "") -> str:
    """ "call #3 of tp (0 1)", and of a message "send #3 to rank 1 of pp (0 1)"."""
    op, _, peer = channel[2].partition(" ")
    axis = call.axis if call is not None else channel[0]
    ends = f" {'to' if op == 'send' else 'from'} rank {peer}" if peer else ""
    return f"{op or 'call'} #{number}{ends} of {label or f'{axis} ({ranks_text(channel[1])})'}"


def _two_kinds(calls: Mapping[int, GroupCall]) -> tuple[int, ...]:
    """A rank of those that issued the usual call, and one whose call differs from it; () where no two differ.

    A call of which less is known may agree with two that differ.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank, call in calls.items():
        kinds.setdefault((call.signature, call.members, call.size_bytes), []).append(rank)
    firsts = [ranks[0] for ranks in sorted(kinds.values(), key=len, reverse=True)] if len(kinds) > 1 else ()
    pairs: Iterator[tuple[int, ...]] = (
        (usual, odd) for usual in firsts for odd in firsts if differing_field(calls[usual], calls[odd])
    )
    return next(pairs, ())


def _content(signature: Signature) -> str:
    shape = "" if signature.shapes is NOT_KNOWN else field_text("shapes", signature)
    return f"{signature.dtype} {shape}".strip()


def _value(name: str, call: GroupCall) -> str:
    """The value in which a call differs from others."""
    if name == "payload":
        return f"{call.size_bytes} B" if call.size_bytes is not None else _NOT_KNOWN
    if name.startswith("member "):
        place = int(name.removeprefix("member "))
        return words_of(call.members[place - 1]) if place <= len(call.members) else _NOTHING
    return _NOT_KNOWN if getattr(call.signature, name) is NOT_KNOWN else field_text(name, call.signature)
