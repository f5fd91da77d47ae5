"""Reads a dump of torch's Flight Recorder, JSON or pickle, as the calls of one rank.

A coalesced call has an entry for each of its members and one without sizes that ends it, all of one number. A batch of
messages ends with such an entry too, but each message is a call of its own. The recorder keeps the latest entries in a
ring. Format: torch/csrc/distributed/c10d/FlightRecorder.hpp, version 2.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardproof.harness.ledger import OTHER
from shardproof.harness.traces.calls import FLIGHT_RECORDER, Trace, TracedCall, find_dtype, find_op, payload_bytes
from shardproof.harness.traces.files import as_list, number, numbers, refuse_torn, text, unpickle

Entry = Mapping[str, Any]
LEGAL = "a file that torch's Flight Recorder wrote, such as nccl_trace_rank_3"
MESSAGES = ("send", "recv")
MOST_BYTES = 2**30
"""The largest file of a dump: a ring of 2,000 entries takes a few megabytes."""
_WRITTEN = ("all_gather", "scatter", "recv")
"""Ops whose payload is their output, which has the same sizes on all ranks of the group."""
_INSTALLED = re.compile(r"^<|/torch/|/(site|dist)-packages/|/lib/python3[.\d]*/")
_NO_MESSAGES = "sends and receives are not in a dump of gloo (the torch profiler records them)"
_NO_SPLITS = "what an all_to_all sends to each rank is not in a Flight Recorder dump (the torch profiler records it)"


def read_flight_recorder(path: Path) -> Trace:
    """The calls in a dump. Raises RequestError for a file that is no dump."""
    with refuse_torn("trace", path, LEGAL):
        return trace_of(load_dump(path), str(path))


def load_dump(path: Path) -> dict[str, Any]:
    """The JSON object or dict of plain values in a file. Raises TypeError, ValueError, or anything for a torn file."""
    with path.open("rb") as file:
        is_json = file.read(1) in (b"{", b"[")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it has {path.stat().st_size:,} bytes, and a dump at most {MOST_BYTES:,}")
    content = path.read_bytes()
    found = json.loads(content.decode()) if is_json else unpickle(content)
    if not isinstance(found, dict):
        raise TypeError(f"a {type(found).__name__} where one object must be")
    return found


def trace_of(dump: Mapping[str, Any], source: str) -> Trace:
    """The calls in the content of a dump.

    Raises TypeError, KeyError or ValueError for fields that the recorder does not write.
    """
    if "entries" not in dump:
        raise ValueError("it has no `entries`, so it is not from the Flight Recorder")
    listed_ranks = ((text(one["name"]), _ranks(one["ranks"])) for one in (dump.get("pg_config") or {}).values())
    groups = {name: ranks for name, ranks in listed_ranks if ranks}  # gloo lists one group without ranks
    entries = sorted(as_list(dump["entries"]), key=lambda entry: number(entry.get("record_id", 0)))
    _check_all_recorded(entries)
    rank, world_size = dump.get("rank"), max(map(len, groups.values()), default=None)
    if rank is not None and not 0 <= number(rank) < (world_size or math.inf):
        raise ValueError(f"it is of rank {rank} in a world of {world_size} ranks")
    together = Counter(_batch_of(entry) for entry in entries if entry.get("is_p2p") and entry.get("p2p_seq_id"))
    calls = [
        _trace_call(those, groups.get(name, ()), batched=together[_batch_of(those[0])] > 1)
        for name, those in _calls(entries)
    ]
    backend = text(entries[0]["profiling_name"]).partition(":")[0] if entries else ""
    lost = _missing_before_first(entries)
    if lost and calls and (calls[0].members or calls[0].shapes is None):
        del calls[0]  # some of its members may be lost too
    return Trace(
        source=source,
        format=FLIGHT_RECORDER,
        rank=rank,
        world_size=world_size,
        calls=tuple(calls),
        groups=groups,
        notes=(
            *([_NO_SPLITS] if any(call.op == "all_to_all" for call in calls) else []),
            *([_NO_MESSAGES] if backend == "gloo" else []),
        ),
        lost=lost,
        backend=backend,
    )


def _ranks(value: Any) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"-?\d+", value))) if isinstance(value, str) else numbers(value)


def _check_all_recorded(entries: Sequence[Entry]) -> None:
    """Raise ValueError if entries between the first and the last are missing: the rank would seem to lack calls."""
    places = [entry["record_id"] for entry in entries if "record_id" in entry]
    if places and places[-1] - places[0] >= len(places):
        raise ValueError("it has active calls alone, so which others were issued is not known (onlyActive=False has)")


def _missing_before_first(entries: Sequence[Entry]) -> str:
    """What is missing before the first entry; "" where that is the first call of the rank."""
    dropped = number(entries[0].get("record_id", 0)) if entries else 0
    if dropped:
        return f"{dropped:,} entries, which the recorder's ring has dropped (TORCH_FR_BUFFER_SIZE makes it longer)"
    first_message = next((entry for entry in entries if entry.get("is_p2p")), {})
    earlier = number(first_message.get("p2p_seq_id", 0)) > 1  # a reset empties the ring, while groups count on
    return "the calls before the recorder was reset" if earlier else ""


def _calls(entries: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    """Each call as the name of its group and its entries: of a message in a batch its own, and the end of the batch."""
    calls: list[tuple[str, list[Entry]]] = []
    latest: dict[object, tuple[int, list[Entry]]] = {}  # the last collective of a group: its number and entries
    batches: dict[object, list[list[Entry]]] = {}  # the messages of a group after it, which may be a batch
    for entry in entries:
        name, own = text(entry["process_group"][0]), [entry]
        group = name, number(entry.get("pg_id", 0))
        if group in batches and _ends(entry):
            for message in batches.pop(group):
                message.append(entry)
        elif entry.get("is_p2p") or _op_word(entry) in MESSAGES:
            those = batches.setdefault(group, [])
            if those and those[0][0].get("p2p_seq_id") != entry.get("p2p_seq_id"):
                those.clear()  # of another batch, or single ones
            those.append(own)
            calls.append((name, own))
        elif group in latest and latest[group][0] == number(entry["collective_seq_id"]):
            latest[group][1].append(entry)
        else:
            batches.pop(group, None)
            latest[group] = number(entry["collective_seq_id"]), own
            calls.append((name, own))
    return calls


def _batch_of(entry: Entry) -> tuple[object, ...]:
    """What identifies the batch of an entry: its messages, and the entry that ends it, have one number."""
    return text(entry["process_group"][0]), entry.get("pg_id", 0), entry.get("p2p_seq_id")


def _op_word(entry: Entry) -> str:
    """The format's name of the op: "send" of "nccl:send 0->1"."""
    name = text(entry["profiling_name"])
    return (name.partition(":")[2] or name).partition(" ")[0]


def _ends(entry: Entry) -> bool:
    """Whether an entry ends a coalesced call or a batch: it has a name for that, and no sizes."""
    no_sizes = not any(as_list(entry[f"{side}_sizes"]) not in ([], [[]], (), ((),)) for side in ("input", "output"))
    return _op_word(entry).endswith("coalesced") and no_sizes


def _trace_call(entries: Sequence[Entry], ranks: tuple[int, ...], *, batched: bool) -> TracedCall:
    """The call of these entries. The payload of a coalesced call is that of its members."""
    first = _one(entries[0], ranks)
    if first.op in MESSAGES:
        # A batch is complete if its end is. Otherwise this is unknown: no version of torch marks its members.
        first = replace(first, batched=batched)
        return first if len(entries) == 1 else replace(first, complete=_complete(entries[1]) or None)
    if len(entries) == 1:
        return first
    ended = _ends(entries[-1])
    members = tuple(_one(entry, ranks) for entry in (entries[:-1] if ended else entries))
    sizes, shapes = [one.payload_bytes for one in members], [one.shapes for one in members]
    ops = {one.op for one in members}
    of_name = find_op(text(entries[-1]["profiling_name"])) if ended else OTHER
    last = _one(entries[-1], ranks)
    return replace(
        last,
        op=of_name if of_name != OTHER else ops.pop() if len(ops) == 1 else OTHER,
        name=last.name if ended else "",
        payload_bytes=None if None in sizes else sum(size for size in sizes if size is not None),
        dtype="+".join(dict.fromkeys(one.dtype for one in members)),
        shapes=None if None in shapes else tuple(shape for those in shapes for shape in those or ()),
        members=members,
    )


def _one(entry: Entry, ranks: tuple[int, ...]) -> TracedCall:
    """The call of one entry, with its payload counted as in the ledger. For the entry that ends a coalesced call the
    payload is not known.
    """
    op, ends = find_op(text(entry["profiling_name"])), text(entry["profiling_name"]).partition(" ")[2]
    side = "output" if op in _WRITTEN and entry.get("output_sizes") else "input"
    sizes = () if op == "barrier" else as_list(entry[f"{side}_sizes"])
    words = tuple(dict.fromkeys(text(word) for word in as_list(entry.get(f"{side}_dtypes") or ())))
    dtypes = [find_dtype(word) for word in words]
    # gloo writes too few output sizes for coalesced all_gathers.
    lacks = side == "output" and len(sizes) < len(as_list(entry["input_sizes"]))
    shapes = None if _ends(entry) or lacks else tuple(map(numbers, sizes))
    name, description = map(text, as_list(entry["process_group"])[:2])
    lasted_ms = entry.get("duration_ms")
    if lasted_ms is not None and not 0 <= lasted_ms < math.inf:
        raise ValueError(f"a call lasts {lasted_ms} ms, which must be at least 0")
    return TracedCall(
        op=op,
        name=text(entry["profiling_name"]),
        payload_bytes=0 if op == "barrier" else payload_bytes(dtypes[0], shapes) if len(dtypes) == 1 else None,
        dtype="+".join(dtype.name if dtype else word.lower() for dtype, word in zip(dtypes, words, strict=True)),
        shapes=shapes,
        group=ranks,
        group_name=name,
        group_desc="" if description == "undefined" else description,
        group_size=len(ranks) or None,
        peer=_peer(ends, ranks),
        number=None if op in MESSAGES else number(entry["collective_seq_id"]),
        complete=_complete(entry),
        caller=_caller(entry),
        start_us=number(entry["time_created_ns"]) / 1000 if entry.get("time_created_ns") is not None else None,
        device_us=float(lasted_ms) * 1000 if lasted_ms is not None else None,
    )


def _peer(ends: str, ranks: tuple[int, ...]) -> int | None:
    """The global rank of the other end of "0->3", which counts ranks in the group; None if it is not known."""
    found = re.fullmatch(r"\d+(->|<-)(\d+)", ends)
    return ranks[int(found[2])] if found and int(found[2]) < len(ranks) else None


def _complete(entry: Entry) -> bool | None:
    """Whether the call has ended. None if it was retired without an end time, before its end was noticed."""
    done = {"completed": True, "started": False, "scheduled": False}.get(text(entry.get("state", "")))
    return None if not entry.get("time_discovered_completed_ns") and entry.get("retired") else done


def _caller(entry: Entry) -> str:
    """The innermost line that is neither torch's nor of an installed package."""
    frames = as_list(entry.get("frames") or ())
    own = next((frame for frame in frames if not _INSTALLED.search(text(frame["filename"]))), None)
    return f"{text(own['filename'])}:{number(own['line'])} in {text(own['name'])}" if own else ""
