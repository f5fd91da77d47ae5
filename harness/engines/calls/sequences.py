"""Where ranks first diverge in sequences of calls: those of a recorded or dry run, or the latest ones, from dumps.

Calls are compared by the numbers that each group gives them. A rank diverges where its call differs from that of most
ranks under the same number. Where its later calls are those of the others one number further, it skipped that call.
Where theirs are its own one number further, it issued one more. Else a rank whose last number is smaller than that of
others never issued the next call. Of several such ranks those are named that do not wait in a call that still others
lack. When all do, they wait for each other. The n-th send of a rank is the n-th receive of its peer. Sources of the
idea: torch.distributed.flight_recorder, MUST.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardproof.harness.engines.calls.matching import (
    Channel,
    Divergence,
    GroupCall,
    RankCalls,
    compare_calls,
    differing_field,
    differing_size,
)

_SHIFTED = 8
"""Calls that must agree after a shift by one, as far as there are that many."""


def find_divergences(ranks: Sequence[RankCalls], first: int = 1) -> list[Divergence]:
    """Where ranks diverge, what came first on its ranks first; [] when none does. Calls are numbered from `first`."""
    by_channel: dict[Channel, list[RankCalls]] = {}
    for one in ranks:
        for channel in one.last:
            by_channel.setdefault(channel, []).append(one)
    differing = [found for channel, members in by_channel.items() for found in _differing(channel, members)]
    messages = list(_messages(by_channel, ranks))
    differing += _unequal(messages)
    if differing:
        return sorted(differing, key=lambda found: _order(found, ranks))
    lacking = [
        *(found for channel in by_channel for found in _behind(channel, ranks, first) if not channel[2]),
        *_unmatched(messages, first),
    ]
    return _roots(lacking, ranks) or list(_gone(ranks))


def _differing(channel: Channel, members: Sequence[RankCalls]) -> Iterator[Divergence]:
    """Ranks whose call differs from that of most under the same number: the first such number of the channel."""
    if channel[2] or len(members) < 2:
        return
    own = {one.rank: one.calls.get(channel, {}) for one in members}
    own = {rank: calls for rank, calls in own.items() if calls}
    start = max((min(calls) for calls in own.values()), default=0)
    alike = _alike(own, start)
    if len(alike) < 2:
        return
    lasts = {one.rank: one.last[channel] for one in members}
    whole = all(one.whole for one in members)
    for number in sorted({n for ranks in alike for n in own[ranks[0]] if n >= start}):  # one stands for all alike
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
    """Ranks that diverge in this call. Where it differs in its place alone, it must explain that ranks lack calls."""
    weights: Counter[tuple[object, ...]] = Counter()
    for ranks in alike:
        weights[own[ranks[0]][number].identity] += len(ranks)
    usual = max(weights, key=lambda identity: weights[identity])  # of those as frequent that of the first rank
    standard = next(ranks[0] for ranks in alike if own[ranks[0]][number].identity == usual)
    most, differ = max(lasts.values()), False
    waiting = [] if whole else [rank for rank, last in lasts.items() if last == most]
    for ranks in alike:
        rank = ranks[0]
        disagree = differing_field(own[rank][number], own[standard][number])
        lead = lasts[rank] - lasts[standard] if whole else None
        how = _how(own[standard], own[rank], number, lead) if own[rank][number].identity != usual else ""
        differ = differ or bool(disagree and how == "differs")
        if how in ("skipped", "extra") and (disagree or min(lasts.values()) < most):
            yield Divergence(
                how=how,
                ranks=tuple(ranks),
                channel=channel,
                number=number,
                call=own[rank if how == "extra" else standard][number],
                waiting=tuple(other for other in waiting if other not in ranks),
            )
    calls = {rank: by[number] for rank, by in own.items() if number in by}
    if differ and (found := compare_calls(channel, number, calls)) is not None:
        yield replace(found, waiting=tuple(rank for rank in waiting if rank not in found.ranks))


def _alike(own: Mapping[int, Mapping[int, GroupCall]], first: int) -> list[list[int]]:
    """The ranks that issued the same calls from number `first` on, together."""
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


def _how(usual: Mapping[int, GroupCall], own: Mapping[int, GroupCall], number: int, lead: int | None) -> str:
    """Whether `own` lacks the call of this number, has one more there, or has another one.

    `lead`: how many calls more it has in all; None while that may change.
    """
    if (lead is None or lead < 0) and _agree(own, usual, number, 1):
        return "skipped"
    return "extra" if (lead is None or lead > 0) and _agree(usual, own, number, 1) else "differs"


def _agree(one: Mapping[int, GroupCall], other: Mapping[int, GroupCall], number: int, shift: int) -> bool:
    """Whether the calls of `one` from `number` on are those of `other` a number further, as far as both go."""
    pairs = [(one[n], other[n + shift]) for n in range(number, number + _SHIFTED) if n in one and n + shift in other]
    return bool(pairs) and all(mine.identity == theirs.identity for mine, theirs in pairs)


def _behind(channel: Channel, ranks: Sequence[RankCalls], first: int) -> Iterator[Divergence]:
    """Ranks of the group whose last number is the smallest, when not all are equal."""
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


def _gone(ranks: Sequence[RankCalls]) -> Iterator[Divergence]:
    """Ranks that left nothing, where others are in a call of a group that they share."""
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


def _roots(lacking: Sequence[Divergence], ranks: Sequence[RankCalls]) -> list[Divergence]:
    """Lacks whose ranks do not wait themselves; when all wait, one cycle."""
    if not lacking:
        return []
    waits = {rank for found in lacking for rank in found.waiting}
    by_rank = {one.rank: one for one in ranks}

    def blocked(rank: int) -> bool:
        standing = by_rank.get(rank)
        if rank not in waits or standing is None or standing.ended:
            return False
        latest = standing.latest
        return latest is not None and any(
            latest[0] == found.channel and latest[1] >= found.number and rank in found.waiting for found in lacking
        )

    free = [tuple(rank for rank in found.ranks if not blocked(rank)) for found in lacking]
    roots = [replace(found, ranks=ranks) for found, ranks in zip(lacking, free, strict=True) if ranks]
    if not roots:
        return [replace(lacking[0], how="cycle", ranks=tuple(sorted(waits)), call=None, waiting=())]
    return sorted(roots, key=lambda found: _order(found, ranks))


def _order(found: Divergence, ranks: Sequence[RankCalls]) -> int:
    """When the call came among those of the first rank that issued it."""
    for one in ranks:
        call = one.calls.get(found.channel, {}).get(found.number)
        if call is not None and (one.rank not in found.ranks or found.how in ("message", "differs")):
            return call.order
    return 0


_Messages = tuple[Channel, RankCalls, Channel, RankCalls | None]


def _messages(by_channel: Mapping[Channel, Sequence[RankCalls]], ranks: Sequence[RankCalls]) -> Iterator[_Messages]:
    """Messages to or from a peer, and what that peer issued in answer; of ranks alone whose messages can be counted."""
    counted = {one.rank for one in ranks if one.counted and (one.last or one.whole)}
    for channel, those in by_channel.items():
        group, members, direction = channel
        op, _, peer = direction.partition(" ")
        for one in those if peer else ():
            there = (group, members, f"{'recv' if op == 'send' else 'send'} {one.rank}")
            answer = next((other for other in by_channel.get(there, ()) if other.rank == int(peer)), None)
            if {one.rank, int(peer)} <= counted:
                yield channel, one, there, answer


def _unequal(messages: Sequence[_Messages]) -> Iterator[Divergence]:
    """The first message of a pair whose ends have other numbers of bytes."""
    for channel, one, there, answer in messages:
        if answer is None or not channel[2].startswith("send"):
            continue
        sent, received = one.calls.get(channel, {}), answer.calls.get(there, {})
        for number in sorted({*sent} & {*received}):
            if differing_size(sent[number], received[number]):
                ends = {one.rank: sent[number], answer.rank: received[number]}
                yield Divergence(
                    how="message", ranks=tuple(ends), channel=channel, number=number, call=sent[number], calls=ends
                )
                break


def _unmatched(messages: Sequence[_Messages], first: int) -> Iterator[Divergence]:
    """Messages whose other end was not issued: more sends to a peer than receives there, or the reverse."""
    for channel, one, there, answer in messages:
        op, _, peer = channel[2].partition(" ")
        number, latest = (answer.last[there] if answer else first - 1) + 1, one.latest
        inside = latest is not None and latest[0] == channel
        if one.last[channel] >= number and (op == "recv" or inside):  # a send may be over before it is received
            call, ranks = one.calls.get(channel, {}).get(number), (int(peer),)
            yield Divergence(how="behind", ranks=ranks, channel=channel, number=number, call=call, waiting=(one.rank,))
