"""After a hang: the last calls of every rank, from our recorder or torch's Flight Recorder, and where ranks diverge.

A dump is the folder of a rank that our recorder wrote, or a file of the Flight Recorder, pickle or JSON. A field that
is missing, of another type, or out of range is refused in one sentence that names the file.
"""

import csv
import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof.harness.engines.calls.matching import Channel, Divergence, GroupCall, RankCalls, call_named
from shardproof.harness.engines.calls.signature import NOT_KNOWN, Shapes, Signature
from shardproof.harness.errors import RequestError, name_ranks
from shardproof.harness.interpreter import without_garbage_collection
from shardproof.harness.traces.calls import MOST_RANKS, Trace, TracedCall, find_dtype, payload_bytes
from shardproof.harness.traces.files import as_list, number, numbers, refuse_torn, text
from shardproof.harness.traces.flight_recorder import MESSAGES, load_dump, trace_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding(RankCalls):
    """Calls of a rank from the file or folder `source`. `stack`: lines of the program, innermost first."""

    world_size: int
    source: str
    silent_s: float = 0.0
    stack: tuple[str, ...] = ()


def standing_of(trace: Trace, rank: int) -> RankStanding:
    """Where a rank stands by a dump of the Flight Recorder.

    Collectives have the number that their group gives them; messages are counted for each pair of ranks.
    """
    calls: dict[Channel, dict[int, GroupCall]] = {}
    for order, (call, complete) in enumerate(_find_completed_calls(trace)):
        is_message = call.op in MESSAGES
        if is_message and call.peer is None:
            continue
        own = calls.setdefault((call.group_name, call.group, f"{call.op} {call.peer}" if is_message else ""), {})
        number = call.number if call.number is not None else len(own) + 1
        if own and number <= max(own):
            own.clear()  # the group was destroyed and made again, and its numbers start again
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
    """Each call, and whether it is complete. The last batch is not, unless it is known to be."""
    last = max((n for n, call in enumerate(trace.calls) if call.op not in MESSAGES), default=-1)
    for n, call in enumerate(trace.calls):
        yield call, False if n > last and call.complete is None else call.complete


def _signature(call: TracedCall) -> Signature:
    """The fields in which all ranks must agree, as far as the recorder knows them.

    The shapes of an all-to-all may differ. A coalesced call is compared member by member. It has no name while its rank
    may issue further members.
    """
    op = (call.name.partition(":")[2] or call.name).partition(" ")[0] or NOT_KNOWN
    if call.members or call.shapes is None:
        return Signature(op, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN)
    shapes = NOT_KNOWN if call.op == "all_to_all" else call.shapes
    return Signature(op, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, call.dtype, shapes)


KIND = ("group", "axis", "op", "reduce_op", "dtype", "shape", "root", "peer", "phase", "region", "caller")
"""Fields of a kind of call that our recorder writes."""
RECORD = ("kind", "number", "order", "step", "microbatch")
"""Fields of one call that it writes."""
_NUMBERS = ("root", "peer")
_LEGAL = (
    "the run folder of `shardproof record`, or the files that torch's Flight Recorder wrote; traces of profilers are "
    "for `shardproof read`"
)


@without_garbage_collection()  # there are millions of calls, and all stay
def read_standings(paths: Iterable[str | Path]) -> list[RankStanding]:
    """Where every rank stands, by rank. A folder stands for its dumps. Raises RequestError if there are none, or for
    one that is no dump.
    """
    by_rank: dict[int, RankStanding] = {}
    given = [Path(name) for name in paths]
    for path in given:
        for dump in _find_dumps(path):
            with refuse_torn("dump", dump, _LEGAL):
                one = _of_part(dump) if dump.is_dir() else _of_file(dump)
            _check_rank(one)
            if one.rank in by_rank:
                other = by_rank[one.rank].source
                raise RequestError(f"dump {one.source}: rank {one.rank} is in {other} too; legal: {_LEGAL}")
            by_rank[one.rank] = one
    if not by_rank:
        raise RequestError(f"dump {', '.join(map(str, given))}: holds the calls of no rank; legal: {_LEGAL}")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _find_dumps(path: Path) -> list[Path]:
    """The dumps of a path: a file, or the ranks' parts or files in a folder."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise RequestError(f"dump {path}: no such file or folder; legal: {_LEGAL}")
    with refuse_torn("dump", path, _LEGAL):
        inside = path / "ranks" if (path / "ranks").is_dir() else path
        parts = [part for part in inside.iterdir() if part.name.isdecimal() and part.is_dir()]
        return parts or [file for file in sorted(path.iterdir()) if file.is_file() and _rank_of(file) is not None]


def _check_rank(one: RankStanding) -> None:
    """Raise RequestError for a rank outside of its world, and for a group of such ranks."""
    world = one.world_size or MOST_RANKS
    ranks = {one.rank, *(rank for _, members, _ in one.last for rank in members)}
    for rank in sorted(ranks):
        if not 0 <= rank < world <= MOST_RANKS:
            rule = f"rank {rank} of a world of {world} cannot be"
            raise RequestError(f"dump {one.source}: {rule}; legal: ranks from 0 in a world of at most {MOST_RANKS}")


def _of_part(folder: Path) -> RankStanding:
    """A rank that our recorder recorded: from the calls that it wrote in a silence or at its end, if there are any."""
    last = folder / "last.json"
    if last.is_file():
        return _of_last(load_dump(last), str(last))
    end = folder / "end.json"
    failed = end.is_file() and bool(load_dump(end).get("failed"))
    if end.is_file() and not failed:  # a recorder writes both files at its end
        raise RequestError(f"dump {folder}: a trace that `shardproof read` read has no last calls; legal: {_LEGAL}")
    ended = "its recorder failed before" if failed else f"it was killed or crashed{_last_row(folder)}"
    return RankStanding(rank=int(folder.name), world_size=0, source=str(folder), ended=ended, lost=not failed)


def _last_row(folder: Path) -> str:
    ledger = folder / "ledger.csv"
    lines = ledger.read_text(encoding="utf-8").split("\n")[:-1] if ledger.is_file() else []
    if len(lines) < 2:
        return ""
    row = next(csv.DictReader([lines[0], lines[-1]]))
    where = row["region"] or row["phase"]
    return f"; the last call it completed: {row['op']} over {row['axis']}, {where}, at {row['caller']}"


def _of_last(words: Mapping[str, Any], source: str) -> RankStanding:
    kinds = [_kind_of_values(kind) for kind in as_list(words["kinds"])]
    ranks = {name: numbers(group["ranks"]) for name, group in words["groups"].items()}
    inside = set(numbers(words["inside"]))
    signatures = [
        _make_signature(*(kind[name] for name in ("op", "reduce_op", "dtype", "shape", "root"))) for kind in kinds
    ]
    channels = [(kind["group"], ranks[kind["group"]], _direction_of_kind(kind)) for kind in kinds]
    sizes = [payload_bytes(find_dtype(one.dtype), one.shapes) if one.op in MESSAGES else None for one in signatures]
    calls: dict[Channel, dict[int, GroupCall]] = {}
    known = [tuple(sys.intern(kind[name]) for name in ("phase", "region", "axis", "caller")) for kind in kinds]
    own = [calls.setdefault(channel, {}) for channel in channels]
    records = words["records"]
    if {*map(type, itertools.chain.from_iterable(records))} - {int}:
        raise TypeError("a record of other than whole numbers")
    for kind, count, order, step, micro in records:  # millions
        phase, region, axis, caller = known[kind]
        complete = False if order in inside else None
        place = (phase, region, step, micro)
        own[kind][count] = GroupCall(signatures[kind], place, axis, caller, order, complete, size_bytes=sizes[kind])
    calls = {channel: by for channel, by in calls.items() if by}
    last = {channel: max(by) for channel, by in calls.items()}
    for group, members, way, count in words.get("numbers", ()):
        last[text(group), numbers(members), text(way)] = number(count)
    return RankStanding(
        rank=number(words["rank"]),
        world_size=number(words["world_size"]),
        source=source,
        calls=calls,
        last=last,
        ended=text(words["ended"]),
        silent_s=float(words["silent_s"]),
        stack=tuple(map(text, as_list(words["stack"]))),
    )


def _kind_of_values(values: Any) -> dict[str, Any]:
    kind = dict(zip(KIND, as_list(values), strict=True))
    return {name: number(value) if name in _NUMBERS else text(value) for name, value in kind.items()}


@functools.lru_cache(maxsize=4096)
def _make_signature(op: str, reduce_op: str, dtype: str, shape: str, root: int) -> Signature:
    """The fields in which all ranks must agree; one object for equal ones, so that comparing them is cheap."""
    shapes: Shapes = tuple(tuple(int(size) for size in part.split("x") if size) for part in shape.split("+"))
    return Signature(op, NOT_KNOWN, reduce_op, root, dtype, NOT_KNOWN if op == "all_to_all" else shapes)


def _direction_of_kind(kind: Mapping[str, Any]) -> str:
    return f"{kind['op']} {kind['peer']}" if kind["op"] in MESSAGES else ""


def _of_file(path: Path) -> RankStanding:
    words = load_dump(path)
    if words.get("shardproof") == "last calls":
        return _of_last(words, str(path))
    trace = trace_of(words, str(path))
    rank = trace.rank if trace.rank is not None else _rank_of(path)
    if rank is None:
        raise RequestError(f"dump {path}: its name must end in the rank; legal: nccl_trace_rank_3")
    return standing_of(trace, rank)


def _rank_of(path: Path) -> int | None:
    found = re.search(r"(\d+)(\.json|\.pickle|\.pkl)?$", path.name)
    return int(found[1]) if found else None


_MOST = 8
"""The most ranks, or findings, that are listed one by one."""


def lines_of_findings(ranks: Sequence[RankStanding], divergences: Sequence[Divergence]) -> Iterator[str]:
    """The findings, the first one with the places of its ranks; a sentence if no rank is seen to diverge."""
    silent = max((one.silent_s for one in ranks), default=0.0)
    about = f", silent for {silent:g} s" if silent else ""
    yield f"{len(ranks)} rank{'s' * (len(ranks) != 1)}{about}"
    missing = sorted(set(range(max((one.world_size for one in ranks), default=0))) - {one.rank for one in ranks})
    if missing:
        yield f"{name_ranks(missing)} left no dump"
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
    """A sentence if no rank is seen to diverge: a rank that left no calls may have."""
    unknown = sorted({*missing, *(one.rank for one in ranks if not one.last)})
    known = [one.rank for one in ranks if one.last]
    if not known:
        return f"nothing to compare: {name_ranks(unknown)} left no calls"
    if unknown:
        same = f"{name_ranks(known)} issued the same calls in every group that they share" if len(known) > 1 else ""
        apart = (
            f"{name_ranks(unknown)} left no calls, so that {'it' if len(unknown) == 1 else 'they'} may have diverged"
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
