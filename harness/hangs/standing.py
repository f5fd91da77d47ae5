"""Standing of a rank, from its dump: its latest calls, numbered from 1, and where its program is."""

from collections.abc import Iterator
from dataclasses import dataclass

from shardproof.harness.engines.calls.matching import Channel, GroupCall, RankCalls
from shardproof.harness.engines.calls.signature import NOT_KNOWN, Signature
from shardproof.harness.traces.calls import Trace, TracedCall
from shardproof.harness.traces.flight_recorder import MESSAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding(RankCalls):
    """Calls of a rank from the file or folder `source`. `stack`: lines of the program, innermost first."""

    world_size: int
    source: str
    silent_s: float = 0.0
    stack: tuple[str, ...] = ()


def standing_of(trace: Trace, rank: int) -> RankStanding:
    """Where a rank stands by a dump of the Flight Recorder.

    Collectives have the number that their group gives them, messages are counted for each pair of ranks.
    """
    calls: dict[Channel, dict[int, GroupCall]] = {}
    for order, (call, complete) in enumerate(_find_completed_calls(trace)):
        is_message = call.op in MESSAGES
        if is_message and call.peer is None:
            continue
        own = calls.setdefault((call.group_name, call.group, f"{call.op} {call.peer}" if is_message else ""), {})
        number = call.number if call.number is not None else len(own) + 1
        if own and number <= max(own):
            own.clear()  # the group was destroyed and made anew: its numbers start again
        own[number] = GroupCall(
            _signature(call),
            (),
            call.group_desc or f"group {call.group_name}",
            call.caller,
            order,
            complete,
            tuple(map(_signature, call.members)),
            call.payload_bytes if is_message else None,
            call.batched,
        )
    return RankStanding(
        rank=rank,
        world_size=trace.world_size or 0,
        source=trace.source,
        calls=calls,
        last={channel: max(by) for channel, by in calls.items()},
        counted=not trace.lost,
    )


def _find_completed_calls(trace: Trace) -> Iterator[tuple[TracedCall, bool | None]]:
    """Each call, and whether it is complete. A batch that is not known to be, and that nothing follows, is not."""
    last = max((n for n, call in enumerate(trace.calls) if call.op not in MESSAGES), default=-1)
    for n, call in enumerate(trace.calls):
        yield call, False if n > last and call.complete is None else call.complete


def _signature(call: TracedCall) -> Signature:
    """The words in which all ranks must agree, as far as the recorder knows them.

    The shapes of an all-to-all may differ. A coalesced call is compared member by member. It has no name while its rank
    is about to issue further members.
    """
    op = (call.name.partition(":")[2] or call.name).partition(" ")[0] or NOT_KNOWN
    if call.members or call.shapes is None:
        return Signature(op, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN)
    shapes = NOT_KNOWN if call.op == "all_to_all" else call.shapes
    return Signature(op, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, call.dtype, shapes)
