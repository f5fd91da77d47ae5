"""Reads what ranks left of a hang: the parts of a run folder of `shardproof record`."""

from __future__ import annotations

import csv
import gc
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.errors import RequestError
from harness.hangs.parting import Channel, LastCall, RankStanding

KIND = ("group", "axis", "op", "reduce_op", "dtype", "shape", "root", "peer", "phase", "region", "caller")
"""What our recorder writes of a kind of call."""
RECORD = ("kind", "number", "order", "step", "microbatch")
"""What it writes of one call."""
_LEGAL = "legal: the run folder of `shardproof record`, or a last.json in it; torchfrtrace reads NCCL's Flight Recorder"
_MESSAGES = ("send", "recv")


def standings(paths: Iterable[str | Path]) -> list[RankStanding]:
    """Where every rank stands, by rank. A folder stands for the dumps in it. Raises RequestError for what is none."""
    with _uncollected():
        return _standings(paths)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is looked for while calls by the million are made, which all stay: it takes half of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _standings(paths: Iterable[str | Path]) -> list[RankStanding]:
    found: dict[int, RankStanding] = {}
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise RequestError(f"dump {path}: no such file or folder; {_LEGAL}")
        for one in _of_folder(path) if path.is_dir() else [_of_file(path)]:
            if one.rank in found:
                raise RequestError(f"dump {one.source}: rank {one.rank} is in {found[one.rank].source} too; {_LEGAL}")
            found[one.rank] = one
    if not found:
        raise RequestError(f"dumps: hold no rank; {_LEGAL}")
    return [found[rank] for rank in sorted(found)]


def _of_folder(path: Path) -> list[RankStanding]:
    parts = path / "ranks" if (path / "ranks").is_dir() else path
    numbered = [folder for folder in parts.iterdir() if folder.is_dir() and folder.name.isdigit()]
    if numbered:
        return [_of_part(folder) for folder in numbered]
    return [_of_file(file) for file in sorted(path.glob("*.json"))]


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
    channels = [_channel(kind["group"], ranks[kind["group"]], _direction(kind)) for kind in kinds]
    calls: dict[Channel, dict[int, LastCall]] = {}
    known = [tuple(sys.intern(kind[name]) for name in ("phase", "region", "axis", "caller")) for kind in kinds]
    own = [calls.setdefault(channel, {}) for channel in channels]
    for kind, number, order, step, micro in words["records"]:
        phase, region, axis, caller = known[kind]
        complete = False if order in inside else None
        own[kind][number] = LastCall(signatures[kind], (phase, region, step, micro), axis, caller, order, complete)
    calls = {channel: by for channel, by in calls.items() if by}
    last = {channel: max(by) for channel, by in calls.items()}
    last |= {_channel(*one[:3]): int(one[3]) for one in words.get("numbers", ())}
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
    """What all ranks must agree in; its texts are shared by all ranks, so that comparing them costs little."""
    root = f"root {kind['root']}" if kind["root"] >= 0 else ""
    shape = "" if kind["op"] == "all_to_all" else kind["shape"]
    return tuple(sys.intern(word) for word in (kind["op"], kind["reduce_op"], kind["dtype"], shape, root))


def _direction(kind: Mapping[str, Any]) -> str:
    return f"{kind['op']} {kind['peer']}" if kind["op"] in _MESSAGES else ""


def _channel(group: str, ranks: Iterable[int], direction: str) -> Channel:
    return group, tuple(ranks), direction


def _of_file(path: Path) -> RankStanding:
    words = _json(path)
    if words.get("shardproof") != "last calls":
        raise RequestError(f"dump {path}: has no last calls of a rank; {_LEGAL}")
    return _of_last(words, str(path))


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as problem:
        raise RequestError(f"dump {path}: cannot be read ({problem}); {_LEGAL}") from problem
    if not isinstance(found, dict):
        raise RequestError(f"dump {path}: must hold one JSON object; {_LEGAL}")
    return found
