"""Dumps of the Flight Recorder as calls: what the file has, and unknown the rest; hostile files in one sentence."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.errors import RequestError
from shardproof.harness.traces.calls import Trace, TracedCall
from shardproof.harness.traces.flight_recorder import read_flight_recorder
from tests.harness.hangs.dumped import Recorded

CONFIG = {"0": {"name": "0", "desc": "default_pg", "ranks": "[4, 5, 6]"}}
JOB = (
    Recorded()
    .call("_allgather_base", [[2, 4]], [[6, 4]])
    .call("_reduce_scatter_base", [[6, 4]], [[2, 4]])
    .call("all_to_all", [[5]], [[7]])
    .call("scatter", [[0]], [[3]])
    .call("barrier", [[1]])
    .call("_shuffle", [[2]])
    .coalesced("ALLGATHER_coalesced", [4, 4], [5, 5])
    .coalesced("coalesced", [2], [3], member="all_reduce")
    .batch(("send 0->2", [8]), ("recv 0<-1", [9]), state="scheduled")
    .message("send 0->1", [1], state="started")
)


def dump(**changed: Any) -> dict[str, Any]:
    return {"version": "2.10", "pg_config": CONFIG, "entries": JOB.entries, **changed}


def read(folder: Path, content: Any, *, as_json: bool = False) -> Trace:
    path = folder / "nccl_trace_rank_4"
    path.write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode() if as_json else pickle.dumps(content)
    )
    return read_flight_recorder(path)


@pytest.mark.parametrize("as_json", [False, True])
def test_calls_are_those_of_the_ledger_and_what_is_not_in_the_file_is_unknown(tmp_path: Path, as_json: bool) -> None:
    trace = read(tmp_path, dump(rank=0), as_json=as_json)
    assert [(one.op, one.payload_bytes, one.shapes, one.number, one.peer, one.complete) for one in trace.calls] == [
        ("all_gather", 96, ((6, 4),), 1, None, True),
        ("reduce_scatter", 96, ((6, 4),), 2, None, True),
        ("all_to_all", 20, ((5,),), 3, None, True),
        ("scatter", 12, ((3,),), 4, None, True),
        ("barrier", 0, (), 5, None, True),
        ("other", 8, ((2,),), 6, None, True),
        ("all_gather", 164, ((4, 4), (5, 5)), 7, None, True),
        ("all_reduce", 20, ((2,), (3,)), 8, None, True),
        ("send", 32, ((8,),), None, 6, None),
        ("recv", 36, ((9,),), None, 5, None),
        ("send", 4, ((1,),), None, 5, False),
    ]
    first, coalesced = trace.calls[0], trace.calls[6]
    assert first == TracedCall(
        op="all_gather", name="nccl:_allgather_base", payload_bytes=96, dtype="float32", shapes=((6, 4),),
        group=(4, 5, 6), group_name="0", group_desc="default_pg", group_size=3, number=1, complete=True,
        caller="/home/me/model.py:10 in forward", start_us=0.0,
    )  # fmt: skip
    assert [(one.op, one.name, one.payload_bytes) for one in coalesced.members] == [
        ("broadcast", "nccl:_broadcast_oop", 64), ("broadcast", "nccl:_broadcast_oop", 100),
    ]  # fmt: skip
    assert (trace.rank, trace.world_size, trace.groups, trace.lost, trace.backend) == (
        0,
        3,
        {"0": (4, 5, 6)},
        "",
        "nccl",
    )
    assert [note.partition(" is ")[0] for note in trace.notes] == ["what an all_to_all sends to each rank"]


def test_a_ring_says_what_it_lost_and_a_cut_coalesced_call_is_left_out(tmp_path: Path) -> None:
    for dropped, rest in ((6, 5), (7, 4), (8, 4), (9, 4), (10, 3)):
        trace = read(tmp_path, dump(entries=JOB.entries[dropped:]))
        assert trace.lost.startswith(f"{dropped} entries, which the recorder's ring has dropped (TORCH_FR_BUFFER_SIZE")
        assert len(trace.calls) == rest - (dropped in (6, 9))
    timed = [{**JOB.entries[0], "duration_ms": 0.25}]
    trace = read(tmp_path, dump(entries=timed))
    assert trace.calls[0].device_us == 250 and trace.notes == ()
    assert read(tmp_path, dump(entries=[])).calls == ()


def gloo(number: int, op: str, inputs: list[list[int]], outputs: list[list[int]]) -> dict[str, Any]:
    """An entry as torch 2.13 writes it of gloo."""
    return {
        "record_id": number, "pg_id": 0, "process_group": ["1", "undefined"], "collective_seq_id": number + 1,
        "p2p_seq_id": 0, "op_id": number + 1, "profiling_name": f"gloo:{op}", "is_p2p": False, "retired": True,
        "input_sizes": inputs, "input_dtypes": ["Float"] * len(inputs), "output_sizes": outputs, "state": "scheduled",
        "output_dtypes": ["Float"] * len(outputs), "time_created_ns": 1795971363019214476, "thread_name": "python",
        "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0,
        "frames": [
            {"name": "wrapper", "filename": "/v/lib/python3.11/site-packages/typing_extensions.py", "line": 3140},
            {"name": "__exit__", "filename": "/opt/lib/python3.11/contextlib.py", "line": 144},
            {"name": "main", "filename": "/home/me/train.py", "line": 5},
        ],
    }  # fmt: skip


def test_a_dump_of_gloo_has_no_ranks_no_messages_and_not_all_outputs(tmp_path: Path) -> None:
    calls = [
        gloo(0, "scatter", [[2, 5]], [[5]]),
        gloo(1, "barrier", [], []),
        gloo(2, "all_reduce", [[2], [3]], [[2], [3]]),
        gloo(3, "all_gather", [[2], [3]], [[2, 2]]),
    ]
    config = {"": {"name": "", "desc": "", "ranks": "[]"}}
    trace = read(tmp_path, dump(entries=calls, pg_config=config), as_json=True)
    assert [(one.op, one.payload_bytes, one.complete) for one in trace.calls] == [
        ("scatter", 20, None), ("barrier", 0, None), ("all_reduce", 20, None), ("all_gather", None, None),
    ]  # fmt: skip
    assert {(one.caller, one.group_name, one.group_desc, one.group_size) for one in trace.calls} == {
        ("/home/me/train.py:5 in main", "1", "", None)
    }
    assert (trace.world_size, trace.groups, trace.backend) == (None, {}, "gloo")
    assert trace.notes == ("sends and receives are not in a dump of gloo (the torch profiler records them)",)


def laughs(depth: int) -> bytes:
    """A pickled dict with a key of tuples that hold each other twice: its hash takes 2**depth steps."""
    return b"\x80\x04}K\x01" + b"q\x00h\x00\x86" * depth + b"Ns."


HOSTILE: dict[str, tuple[Any, str]] = {
    "a class": (pickle.dumps({"entries": Path()}), "makes more than plain values"),
    "a call of a function": (b"cos\nsystem\n(S'true'\ntR.", "makes more than plain values"),
    "a set": (pickle.dumps({"entries": {1}}), "makes more than plain values"),
    "a key that takes for ever": (laughs(30), "a tuple where a text must be"),
    "a key of tuples": (pickle.dumps({((1, 2), 3): 1}), "a tuple where a text must be"),
    "nothing": (b"", "it ends in the middle of a pickle"),
    "a list": (pickle.dumps([1]), "must hold one dict"),
    "a negative duration": (
        dump(entries=[{**JOB.entries[0], "duration_ms": -1}]),
        "lasts -1 ms, which must be at least 0",
    ),
    "a duration that is none": (
        b'{"entries": [%s]}' % json.dumps(JOB.entries[0] | {"duration_ms": float("nan")}).encode(),
        "lasts nan ms",
    ),
    "a rank of no world": (dump(rank=3), "is of rank 3 in a world of 3 ranks"),
    "active calls alone": (dump(entries=[JOB.entries[0], JOB.entries[3]]), "has active calls alone"),
    "no entries": ({"version": "2.10"}, "has no `entries`"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    content, told = HOSTILE[name]
    with pytest.raises(RequestError) as refused:
        read(tmp_path, content)
    assert told in str(refused.value) and len(str(refused.value).splitlines()) == 1
    assert "nccl_trace_rank_4: is cut, or is no trace (" in str(refused.value)
    assert str(refused.value).endswith("legal: a file that torch's Flight Recorder wrote, such as nccl_trace_rank_3")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_file_cut_anywhere_or_of_changed_bytes_is_one_sentence_or_a_trace(tmp_path: Path, as_json: bool) -> None:
    needed = "process_group profiling_name collective_seq_id input_sizes input_dtypes output_sizes is_p2p".split()
    whole = dump(entries=[{name: one[name] for name in needed} for one in (JOB.entries[0], JOB.entries[-1])])
    content = json.dumps(whole).encode() if as_json else pickle.dumps(whole)
    assert len(read(tmp_path, content).calls) == 2
    cuts = [content[:end] for end in range(len(content))]
    changed = [content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in range(len(content))]
    torn = 0
    for other in (*cuts, *changed):
        try:
            read(tmp_path, other)
        except RequestError as problem:
            assert len(str(problem).splitlines()) == 1
            torn += 1
    assert torn >= len(cuts)
