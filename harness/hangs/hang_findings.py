"""Findings after a hang, in lines: the ranks that diverge and their call first, then where the others stand."""

from collections.abc import Iterator, Sequence

from shardproof.harness.engines.calls.matching import Divergence, call_named, ranks_named
from shardproof.harness.hangs.standing import RankStanding

_MOST = 8
"""Ranks, or findings, that are listed one by one."""


def lines_of_findings(ranks: Sequence[RankStanding], divergences: Sequence[Divergence]) -> Iterator[str]:
    """The findings, the first one with the standing of its ranks; a sentence when no rank is seen to diverge."""
    silent = max((one.silent_s for one in ranks), default=0.0)
    about = f", silent for {silent:g} s" if silent else ""
    yield f"{len(ranks)} ranks{about}"
    missing = sorted(set(range(max((one.world_size for one in ranks), default=0))) - {one.rank for one in ranks})
    if missing:
        yield f"{ranks_named(missing)} left no dump"
    for one in [one for one in ranks if one.ended][:_MOST]:
        yield f"rank {one.rank}: {one.ended}"
    if not divergences:
        yield _no_difference(ranks, missing)
        return
    for place, finding in enumerate(divergences[:_MOST]):
        yield finding.text
        if not place:
            yield from _describe_standings(finding, ranks)
    if len(divergences) > _MOST:
        yield f"and {len(divergences) - _MOST} more findings"


def _no_difference(ranks: Sequence[RankStanding], missing: Sequence[int]) -> str:
    """What is known when no rank is seen to diverge: a rank that left no calls may have."""
    unknown = sorted({*missing, *(one.rank for one in ranks if not one.last)})
    known = [one.rank for one in ranks if one.last]
    if not known:
        return f"nothing to compare: {ranks_named(unknown)} left no calls"
    if unknown:
        same = f"{ranks_named(known)} issued the same calls in every group that they share" if len(known) > 1 else ""
        apart = (
            f"{ranks_named(unknown)} left no calls, so that {'it' if len(unknown) == 1 else 'they'} may have diverged"
        )
        return "; ".join(filter(None, (same, apart)))
    return "no rank diverges: in every group all ranks issued the same calls, as far back as the dumps reach"


def _describe_standings(found: Divergence, ranks: Sequence[RankStanding]) -> Iterator[str]:
    """Where the ranks that diverge are, and one of those that wait."""
    by_rank = {one.rank: one for one in ranks}
    for rank in [*found.ranks[:_MOST], *found.waiting[:1]]:
        one = by_rank.get(rank)
        latest = None if one is None or one.ended else one.latest
        if one is not None and latest is not None:
            channel, number, call = latest
            is_in = "is in" if call.complete is False else "issued last"
            yield f"  rank {rank} {is_in} {call_named(channel, number, call)}: {call.words}"
            if one.stack:
                yield f"    its program is at {one.stack[0]}"
