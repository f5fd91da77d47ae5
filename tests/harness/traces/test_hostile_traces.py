"""Traces of the torch profiler cut anywhere, with changed bits, or fields of another type: a sentence, or rows."""

import copy
import gzip
import json
from functools import reduce
from pathlib import Path
from typing import Any

from shardproof.harness.errors import RequestError
from shardproof.harness.programs.traced import ledger_rows, world_of, write_folder
from shardproof.harness.traces.calls import sentences
from shardproof.harness.traces.reading import read_traces
from shardproof.reports.programs.unlike import find_unlike_steps
from shardproof.reports.stored.frames import load
from tests.harness.hangs.dumped import leaves
from tests.harness.traces.nccl_trace import call, row, step, trace

PEER: dict[str, Any] = {"Dst Rank": 1}
ROWS = [
    step(3, 1, 100),
    row("nn.Module: Net_0", "python_function", 2, 50),
    *call("all_reduce", 32, 5, kernel_us=9),
    *call("send", 16, 30, **PEER),
    row("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 60, 5, 2),
]
ODD: list[Any] = [None, -7, 10**12, 10**30, "x", [[]], {}, float("nan"), "9" * 5000, "[0, 1"]


def refused(folder: Path, content: bytes) -> bool:
    """Whether a file is refused, in one sentence; of any other there are rows, and what they lack is said."""
    path = folder / "rank0.json"
    path.write_bytes(content)
    try:
        traces = read_traces([str(path)])
        world_size = world_of(traces)
    except RequestError as problem:
        assert len(str(problem).splitlines()) == 1
        return True
    assert [list(ledger_rows(one, "x", world_size, 0.0)) for one in traces]
    assert len(sentences(traces, world_size)) < 100
    return False


def test_a_trace_cut_anywhere_or_of_changed_bits_is_one_sentence_or_rows(tmp_path: Path) -> None:
    whole = json.dumps(trace(ROWS[:2] + ROWS[4:6])).encode()
    packed = gzip.compress(whole)
    assert not refused(tmp_path, whole) and not refused(tmp_path, packed)
    ends = len(whole.rstrip())
    assert all(refused(tmp_path, whole[:end]) for end in range(0, ends, 3))
    assert all(refused(tmp_path, packed[:end]) for end in range(2, len(packed)))
    for content in (whole, packed):
        for at in range(0, len(content), 2):
            refused(tmp_path, content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])


def test_a_field_of_another_type_is_one_sentence_or_no_matter(tmp_path: Path) -> None:
    whole = trace(ROWS)
    number = 0
    for path in [*leaves(whole)][1:]:
        for odd in ODD:
            changed = copy.deepcopy(whole)
            reduce(lambda part, key: part[key], path[:-1], changed)[path[-1]] = odd
            number += refused(tmp_path, json.dumps(changed).encode())
    assert number > 200


def test_steps_are_compared_without_unknown_bytes_and_without_what_is_outside_of_them(tmp_path: Path) -> None:
    unknown = [row("c10d::allreduce_", "cpu_op", at, 5) for at in (5, 20, 115, 300)]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(trace([step(3, 1, 100), step(4, 110, 100), *unknown])))
    run = load(write_folder(read_traces([str(path)]), tmp_path / "runs", "job", ["read"], {}))
    assert (run.ledger["step"] == -1).sum() == 1 and run.ledger["payload_bytes"].isna().all()
    assert list(find_unlike_steps(run, "step")) == ["step 3, unlike step 4: 1 more, first all_reduce"]
