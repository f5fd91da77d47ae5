"""Which ranks parted from the others, and at which call: compared by the numbers that each group gives its calls.

Ranks of a group issue the same calls in one order. So, group by group, a rank parted where its call differs from that
of most ranks under the same number. Where its later calls are those of the others one number further, it skipped that
call. Where theirs are its own one number further, it issued one more. Else a rank whose last number is smaller than
that of others never issued the next call. Of several such ranks those are named that do not wait in a call that still
others lack. When all do, they wait for each other. Sources of the idea: torch.distributed.flight_recorder, MUST.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardproof.harness.hangs.messages import unequal, unmatched
from shardproof.harness.hangs.standing import Channel, LastCall, Parted, RankStanding

_SHIFTED = 8
"""Calls that must agree after a shift by one, as far as there are that many."""


def parted(ranks: Sequence[RankStanding]) -> list[Parted]:
    """Where ranks parted, what came first on its ranks first; [] when no rank did."""
    by_channel: dict[Channel, list[RankStanding]] = {}
    for one in ranks:
        for channel in one.last:
            by_channel.setdefault(channel, []).append(one)
    differing = [found for channel, members in by_channel.items() for found in _differing(channel, members)]
    differing += unequal(by_channel)
    if differing:
        return sorted(differing, key=lambda found: _order(found, ranks))
    lacking = [
        *(found for channel in by_channel for found in _behind(channel, ranks) if not channel[2]),
        *unmatched(by_channel),
    ]
    return _roots(lacking, ranks) or list(_gone(ranks))


def _differing(channel: Channel, members: Sequence[RankStanding]) -> Iterator[Parted]:
    """Ranks whose call differs from that of most under the same number: the first such number of the channel."""
    if channel[2] or len(members) < 2:
        return
    own = {one.rank: one.calls.get(channel, {}) for one in members}
    own = {rank: calls for rank, calls in own.items() if calls}
    first = max((min(calls) for calls in own.values()), default=0)
    alike = _alike(own, first)
    if len(alike) < 2:
        return
    lasts = {one.rank: one.last[channel] for one in members}
    most = max(lasts.values())
    behind = min(lasts.values()) < most
    kinds = [ranks[0] for ranks in alike]  # one rank stands for all that issued the same
    numbers = sorted({number for rank in kinds for number in own[rank] if number >= first})
    for number in numbers:
        calls = {rank: own[rank][number] for rank in kinds if number in own[rank]}
        weights: Counter[tuple[object, ...]] = Counter()
        for ranks in alike:
            if ranks[0] in calls:
                weights[_identity(calls[ranks[0]])] += len(ranks)
        if len(weights) < 2:
            continue
        first_rank = {_identity(calls[rank]): rank for rank in sorted(calls, reverse=True)}
        usual = max(weights, key=lambda identity: (weights[identity], -first_rank[identity]))
        standard = next(rank for rank in kinds if rank in calls and _identity(calls[rank]) == usual)
        groups = []
        for group in alike:
            rank = group[0]
            if rank not in calls or _identity(calls[rank]) == usual:
                continue
            how = _how(own[standard], own[rank], number)
            same = _issued(calls[rank]) == _issued(calls[standard])
            if not same or (behind and how != "differs"):
                groups.append((how, tuple(group), rank))
        for how, group_ranks, rank in groups:
            call = calls[rank] if how == "extra" else calls[standard]
            yield Parted(
                how=how,
                ranks=group_ranks,
                channel=channel,
                number=number,
                call=call,
                instead=None if how == "extra" else calls[rank],
                waiting=tuple(rank for rank, last in lasts.items() if last == most and rank not in group_ranks),
            )
        if groups:
            return


def _alike(own: Mapping[int, Mapping[int, LastCall]], first: int) -> list[list[int]]:
    """The ranks that issued the same calls from number `first` on, together."""
    kinds: list[tuple[list[object], list[int]]] = []
    for rank, calls in own.items():
        mine: list[object] = [_identity(call) for number, call in calls.items() if number >= first]
        for issued, ranks in kinds:
            if issued == mine:
                ranks.append(rank)
                break
        else:
            kinds.append((mine, [rank]))
    return [ranks for _issued, ranks in kinds]


def _identity(call: LastCall) -> tuple[object, ...]:
    return call.signature, call.place, call.members


def _issued(call: LastCall) -> tuple[object, ...]:
    return call.signature, call.members


def _how(usual: Mapping[int, LastCall], own: Mapping[int, LastCall], number: int) -> str:
    """Whether `own` lacks the call of this number, has one more there, or has another one."""
    if _agree(own, usual, number, 1):
        return "skipped"
    return "extra" if _agree(usual, own, number, 1) else "differs"


def _agree(one: Mapping[int, LastCall], other: Mapping[int, LastCall], number: int, shift: int) -> bool:
    """Whether the calls of `one` from `number` on are those of `other` a number further, as far as both go."""
    pairs = [(one[n], other[n + shift]) for n in range(number, number + _SHIFTED) if n in one and n + shift in other]
    return bool(pairs) and all(_identity(mine) == _identity(theirs) for mine, theirs in pairs)


def _behind(channel: Channel, ranks: Sequence[RankStanding]) -> Iterator[Parted]:
    """Ranks of the group whose last number is the smallest, when not all are equal."""
    group = set(channel[1]) or {one.rank for one in ranks if channel in one.last}
    members = [one for one in ranks if one.rank in group and one.last]
    lasts = {one.rank: one.last.get(channel, 0) for one in members}
    least, most = min(lasts.values(), default=0), max(lasts.values(), default=0)
    if least == most:
        return
    number = least + 1
    lacking = tuple(rank for rank, last in lasts.items() if last == least)
    calls = (one.calls.get(channel, {}).get(number) for one in members)
    call = next((found for found in calls if found is not None), None)
    waiting = tuple(rank for rank, last in lasts.items() if last >= number)
    yield Parted(how="behind", ranks=lacking, channel=channel, number=number, call=call, waiting=waiting)


def _gone(ranks: Sequence[RankStanding]) -> Iterator[Parted]:
    """Ranks that left nothing, where others are in a call of a group that they share."""
    known = [one for one in ranks if one.last]
    there = {one.rank for one in ranks if not one.lost}
    for one in known:
        latest = one.latest
        lost = tuple(sorted(set(latest[0][1]) - there)) if latest else ()
        if latest is not None and lost and not one.ended:
            channel, number, call = latest
            waiting = tuple(other.rank for other in known if other.last.get(channel) == number)
            yield Parted(how="gone", ranks=lost, channel=channel, number=number, call=call, waiting=waiting)
            return


def _roots(lacking: Sequence[Parted], ranks: Sequence[RankStanding]) -> list[Parted]:
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
        first = lacking[0]
        return [Parted(how="cycle", ranks=tuple(sorted(waits)), channel=first.channel, number=first.number, call=None)]
    return sorted(roots, key=lambda found: _order(found, ranks))


def _order(parting: Parted, ranks: Sequence[RankStanding]) -> int:
    """When the call came among those of the first rank that issued it."""
    for one in ranks:
        call = one.calls.get(parting.channel, {}).get(parting.number)
        if call is not None and (one.rank not in parting.ranks or parting.how == "message"):
            return call.order
    return 0
