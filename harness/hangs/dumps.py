"""Reads what ranks left of a hang: our recorder's parts, and torch's Flight Recorder as pickle or JSON.

A Flight Recorder file of NCCL is a pickle of plain dicts, lists, texts and numbers. Anything else in it is refused, so
that a dump can run no code. Its rank is the number that ends the file's name (`nccl_trace_rank_3`), as torch writes it.
Format: torch/csrc/distributed/c10d/FlightRecorder.hpp, version 2.
"""

import csv
import json
import pickle
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.errors import RequestError
from harness.hangs.parting import Channel, LastCall, RankStanding
from harness.interpreter import without_garbage_collection

KIND = ("group", "axis", "op", "reduce_op", "dtype", "shape", "root", "peer", "phase", "region", "caller")
"""Fields of a kind of call that our recorder writes."""
RECORD = ("kind", "number", "order", "step", "microbatch")
"""Fields of one call that it writes."""
_LEGAL = "legal: the run folder of `shardproof record`, or the files that NCCL's Flight Recorder wrote"
_MESSAGES = ("send", "recv")


@without_garbage_collection()  # calls by the million, which all stay
def standings(paths: Iterable[str | Path]) -> list[RankStanding]:
    """Where every rank stands, by rank. A folder stands for the dumps in it. Raises RequestError for what is none."""
    by_rank: dict[int, RankStanding] = {}
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise RequestError(f"dump {path}: no such file or folder; {_LEGAL}")
        parts = path / "ranks" if (path / "ranks").is_dir() else path
        dumps = (
            [path] if path.is_file() else [part for part in parts.iterdir() if part.is_dir() and part.name.isdigit()]
        )
        dumps = dumps or [file for file in sorted(path.iterdir()) if file.is_file() and _rank_of(file) is not None]
        for one in (_of_part(dump) if dump.is_dir() else _of_file(dump) for dump in dumps):
            if one.rank in by_rank:
                raise RequestError(f"dump {one.source}: rank {one.rank} is in {by_rank[one.rank].source} too; {_LEGAL}")
            by_rank[one.rank] = one
    if not by_rank:
        raise RequestError(f"dumps: hold no rank; {_LEGAL}")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _of_part(folder: Path) -> RankStanding:
    """A rank of our recorder: what it wrote in silence or at its end; without that, what its ledger ends with."""
    last = folder / "last.json"
    if last.is_file():
        return _of_last(_json(last), str(last))
    end = folder / "end.json"
    failed = end.is_file() and bool(_json(end).get("failed"))
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
    kinds = [dict(zip(KIND, kind, strict=True)) for kind in words["kinds"]]
    ranks = {name: tuple(group["ranks"]) for name, group in words["groups"].items()}
    inside = set(words["inside"])
    signatures = [_signature(kind) for kind in kinds]
    channels = [(kind["group"], ranks[kind["group"]], _direction(kind)) for kind in kinds]
    calls: dict[Channel, dict[int, LastCall]] = {}
    known = [tuple(sys.intern(kind[name]) for name in ("phase", "region", "axis", "caller")) for kind in kinds]
    own = [calls.setdefault(channel, {}) for channel in channels]
    for kind, number, order, step, micro in words["records"]:
        phase, region, axis, caller = known[kind]
        complete = False if order in inside else None
        own[kind][number] = LastCall(signatures[kind], (phase, region, step, micro), axis, caller, order, complete)
    calls = {channel: by for channel, by in calls.items() if by}
    last = {channel: max(by) for channel, by in calls.items()}
    last |= {(group, tuple(own), way): int(number) for group, own, way, number in words.get("numbers", ())}
    return RankStanding(
        rank=words["rank"],
        world_size=words["world_size"],
        source=source,
        calls=calls,
        last=last,
        ended=words["ended"],
        silent_s=float(words["silent_s"]),
        stack=tuple(words["stack"]),
    )


def _signature(kind: Mapping[str, Any]) -> tuple[str, ...]:
    """Words in which all ranks must agree; the texts are shared by all ranks, so that comparing them costs little."""
    root = f"root {kind['root']}" if kind["root"] >= 0 else ""
    shape = "" if kind["op"] == "all_to_all" else kind["shape"]
    return tuple(sys.intern(word) for word in (kind["op"], kind["reduce_op"], kind["dtype"], shape, root))


def _direction(kind: Mapping[str, Any]) -> str:
    return f"{kind['op']} {kind['peer']}" if kind["op"] in _MESSAGES else ""


def _of_file(path: Path) -> RankStanding:
    words = _json(path) if path.read_bytes()[:1] in (b"{", b"[") else _pickled(path)
    if words.get("shardproof") == "last calls":
        return _of_last(words, str(path))
    if "entries" not in words:
        raise RequestError(f"dump {path}: has no `entries`, so it is no Flight Recorder's; {_LEGAL}")
    return _of_flight(words, path)


def _of_flight(words: Mapping[str, Any], path: Path) -> RankStanding:
    """A dump of torch's Flight Recorder: collectives by their number in the group, messages by pair in order."""
    rank = int(words["rank"]) if "rank" in words else _rank_of(path)
    if rank is None:
        raise RequestError(f"dump {path}: its name must end in the rank; legal: nccl_trace_rank_3")
    config = words.get("pg_config") or {}
    ranks = {str(group["name"]): tuple(map(int, re.findall(r"\d+", str(group["ranks"])))) for group in config.values()}
    entries = sorted(words["entries"], key=lambda entry: int(entry.get("record_id", 0)))
    calls: dict[Channel, dict[int, LastCall]] = {}
    for order, entry in enumerate(entries):
        name, description = (str(word) for word in entry["process_group"][:2])
        op = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
        op, _, ends = op.partition(" ")
        members = ranks.get(name, ())
        direction = _flight_direction(op, ends, members) if entry.get("is_p2p") else ""
        own = calls.setdefault((name, members, direction), {})
        number = len(own) + 1 if direction else int(entry["collective_seq_id"])
        if number not in own:  # the members of a coalesced call have one number
            own[number] = _flight_call(entry, op, description or name, order)
    last = {channel: max(by) for channel, by in calls.items()}
    sizes = [len(group) for group in ranks.values()]
    return RankStanding(rank=rank, world_size=max(sizes, default=0), source=str(path), calls=calls, last=last)


def _flight_call(entry: Mapping[str, Any], op: str, axis: str, order: int) -> LastCall:
    dtypes = "+".join(dict.fromkeys(str(word).lower() for word in entry.get("input_dtypes", ())))
    sizes = "" if "to_all" in op or "toall" in op else "+".join("x".join(map(str, s)) for s in entry["input_sizes"])
    frames = entry.get("frames") or ()
    own = next((frame for frame in frames if "/torch/" not in str(frame.get("filename"))), None)
    caller = f"{own['filename']}:{own['line']} in {own['name']}" if own else ""
    done = {"completed": True, "started": False, "scheduled": False}.get(str(entry.get("state")))
    known = None if not entry.get("time_discovered_completed_ns") and entry.get("retired") else done
    return LastCall((op, dtypes, sizes), (), axis, caller, order, known)


def _flight_direction(op: str, ends: str, members: tuple[int, ...]) -> str:
    """ "send 3" of "0->3"; the ends are ranks of the group."""
    found = re.fullmatch(r"(\d+)(->|<-)(\d+)", ends)
    if not found:
        return op
    peer = int(found[3])
    return f"{op} {members[peer] if peer < len(members) else peer}"


def _rank_of(path: Path) -> int | None:
    found = re.search(r"(\d+)(\.json|\.pickle|\.pkl)?$", path.name)
    return int(found[1]) if found else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as problem:
        raise RequestError(f"dump {path}: cannot be read ({problem}); {_LEGAL}") from problem
    if not isinstance(found, dict):
        raise RequestError(f"dump {path}: must hold one JSON object; {_LEGAL}")
    return found


class _Plain(pickle.Unpickler):
    """Unpickles dicts, lists, texts and numbers, and nothing that has a class."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")


def _pickled(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = _Plain(file).load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, OSError) as problem:
        raise RequestError(f"dump {path}: is no dump of plain values ({problem}); {_LEGAL}") from problem
    if not isinstance(found, dict):
        raise RequestError(f"dump {path}: must hold one dict; {_LEGAL}")
    return found
