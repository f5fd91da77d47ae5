"""The general laws of communication, which hold for any subject, whatever it computes.

Members of a group issue the same sequence of collectives (op, reduce op, dtype). Their payloads have the same bytes,
except in all_to_all, gather, scatter and reduce. In every group sends and receives are equal in number and in bytes.

If the run has a backward, a communication in the forward of a module has its conjugate if autograd needs its gradient
(`Event.needs_gradient`). Over every axis, backward has at least as many all-to-alls of floats, and bytes in them, as
forward needs conjugates, and no more than there are outside of backward. Every such reduce-scatter has an all-gather of
as many bytes in the backward of its module. A recomputed forward counts once, whether autograd needs gradients in its
first pass, its second (a library's checkpoint), or both.

No more than this holds in general: the gradient of a gathered tensor may be sliced instead of reduce-scattered, and
gradients of whole parameters are reduced at any time. Payloads are bytes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from shardproof.harness.engines.calls.matching import Channel, Divergence, GroupCall, RankCalls, find_divergences
from shardproof.harness.engines.calls.signature import NOT_KNOWN, Signature
from shardproof.harness.ledger import AGAIN, BACKWARD, Event
from shardproof.harness.verdicts.facts import Fact, state_fact, state_text

Group = tuple[int, ...]
Groups = dict[tuple[str, Group], dict[int, list[Event]]]
"""Events by axis and group, and by rank in the order of issue."""

_UNEVEN = ("all_to_all", "gather", "scatter", "reduce", "barrier")
_POINT_TO_POINT = ("send", "recv")
_ARGUMENTS = attrgetter("op", "reduce_op", "dtype", "payload_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A law that a run broke, and where."""

    fact: Fact
    ranks: tuple[int, ...]
    phase: str
    region: str


def broken_laws(events: Iterable[Event]) -> list[Broken]:
    """The broken laws, [] if all hold."""
    events = tuple(events)
    groups = group_events(events)
    broken = same_sequence(groups, {rank for _axis, ranks in groups for rank in ranks})
    for (axis, ranks), by_rank in groups.items():
        broken += _check_received_bytes(axis, ranks, by_rank)
    if any(event.phase in (*BACKWARD, "grad_sync") for event in events):
        wide = [event for event in events if event.group_size > 1]
        asked = list(_asked_for(wide))
        broken += _exchanged_back(wide, asked) + _gathered_back(wide, asked)
    return broken


def same_sequence(groups: Groups, ranks: Iterable[int]) -> list[Broken]:
    """Where some of these ranks first make other calls than their group, or in another order; [] if nowhere."""
    calls: dict[int, dict[Channel, dict[int, GroupCall]]] = {rank: {} for rank in ranks}
    for (axis, group), by_rank in groups.items():
        own = {
            rank: [event for event in by_rank.get(rank, ()) if event.op not in _POINT_TO_POINT]
            for rank in group
            if rank in calls
        }
        alike = [list(map(_ARGUMENTS, one)) for one in own.values()]
        if any(one != alike[0] for one in alike):  # most groups agree, and need no search
            for rank, issued in own.items():
                calls[rank][axis, group, ""] = {number: _as_group_call(event) for number, event in enumerate(issued)}
    known = [
        RankCalls(rank=rank, calls=own, last={name: len(by) - 1 for name, by in own.items()}, ended="ended", whole=True)
        for rank, own in calls.items()
    ]
    return [_as_broken_law(found) for found in find_divergences(known, first=0)]


def group_events(events: Iterable[Event]) -> Groups:
    """The events of groups of more than one rank."""
    groups: Groups = {}
    for event in sorted(events, key=attrgetter("rank", "call_index")):
        if event.group_size > 1:
            groups.setdefault((event.axis, event.group), {}).setdefault(event.rank, []).append(event)
    return groups


def _as_group_call(event: Event) -> GroupCall:
    """The call of an event as far as it must agree between ranks. Shapes may differ if bytes do not."""
    return GroupCall(
        Signature(event.op, NOT_KNOWN, event.reduce_op, NOT_KNOWN, event.dtype, NOT_KNOWN),
        (event.phase, event.region, event.step, event.microbatch),
        event.axis,
        event.caller,
        event.call_index,
        size_bytes=None if event.op in _UNEVEN else event.payload_bytes,
    )


def _as_broken_law(found: Divergence) -> Broken:
    call = found.calls.get(found.ranks[-1], found.call)
    phase, region, *_ = call.place if call is not None else ("", "")
    return Broken(fact=state_text(found.text), ranks=found.ranks, phase=str(phase), region=str(region))


def _check_received_bytes(axis: str, ranks: Group, by_rank: Mapping[int, Sequence[Event]]) -> list[Broken]:
    moved = {op: [e for rank in ranks for e in by_rank.get(rank, ()) if e.op == op] for op in _POINT_TO_POINT}
    sent, received = (Counter((e.dtype, e.payload_bytes) for e in moved[op]) for op in _POINT_TO_POINT)
    if sent == received:
        return []
    event = (moved["send"] or moved["recv"])[0]
    fact = state_fact(
        "unequal_messages",
        axis=axis,
        ranks=ranks,
        sent=(sent.total(), _total_bytes(moved["send"])),
        received=(received.total(), _total_bytes(moved["recv"])),
        region=event.region,
        caller=event.caller,
    )
    return [Broken(fact=fact, ranks=ranks, phase=event.phase, region=event.region)]


def _exchanged_back(events: Sequence[Event], asked: Sequence[Event]) -> list[Broken]:
    """All-to-alls of floats: the gradient must return the way that the tensor came, if it is one of those `asked` for.

    A call outside of modules may belong to a forward, whatever its phase is, which follows from what comes next.
    """
    moved, must_move = ([e for e in some if e.op == "all_to_all" and "float" in e.dtype] for some in (events, asked))
    broken = []
    for axis in dict.fromkeys(event.axis for event in moved):
        own, must = ([e for e in some if e.axis == axis] for some in (moved, must_move))
        back = [e for e in own if e.phase == "backward"]
        may = [e for e in own if e.phase not in BACKWARD]
        for there, wrong in ((must, _are_fewer(back, must)), (may, _are_fewer(may, back))):
            if wrong:
                more = Counter(event.region for event in there) - Counter(event.region for event in back)
                last = next((event for event in reversed(there) if event.region in more), None)
                region, caller = (last.region, last.caller) if last else ("", "")
                fact = state_fact(
                    "no_conjugate",
                    axis=axis,
                    forward=(len(there), _total_bytes(there)),
                    backward=(len(back), _total_bytes(back)),
                    region=region,
                    caller=caller,
                )
                broken.append(Broken(fact=fact, ranks=(), phase="backward", region=region))
    return broken


def _asked_for(events: Sequence[Event]) -> Iterator[Event]:
    """The calls in the forward of a module whose gradient must come back, each once even if forward ran twice."""
    asked = [event for event in events if event.needs_gradient]
    first = Counter((event.rank, _kind_of_call(event)) for event in asked if event.phase == "forward")
    for event in asked:
        call = event.rank, _kind_of_call(event)
        if event.phase == "forward" or (event.phase == AGAIN and not first[call]):
            yield event
        elif event.phase == AGAIN:
            first[call] -= 1


def _are_fewer(some: Sequence[Event], others: Sequence[Event]) -> bool:
    return len(some) < len(others) or _total_bytes(some) < _total_bytes(others)


def _gathered_back(events: Sequence[Event], asked: Sequence[Event]) -> list[Broken]:
    """Reduce-scatters in forward: they slice a sum, whose terms all have the whole gradient, so it must be gathered."""
    there = [e for e in asked if e.op == "reduce_scatter"]
    back = [e for e in events if (e.phase, e.op) == ("backward", "all_gather")]
    lacking = Counter(map(_kind_of_call, there)) - Counter(map(_kind_of_call, back))
    broken = []
    for (region, axis, dtype, payload_bytes), calls in reversed(lacking.items()):
        of_kind = (event.caller for event in there if _kind_of_call(event) == (region, axis, dtype, payload_bytes))
        fact = state_fact(
            "not_gathered_back",
            calls=calls,
            payload_bytes=payload_bytes,
            dtype=dtype,
            axis=axis,
            region=region,
            caller=next(of_kind, ""),
        )
        broken.append(Broken(fact=fact, ranks=(), phase="backward", region=region))
    return broken


def _kind_of_call(event: Event) -> tuple[str, str, str, int]:
    return event.region, event.axis, event.dtype, event.payload_bytes


def _total_bytes(events: Sequence[Event]) -> int:
    return sum(event.payload_bytes for event in events)
