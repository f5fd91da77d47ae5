"""Reads what ranks left of a hang: our recorder's parts, and torch's Flight Recorder as pickle or JSON.

A field that is missing, of another type, or out of range is refused in one sentence that names the file.
"""

import csv
import functools
import itertools
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardproof.harness.engines.calls.matching import Channel, GroupCall
from shardproof.harness.engines.calls.signature import NOT_KNOWN, Shapes, Signature
from shardproof.harness.errors import RequestError
from shardproof.harness.hangs.standing import RankStanding, standing_of
from shardproof.harness.interpreter import without_garbage_collection
from shardproof.harness.traces.calls import MOST_RANKS, find_dtype, payload_bytes
from shardproof.harness.traces.fields import as_list, number, numbers, refuse_torn, text
from shardproof.harness.traces.flight_recorder import MESSAGES, load_dump, trace_of

KIND = ("group", "axis", "op", "reduce_op", "dtype", "shape", "root", "peer", "phase", "region", "caller")
"""Fields of a kind of call that our recorder writes."""
RECORD = ("kind", "number", "order", "step", "microbatch")
"""Fields of one call that it writes."""
_NUMBERS = ("root", "peer")
_LEGAL = "the run folder of `shardproof record`, or the files that torch's Flight Recorder wrote"


@without_garbage_collection()  # calls by the million, which all stay
def read_standings(paths: Iterable[str | Path]) -> list[RankStanding]:
    """Where every rank stands, by rank. A folder stands for the dumps in it. Raises RequestError for what is none."""
    by_rank: dict[int, RankStanding] = {}
    for name in paths:
        path = Path(name)
        for dump in _find_dumps(path):
            with refuse_torn("dump", dump, _LEGAL):
                one = _of_part(dump) if dump.is_dir() else _of_file(dump)
            _check_rank(one)
            if one.rank in by_rank:
                other = by_rank[one.rank].source
                raise RequestError(f"dump {one.source}: rank {one.rank} is in {other} too; legal: {_LEGAL}")
            by_rank[one.rank] = one
    if not by_rank:
        raise RequestError(f"dumps: hold no rank; legal: {_LEGAL}")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _find_dumps(path: Path) -> list[Path]:
    """The dumps that a path stands for: a file, or the ranks' parts or files in a folder."""
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
    """A rank of our recorder: what it wrote in silence or at its end; without that, what its ledger ends with."""
    last = folder / "last.json"
    if last.is_file():
        return _of_last(load_dump(last), str(last))
    end = folder / "end.json"
    failed = end.is_file() and bool(load_dump(end).get("failed"))
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
    """The words in which all ranks must agree; one object for all of them, so that comparing them costs little."""
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
