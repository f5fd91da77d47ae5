"""An execution trace of one rank, by torch's ExecutionTraceObserver: what its operators did with the results of calls.

Every operator stands there with its schema, shapes, and the storages that it was given and gave. From that follow the
FLOPs of products, results that no operator read before their memory was overwritten or freed, and gathers of what had
been gathered already and was not changed since. Whatever may be a read counts as one: of a view of a result, or of part
of its storage. What C++ reads without an operator is not seen (the order of buckets that DDP broadcasts once). Format:
torch/csrc/profiler/standalone/execution_trace_observer.cpp, schema 1.1 (torch 2.13).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import MachineError
from harness.predicting.meter import FORMULAS
from harness.witnesses.torch_trace import op_of

_TO_PEERS = ("send", "barrier", "monitored_barrier_", "reduce_", "gather_", "gather_into_tensor_")
"""Operators whose result is not on every rank that issues them."""
_IN_PLACE = ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "send")
"""Operators that read their first argument; the others only write it, and read the second."""
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "resize_")
_BY_BACKENDS = "aten::copy_"
"""By which gloo puts a reduce_scatter's result in its place when it is waited for: it overwrites no result."""
_READS_NOTHING = re.compile(r"aten::(\w+_like|new_\w+|record_stream|is_\w+|detach)$|\w+::wait_tensor$")
_NUMPY = ("aten::resolve_conj", "aten::resolve_neg")
"""Views that `tolist` and `numpy` make before they read the memory themselves."""


class _Range(NamedTuple):
    storage: int
    offset: int
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperator:
    """An operator: `parent` is the node that called it; nodes are numbered in the order in which they began."""

    number: int
    parent: int
    thread: int
    name: str
    schema: str
    inputs: Sequence[Any]
    shapes: Sequence[Any]
    types: Sequence[str]
    outputs: Sequence[Any]
    out_shape: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """One call in order of issue: `unread`, no operator read any part of its result; `repeated`, it gathers what is
    there.
    """

    op: str
    unread: bool
    repeated: bool


def nodes_of(path: Path) -> list[TracedOperator]:
    """The operators of a trace in the order in which they began. Raises MachineError for a file that is none."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["nodes"]
        return sorted(map(_node, rows), key=lambda node: node.number)
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise MachineError(f"execution trace: {path} cannot be read ({problem})", ranks=(), positions=()) from problem


def _node(row: Mapping[str, Any]) -> TracedOperator:
    about = {attribute["name"]: attribute["value"] for attribute in row["attrs"]}
    return TracedOperator(
        number=int(row["id"]),
        parent=int(row["ctrl_deps"]),
        thread=int(about.get("tid", 0)),
        name=str(row["name"]).partition(".")[0],
        schema=str(about.get("op_schema", "")),
        inputs=row["inputs"]["values"],
        shapes=row["inputs"]["shapes"],
        types=row["inputs"]["types"],
        outputs=row["outputs"]["values"],
        out_shape=next(iter(row["outputs"]["shapes"]), None),
    )


def flops(nodes: Iterable[TracedOperator]) -> int:
    """FLOPs of matrix products, convolutions and attention, by torch.utils.flop_counter's formulas.

    An operator that calls another one of them is not counted twice: DTensor's products are those of its shards.
    """
    formulas = {str(packet).replace(".", "::", 1): formula for packet, formula in FORMULAS.items()}
    known = {node.number: node for node in nodes}
    counted = {number: _flops(node, formulas[node.name]) for number, node in known.items() if node.name in formulas}
    for number in list(counted):
        above = known[number].parent
        while above in known and above != known[above].parent:
            counted.pop(above, None)
            above = known[above].parent
    return sum(counted.values())


def _flops(node: TracedOperator, formula: Any) -> int:
    words = [
        shape if kind.startswith("Tensor") else value
        for kind, shape, value in zip(node.types, node.shapes, node.inputs, strict=True)
    ]
    by_name = node.schema.partition("*, ")[2].partition(") ->")[0]
    positional = words[: len(words) - (by_name.count(", ") + 1)] if by_name else words
    shapes = [tuple(size) if isinstance(size, list) else size for size in positional]
    return int(formula(*shapes, out_val=node.out_shape))


def used(nodes: Sequence[TracedOperator], settled: int = 0) -> list[Used]:
    """What became of every call, in order of issue.

    Where nothing has happened to the memory of a result at the end, the first `settled` calls count as unread, the
    others as read: the trace may end before they are.
    """
    calling = {node.parent for node in nodes if node.schema}
    open_: dict[int, list[tuple[int, int, _Range]]] = {}
    unread: set[int] = set()
    known: set[int] = set()
    repeated: set[int] = set()
    changes: dict[int, int] = {}
    gathered: set[object] = set()
    calls: list[TracedOperator] = []
    for node in (node for node in nodes if node.schema):
        read, written, fresh = _effects(node, leaf=node.number not in calling)
        for part in read:
            known |= {call for call, *_ in open_.pop(part.storage, ())}
        for part in (*written, *fresh):
            waiting = open_.get(part.storage, [])
            ends = node.name != _BY_BACKENDS
            gone = [
                one for one in waiting if one[1] == node.thread and (part in fresh or (ends and _covers(part, one[2])))
            ]
            unread |= {call for call, _thread, _part in gone}
            open_[part.storage] = [one for one in waiting if one not in gone]
        if node.name.startswith("c10d::"):
            number, word = len(calls), _word(node)
            calls.append(node)
            if "gather_" in node.name or "_allgather" in node.name:
                key = node.name, tuple((part, changes.get(part.storage, 0)) for part in read)
                repeated |= {number} if key in gathered else set()
                gathered.add(key)
            if word not in _TO_PEERS:
                for part in _ranges(node.inputs[0]):
                    open_.setdefault(part.storage, []).append((number, node.thread, part))
        for part in (*written, *fresh):
            changes[part.storage] = node.number
    unread |= {call for waiting in open_.values() for call, *_ in waiting if call < settled}
    return [
        Used(op=op_of(node.name), unread=number in unread - known, repeated=number in repeated)
        for number, node in enumerate(calls)
    ]


def _word(node: TracedOperator) -> str:
    return node.name.removeprefix("c10d::")


def _covers(part: _Range, other: _Range) -> bool:
    return part.offset <= other.offset and part.offset + part.elements >= other.offset + other.elements


def _effects(node: TracedOperator, *, leaf: bool) -> tuple[list[_Range], list[_Range], list[_Range]]:
    """What an operator reads, what it overwrites, and what it allocated: its outputs that it was not given."""
    if node.name.startswith("c10d::"):
        first, *others = node.inputs
        before = list(_ranges(others[:1]))
        return (
            (list(_ranges(first)) + before, [], []) if _word(node) in _IN_PLACE else (before, list(_ranges(first)), [])
        )
    read: list[_Range] = []
    written: list[_Range] = []
    for argument, value in zip(_arguments(node.schema), node.inputs, strict=False):
        parts = list(_ranges(value))
        if "!)" in argument:
            written += parts
            if argument.endswith(" out") or node.name.partition("::")[2] in _OVERWRITES:
                continue
        elif "(a" in argument and node.name not in _NUMPY:
            continue  # a view
        if not _READS_NOTHING.match(node.name):
            read += parts
    given = {part.storage for part in _ranges(node.inputs)}
    return read, written, [part for part in _ranges(node.outputs) if leaf and part.storage not in given]


def _arguments(schema: str) -> list[str]:
    inside = re.sub(r"=\[[^]]*\]", "", schema.partition("(")[2].rpartition(") ->")[0])
    return [argument.partition("=")[0] for argument in inside.split(", ") if argument != "*"]


def _ranges(value: Any) -> Iterator[_Range]:
    """The tensors in a value: [tensor, storage, offset, elements, bytes of one, device], alone or in lists."""
    if isinstance(value, list | tuple):
        if len(value) == 6 and isinstance(value[5], str) and all(isinstance(part, int) for part in value[:5]):
            yield _Range(value[1], value[2], value[3])
        else:
            for part in value:
                yield from _ranges(part)
