"""Calls in a dump of torch's Flight Recorder: collectives by their number in the group, messages by pair in order.

A coalesced call is several entries of one number, its members, and one that ends it. The recorder keeps the latest
entries alone: where the first ones are gone, messages cannot be counted, and the oldest coalesced call may be cut.
Format: torch/csrc/distributed/c10d/FlightRecorder.hpp, version 2.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.harness.engines.calls.matching import Channel, GroupCall
from shardproof.harness.engines.calls.signature import NOT_KNOWN, Signature
from shardproof.harness.hangs.fields import listed, number, numbers, text
from shardproof.harness.hangs.standing import message_bytes

Entry = Mapping[str, Any]


def calls_of(words: Mapping[str, Any]) -> tuple[list[tuple[int, ...]], dict[Channel, dict[int, GroupCall]], bool]:
    """(the ranks of every group, channel -> number -> call, whether the first entry is the rank's first call).

    Raises TypeError, KeyError or ValueError for fields that are none of the recorder's.
    """
    config = words.get("pg_config") or {}
    ranks = {text(group["name"]): _ranks(group["ranks"]) for group in config.values()}
    entries = sorted(listed(words["entries"]), key=lambda entry: number(entry.get("record_id", 0)))
    whole = not entries or entries[0].get("record_id", 0) == 0
    grouped: dict[Channel, dict[int, list[tuple[int, Entry]]]] = {}
    for order, entry in enumerate(entries):
        name = text(entry["process_group"][0])
        members = ranks.get(name, ())
        op, ends = _op(entry)
        is_message = entry.get("is_p2p") or op == "coalesced"  # which ends a batch of messages
        direction = _direction(op, ends, members) if is_message else ""
        own = grouped.setdefault((name, members, direction), {})
        own.setdefault(len(own) + 1 if direction else number(entry["collective_seq_id"]), []).append((order, entry))
    calls = {channel: {n: _call(those) for n, those in own.items()} for channel, own in grouped.items()}
    if not whole:
        for issued in calls.values():
            first = min(issued)
            if issued[first].signature.op.endswith("_coalesced"):
                del issued[first]
    return [*ranks.values()], {channel: issued for channel, issued in calls.items() if issued}, whole


def _ranks(value: Any) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"-?\d+", value))) if isinstance(value, str) else numbers(value)


def _op(entry: Entry) -> tuple[str, str]:
    """The op, and the ends of a message: "nccl:send 0->1"."""
    name = text(entry["profiling_name"])
    op, _, ends = (name.partition(":")[2] or name).partition(" ")
    return op, ends


def _call(entries: Sequence[tuple[int, Entry]]) -> GroupCall:
    """The call of one number: its one entry, or the one that ends it with the others as its members."""
    ending = next((one for one in entries if _op(one[1])[0].endswith("_coalesced")), None)
    order, entry = ending or entries[0]
    members = tuple(_signature(other) for _, other in entries if other is not entry) if ending else ()
    frames = listed(entry.get("frames") or ())
    own = next((frame for frame in frames if "/torch/" not in str(frame.get("filename"))), None)
    caller = f"{text(own['filename'])}:{number(own['line'])} in {text(own['name'])}" if own else ""
    done = {"completed": True, "started": False, "scheduled": False}.get(text(entry.get("state", "")))
    known = None if not entry.get("time_discovered_completed_ns") and entry.get("retired") else done
    name, description = map(text, listed(entry["process_group"])[:2])
    signature = _signature(entry)
    size = message_bytes(signature.dtype, signature.shapes) if entry.get("is_p2p") else None
    return GroupCall(signature, (), description or name, caller, order, known, members, size)


def _signature(entry: Entry) -> Signature:
    """The words in which all ranks must agree, as far as the recorder knows it; shapes of an all-to-all may differ."""
    op = _op(entry)[0]
    side = "output" if op == "recv" and entry.get("output_sizes") else "input"
    dtypes = "+".join(dict.fromkeys(text(word).lower() for word in listed(entry.get(f"{side}_dtypes") or ())))
    shapes = tuple(numbers(shape) for shape in listed(entry[f"{side}_sizes"]))
    uneven = "to_all" in op or "toall" in op
    return Signature(op, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, dtypes, NOT_KNOWN if uneven else shapes)


def _direction(op: str, ends: str, members: tuple[int, ...]) -> str:
    """ "send 3" of "0->3"; the ends are ranks of the group."""
    found = re.fullmatch(r"(\d+)(->|<-)(\d+)", ends)
    if not found:
        return op
    peer = int(found[3])
    return f"{op} {members[peer] if peer < len(members) else peer}"
