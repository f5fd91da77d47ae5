"""Findings after a hang, in lines: the ranks that parted and their call first, then where the others stand."""

import itertools
from collections.abc import Iterator, Sequence

from shardproof.harness.errors import ranks_text
from shardproof.harness.hangs.standing import Channel, LastCall, Parted, RankStanding, words_of

_MOST = 8
"""Ranks, or findings, that are listed one by one."""


def lines(ranks: Sequence[RankStanding], partings: Sequence[Parted]) -> Iterator[str]:
    """The findings, the first one with the standing of its ranks; a sentence when no rank is seen to part."""
    silent = max((one.silent_s for one in ranks), default=0.0)
    about = f", silent for {silent:g} s" if silent else ""
    yield f"{len(ranks)} ranks{about}"
    missing = sorted(set(range(max((one.world_size for one in ranks), default=0))) - {one.rank for one in ranks})
    if missing:
        yield f"{_named(missing)} left no dump"
    for one in [one for one in ranks if one.ended][:_MOST]:
        yield f"rank {one.rank}: {one.ended}"
    if not partings:
        yield _no_difference(ranks, missing)
        return
    for place, finding in enumerate(partings[:_MOST]):
        yield _finding(finding)
        if not place:
            yield from _standing(finding, ranks)
    if len(partings) > _MOST:
        yield f"and {len(partings) - _MOST} findings more"


def _no_difference(ranks: Sequence[RankStanding], missing: Sequence[int]) -> str:
    """Words when no rank is seen to part: of ranks that left their calls alone."""
    unknown = sorted({*missing, *(one.rank for one in ranks if not one.last)})
    known = [one.rank for one in ranks if one.last]
    if not known:
        return f"nothing to compare: {_named(unknown)} left no calls"
    if unknown:
        same = f"{_named(known)} issued the same calls in every group that they share" if len(known) > 1 else ""
        apart = f"{_named(unknown)} left no calls, so that {'it' if len(unknown) == 1 else 'they'} may have parted"
        return "; ".join(filter(None, (same, apart)))
    return "no rank parted: in every group all ranks issued the same calls, as far as the dumps reach back"


def _finding(parting: Parted) -> str:
    who, event = _named(parting.ranks), f"event {parting.number}{_of(parting.channel, parting.call)}"
    what = f": {parting.call.words}" if parting.call is not None else ""
    if parting.how == "cycle":
        return f"{who} wait for each other: every one of them is in a call that another has not issued"
    if parting.how == "extra":
        return f"{who} issued {event}, which no other rank issued{what}"
    if parting.how == "message" and parting.call is not None and parting.instead is not None:
        sent, received = (words_of(call.signature[1:]) for call in (parting.call, parting.instead))
        sender, receiver = parting.ranks
        return f"rank {sender} sends {sent} as {event}, where rank {receiver} receives {received}{_at(parting)}"
    if parting.how == "differs" and parting.instead is not None:
        if found := _member(parting.instead, parting.call):
            place, own, usual = found
            return f"{who} issued {own} as member {place} of {event}, where the others issued {usual}{_at(parting)}"
        return f"{who} issued {parting.instead.words} as {event}, where the others issued{what[1:]}"
    if parting.how == "gone":
        are = "is" if len(parting.ranks) == 1 else "are"
        return f"{who} {are} gone, and {_named(parting.waiting)} issued last {event}{what}"
    wait = (
        f"; {_named(parting.waiting)} {'wait' if len(parting.waiting) > 1 else 'waits'} for it"
        if parting.waiting
        else ""
    )
    return f"{who} never issued {event}{what}{wait if parting.how == 'behind' else ''}"


def _member(own: LastCall, usual: LastCall | None) -> tuple[int, str, str] | None:
    """(number, own call, the others' call) of the first member in which two coalesced calls of one op differ."""
    if usual is None or own.signature != usual.signature:
        return None
    pairs = enumerate(itertools.zip_longest(own.members, usual.members, fillvalue=("nothing",)), 1)
    return next(((place, words_of(a), words_of(b)) for place, (a, b) in pairs if a != b), None)


def _at(parting: Parted) -> str:
    call = parting.instead
    return f", at {call.caller}" if call is not None and call.caller else ""


def _of(channel: Channel, call: LastCall | None) -> str:
    """ " of tp (0-3)", and for a message its direction too: " of tp (0-3) send 3"."""
    axis = call.axis if call is not None else channel[0]
    return f" of {axis} ({ranks_text(channel[1])})" + (f" {channel[2]}" if channel[2] else "")


def _standing(parting: Parted, ranks: Sequence[RankStanding]) -> Iterator[str]:
    """Where the ranks that parted are, and one of those that wait."""
    by_rank = {one.rank: one for one in ranks}
    for rank in [*parting.ranks[:_MOST], *parting.waiting[:1]]:
        one = by_rank.get(rank)
        latest = None if one is None or one.ended else one.latest
        if one is not None and latest is not None:
            channel, number, call = latest
            is_in = "is in" if call.complete is False else "issued last"
            yield f"  rank {rank} {is_in} event {number}{_of(channel, call)}: {call.words}"
            if one.stack:
                yield f"    its program is at {one.stack[0]}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"
