"""The matcher: the k-th call of a group must agree on all of its ranks. It names the ranks and calls that disagree.

Threads and processes compare one call of all ranks when these meet in it (`compare_calls`). Recorded runs, dry runs and
dumps of a hang give sequences of calls (`find_divergences`). A field that the source of a call does not know is
NOT_KNOWN, and differs from nothing.

The calls of a sequence are numbered by group, and the sends to and receives from each peer of a group by themselves. At
the first number at which ranks differ, the call of most ranks is the usual one, and another rank diverges:

    skipped   the calls of the rank from this number on are the usual calls from the next number on
    extra     the usual calls from this number on are the calls of the rank from the next number on
    differs   neither
    message   a rank's n-th send to a peer and the peer's n-th receive from it have different sizes

If no calls differ, some ranks may have fewer calls than others, or none:

    behind    the rank never issued a call in which other ranks of its group wait, and does not wait itself
    cycle     every rank waits in a call that another one has not issued
    gone      the rank left no calls, and others are in a call of a group that it belongs to

Sources of the idea: torch.distributed.flight_recorder, MUST.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

from shardproof.harness.engines.calls.signature import (
    NOT_KNOWN,
    Signature,
    describe_signature,
    field_text,
    first_difference,
)
from shardproof.harness.errors import name_ranks, ranks_text

Channel = tuple[str, tuple[int, ...], str]
"""Calls counted together: a group's name, its ranks, and "" for collectives or "send 3", "recv 0" for messages."""
_MOST = 8
"""How many values a sentence lists one by one."""
_NOTHING, _NOT_KNOWN = "nothing", "not known"


class GroupCall(NamedTuple):
    """A call of a rank in a group.

    `place` is its phase, module, step and micro-batch, by which a skipped call is noticed if all signatures are equal.
    `order` counts the calls of the rank. `complete` and `size_bytes` (of the payload) are None if they are not known.
    `members` are the signatures of the calls in a coalesced one. `batched`: a message was issued in a batch.
    """

    signature: Signature
    place: tuple[object, ...] = ()
    axis: str = ""
    caller: str = ""
    order: int = 0
    complete: bool | None = None
    members: tuple[Signature, ...] = ()
    size_bytes: int | None = None
    batched: bool = False

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
        """Equal for two calls that have the same signature, members and size in the same place."""
        return self.signature, self.place, self.members, self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCalls:
    """The known calls of a rank: `calls`: channel -> number -> call; `last`: channel -> number of its last call.

    `ended`: "" while it ran, else how it ended. `lost`: it was killed and left no calls. `counted`: its messages are
    numbered from the beginning of the run. `whole`: these are all of its calls, and no rank waits any more.
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
    """Ranks that diverge, and `how` (see the module), in the call of this number.

    `call` is the usual call, or the one that is missing or extra; None if it is not known. `calls` are those of this
    number by rank. `waiting` are ranks that wait for it. `label` names the group, in place of its axis and ranks.
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
        who, called = name_ranks(self.ranks), call_named(self.channel, self.number, self.call, self.label)
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
                return f"{who} {are} gone, and {name_ranks(self.waiting)} issued last {called}{what}"
        if self.channel[2]:
            called = f"the other end of {called}"
        return f"{who} never issued {called}{what}" + (f"; {name_ranks(self.waiting)} {waits}" if self.waiting else "")

    def _difference(self) -> str:
        """The field that differs, with its value on every rank, and where two of them issued it."""
        if self.how == "message":
            (sender, receiver), one = self.ranks, self.calls
            text = message_text(sender, one[sender].signature, receiver, one[receiver].signature)
            return text + (f", at {one[receiver].caller}" if one[receiver].caller else "")
        usual, odd = _two_kinds(self.calls)
        name = differing_field(self.calls[odd], self.calls[usual])
        by_value: dict[str, list[int]] = {_value_of_call(name, self.calls[rank]): [] for rank in (odd, usual)}
        for rank, call in self.calls.items():
            by_value.setdefault(_value_of_call(name, call), []).append(rank)
        listed = [f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items()]
        values = ", ".join([*listed[:_MOST], *([f"and {len(listed) - _MOST} values more"] if listed[_MOST:] else [])])
        text = f"{'' if name.startswith('member') else 'the '}{name.removesuffix('s').replace('_', ' ')} is {values}"
        if not self.calls[odd].axis:  # engines add the position of every rank themselves
            return text
        return f"{text}; rank {odd} issued {self.calls[odd].words}, rank {usual} {self.calls[usual].words}"


def compare_calls(channel: Channel, number: int, calls: Mapping[int, GroupCall], label: str = "") -> Divergence | None:
    """How ranks differ in one call of their group; None if none do. If half or more differ, all ranks diverge."""
    pair = _two_kinds(calls)
    if not pair:
        return None
    usual = calls[pair[0]]
    ranks = tuple(rank for rank, call in calls.items() if differing_field(call, usual))
    ranks = tuple(calls) if 2 * len(ranks) >= len(calls) else ranks
    return Divergence(how="differs", ranks=ranks, channel=channel, number=number, call=usual, calls=calls, label=label)


def differing_field(one: GroupCall, other: GroupCall) -> str:
    """The first field that ranks must agree in and that differs: of the signature, "member 2", "payload"; or ""."""
    if name := first_difference(one.signature, other.signature):
        return name
    all_known = NOT_KNOWN not in (one.signature.op, other.signature.op)  # else there may be members that are not known
    members = enumerate(zip_longest(one.members, other.members), 1)
    if place := next((n for n, (a, b) in members if (first_difference(a, b) if a and b else all_known)), 0):
        return f"member {place}"
    return "payload" if differing_size(one, other) else ""


def differing_size(one: GroupCall, other: GroupCall) -> bool:
    """Whether two payloads are known to have different sizes."""
    return None not in (one.size_bytes, other.size_bytes) and one.size_bytes != other.size_bytes


def words_of(signature: Signature) -> str:
    """A signature in words, its op first."""
    return f"{signature.op or 'coalesced'} {describe_signature(signature)}".strip()


def message_text(sender: int, sent: Signature, receiver: int, received: Signature) -> str:
    """Words for the two ends of a message that differ."""
    return f"rank {sender} sends {_content_of(sent)} to rank {receiver}, which receives {_content_of(received)}"


def call_named(channel: Channel, number: int, call: GroupCall | None, label: str = "") -> str:
    """ "call #3 of tp (0 1)", and of a message "send #3 to rank 1 of pp (0 1)"."""
    op, _, peer = channel[2].partition(" ")
    axis = call.axis if call is not None else channel[0]
    ends = f" {'to' if op == 'send' else 'from'} rank {peer}" if peer else ""
    return f"{op or 'call'} #{number}{ends} of {label or f'{axis} ({ranks_text(channel[1])})'}"


def _two_kinds(calls: Mapping[int, GroupCall]) -> tuple[int, ...]:
    """A rank with the usual call, and one with a call that differs from it; () if no two calls differ."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank, call in calls.items():
        kinds.setdefault((call.signature, call.members, call.size_bytes), []).append(rank)
    firsts = [ranks[0] for ranks in sorted(kinds.values(), key=len, reverse=True)] if len(kinds) > 1 else ()
    pairs: Iterator[tuple[int, ...]] = (  # all pairs: a call with unknown fields may agree with two that differ
        (usual, odd) for usual in firsts for odd in firsts if differing_field(calls[usual], calls[odd])
    )
    return next(pairs, ())


def _content_of(signature: Signature) -> str:
    shape = "" if signature.shapes is NOT_KNOWN else field_text("shapes", signature)
    return f"{signature.dtype} {shape}".strip()


def _value_of_call(name: str, call: GroupCall) -> str:
    """The value of a field that `differing_field` named, in words."""
    if name == "payload":
        return f"{call.size_bytes} B" if call.size_bytes is not None else _NOT_KNOWN
    if name.startswith("member "):
        place = int(name.removeprefix("member "))
        return words_of(call.members[place - 1]) if place <= len(call.members) else _NOTHING
    return _NOT_KNOWN if getattr(call.signature, name) is NOT_KNOWN else field_text(name, call.signature)


_SHIFTED = 8
"""How many calls must agree after a shift by one, if there are that many."""


def find_divergences(ranks: Sequence[RankCalls], first: int = 1) -> list[Divergence]:
    """Where ranks diverge, in the order in which they issued these calls. Calls are numbered from `first`."""
    by_channel: dict[Channel, list[RankCalls]] = {}
    for one in ranks:
        for channel in one.last:
            by_channel.setdefault(channel, []).append(one)
    differing = [found for channel, members in by_channel.items() for found in _find_differing_calls(channel, members)]
    messages = list(_pair_messages(by_channel, ranks))
    differing += _find_unequal_messages(messages)
    if differing:
        return sorted(differing, key=lambda found: _order_of_divergence(found, ranks))
    lacking = [
        *(found for channel in by_channel for found in _find_ranks_behind(channel, ranks, first) if not channel[2]),
        *_find_unmatched_messages(messages, first),
    ]
    return _select_roots(lacking, ranks) or list(_find_ranks_gone(ranks))


def _find_differing_calls(channel: Channel, members: Sequence[RankCalls]) -> Iterator[Divergence]:
    """The ranks that diverge at the first number of a channel of collectives at which calls differ."""
    if channel[2] or len(members) < 2:
        return
    own = {one.rank: one.calls.get(channel, {}) for one in members}
    own = {rank: calls for rank, calls in own.items() if calls}
    start = max((min(calls) for calls in own.values()), default=0)
    alike = _group_alike(own, start)
    if len(alike) < 2:
        return
    lasts = {one.rank: one.last[channel] for one in members}
    whole = all(one.whole for one in members)
    for number in sorted({n for ranks in alike for n in own[ranks[0]] if n >= start}):
        at_number = [ranks for ranks in alike if number in own[ranks[0]]]
        if found := list(_diverging_at(channel, number, own, at_number, lasts, whole=whole)):
            yield from found
            return


def _diverging_at(
    channel: Channel,
    number: int,
    own: Mapping[int, Mapping[int, GroupCall]],
    alike: Sequence[Sequence[int]],
    lasts: Mapping[int, int],
    *,
    whole: bool,
) -> Iterator[Divergence]:
    """The ranks that diverge in the call of this number. The first of each group of `alike` stands for all of it."""
    weights: Counter[tuple[object, ...]] = Counter()
    for ranks in alike:
        weights[own[ranks[0]][number].identity] += len(ranks)
    standard = max(alike, key=lambda ranks: weights[own[ranks[0]][number].identity])[0]
    usual = own[standard][number]
    most = max(lasts.values())
    waiting = [] if whole else [rank for rank, last in lasts.items() if last == most]
    differs = False
    for ranks in alike:
        rank, call = ranks[0], own[ranks[0]][number]
        if call.identity == usual.identity:
            continue
        lead = lasts[rank] - lasts[standard] if whole else None
        how = _compare_sequences(own[standard], own[rank], number, lead)
        same_fields = not differing_field(call, usual)
        if how == "differs":
            differs = differs or not same_fields
        # Ranks may issue equal calls in another order, so places alone count only if some rank has fewer calls.
        elif not same_fields or min(lasts.values()) < most:
            rest = tuple(other for other in waiting if other not in ranks)
            named = call if how == "extra" else usual
            yield Divergence(how=how, ranks=tuple(ranks), channel=channel, number=number, call=named, waiting=rest)
    calls = {rank: by[number] for rank, by in own.items() if number in by}
    if differs and (found := compare_calls(channel, number, calls)) is not None:
        yield replace(found, waiting=tuple(rank for rank in waiting if rank not in found.ranks))


def _group_alike(own: Mapping[int, Mapping[int, GroupCall]], first: int) -> list[list[int]]:
    """Groups of ranks that issued the same calls from number `first` on."""
    kinds: list[tuple[list[object], list[int]]] = []
    for rank, calls in own.items():
        mine: list[object] = [call.identity for number, call in calls.items() if number >= first]
        for issued, ranks in kinds:
            if issued == mine:
                ranks.append(rank)
                break
        else:
            kinds.append((mine, [rank]))
    return [ranks for _issued, ranks in kinds]


def _compare_sequences(
    usual: Mapping[int, GroupCall], own: Mapping[int, GroupCall], number: int, lead: int | None
) -> str:
    """Whether a rank with the calls `own` skipped the usual call of this number, has an extra one, or another one.

    `lead`: how many more calls it has than the usual rank; None while that may change.
    """
    if (lead is None or lead < 0) and _agree_one_later(own, usual, number):
        return "skipped"
    return "extra" if (lead is None or lead > 0) and _agree_one_later(usual, own, number) else "differs"


def _agree_one_later(one: Mapping[int, GroupCall], other: Mapping[int, GroupCall], number: int) -> bool:
    """Whether the calls of `one` from `number` on are those of `other` from the next number on, as far as both go."""
    pairs = [(one[n], other[n + 1]) for n in range(number, number + _SHIFTED) if n in one and n + 1 in other]
    return bool(pairs) and all(mine.identity == theirs.identity for mine, theirs in pairs)


def _find_ranks_behind(channel: Channel, ranks: Sequence[RankCalls], first: int) -> Iterator[Divergence]:
    """The ranks of a group with the fewest calls, if not all have as many."""
    group = set(channel[1]) or {one.rank for one in ranks if channel in one.last}
    members = [one for one in ranks if one.rank in group and (one.last or one.whole)]
    lasts = {one.rank: one.last.get(channel, first - 1) for one in members}
    least, most = min(lasts.values(), default=0), max(lasts.values(), default=0)
    if least == most:
        return
    number = least + 1
    lacking = tuple(rank for rank, last in lasts.items() if last == least)
    calls = (one.calls.get(channel, {}).get(number) for one in members)
    call = next((found for found in calls if found is not None), None)
    waiting = tuple(one.rank for one in members if lasts[one.rank] >= number and not one.whole)
    yield Divergence(how="behind", ranks=lacking, channel=channel, number=number, call=call, waiting=waiting)


def _find_ranks_gone(ranks: Sequence[RankCalls]) -> Iterator[Divergence]:
    """Ranks that left no calls, if another rank is in a call of a group that they belong to."""
    known = [one for one in ranks if one.last]
    there = {one.rank for one in ranks if not one.lost}
    for one in known:
        latest = one.latest
        lost = tuple(sorted(set(latest[0][1]) - there)) if latest else ()
        if latest is not None and lost and not one.ended:
            channel, number, call = latest
            waiting = tuple(other.rank for other in known if other.last.get(channel) == number)
            yield Divergence(how="gone", ranks=lost, channel=channel, number=number, call=call, waiting=waiting)
            return


def _select_roots(lacking: Sequence[Divergence], ranks: Sequence[RankCalls]) -> list[Divergence]:
    """Of the missing calls, those whose ranks do not wait in another missing call; if all ranks wait, one cycle."""
    if not lacking:
        return []
    waits = {rank for found in lacking for rank in found.waiting}
    by_rank = {one.rank: one for one in ranks}

    def waits_itself(rank: int) -> bool:
        standing = by_rank.get(rank)
        if rank not in waits or standing is None or standing.ended:
            return False
        latest = standing.latest
        return latest is not None and any(
            latest[0] == found.channel and latest[1] >= found.number and rank in found.waiting for found in lacking
        )

    free = [tuple(rank for rank in found.ranks if not waits_itself(rank)) for found in lacking]
    roots = [replace(found, ranks=ranks) for found, ranks in zip(lacking, free, strict=True) if ranks]
    if not roots:
        return [replace(lacking[0], how="cycle", ranks=tuple(sorted(waits)), call=None, waiting=())]
    return sorted(roots, key=lambda found: _order_of_divergence(found, ranks))


def _order_of_divergence(found: Divergence, ranks: Sequence[RankCalls]) -> int:
    """The `order` of the call on the first rank that has it. Ranks that diverge count only where fields differ."""
    for one in ranks:
        call = one.calls.get(found.channel, {}).get(found.number)
        if call is not None and (one.rank not in found.ranks or found.how in ("message", "differs")):
            return call.order
    return 0


_Messages = tuple[Channel, RankCalls, Channel, RankCalls | None]


def _pair_messages(
    by_channel: Mapping[Channel, Sequence[RankCalls]], ranks: Sequence[RankCalls]
) -> Iterator[_Messages]:
    """Each channel of messages and its rank, then those of the other end. Both ends must be counted."""
    counted = {one.rank for one in ranks if one.counted and (one.last or one.whole)}
    for channel, those in by_channel.items():
        group, members, direction = channel
        op, _, peer = direction.partition(" ")
        for one in those if peer else ():
            there = (group, members, f"{'recv' if op == 'send' else 'send'} {one.rank}")
            answer = next((other for other in by_channel.get(there, ()) if other.rank == int(peer)), None)
            if {one.rank, int(peer)} <= counted:
                yield channel, one, there, answer


def _find_unequal_messages(messages: Sequence[_Messages]) -> Iterator[Divergence]:
    """The first message between two ranks whose ends differ in size."""
    for channel, one, there, answer in messages:
        if answer is None or not channel[2].startswith("send"):
            continue
        sent, received = one.calls.get(channel, {}), answer.calls.get(there, {})
        for number in sorted({*sent} & {*received}):
            if sent[number].batched != received[number].batched:
                break  # NCCL may have a communicator for each pair beside the group's, so what meets is not known
            if differing_size(sent[number], received[number]):
                ends = {one.rank: sent[number], answer.rank: received[number]}
                yield Divergence(
                    how="message", ranks=tuple(ends), channel=channel, number=number, call=sent[number], calls=ends
                )
                break


def _find_unmatched_messages(messages: Sequence[_Messages], first: int) -> Iterator[Divergence]:
    """Messages whose other end was not issued: more sends to a peer than receives there, or the reverse."""
    for channel, one, there, answer in messages:
        op, _, peer = channel[2].partition(" ")
        number, latest = (answer.last[there] if answer else first - 1) + 1, one.latest
        inside = latest is not None and latest[0] == channel
        if one.last[channel] >= number and (op == "recv" or inside):  # a send may be over before it is received
            call, ranks = one.calls.get(channel, {}).get(number), (int(peer),)
            yield Divergence(how="behind", ranks=ranks, channel=channel, number=number, call=call, waiting=(one.rank,))
