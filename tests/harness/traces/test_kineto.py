"""One call is one, whatever rows tell of it; what a trace does not know is unknown."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.traces import event_stream
from shardproof.harness.traces.calls import Trace
from shardproof.harness.traces.kineto import NO_CALLS, read_kineto, trace_of
from tests.harness.traces.nccl_trace import Json, call, row, step, trace, written


def read(*rows: Any, **words: Any) -> Trace:
    made = trace([one for part in rows for one in (part if isinstance(part, list) else [part])], **words)
    return trace_of(made["traceEvents"], made, "x.json")


def test_three_rows_are_one_call_and_waits_and_kernels_are_none() -> None:
    early = row("ncclDevKernel_AllReduce", "kernel", 1, 5, 7)
    read_ = read(
        early, step(4, 10, 200), call("all_gather", 64, 20, kernel_us=30), call("all_to_all", 32, 50, bare=True)
    )
    first, second = read_.calls
    assert (first.op, first.payload_bytes, first.dtype, first.group, first.group_size) == (
        "all_gather",
        64,
        "float32",
        (0, 1),
        2,
    )
    assert (first.step, first.device_us, second.op, second.payload_bytes, second.device_us) == (
        4,
        30,
        "all_to_all",
        32,
        None,
    )
    assert read_.lost == "1 kernel of calls that were issued before the trace began"
    assert (read_.rank, read_.world_size, read_.backend) == (0, 2, "nccl")


def test_kernels_of_no_call_are_those_of_earlier_steps_or_calls_that_are_unknown() -> None:
    """A replay of a CUDA graph issues nothing on the host; the device runs behind it."""
    made = call("all_reduce", 64, 20, kernel_us=30)  # the kernel from 40 on
    replayed = row("ncclDevKernel_AllReduce_Sum", "kernel", 300, 5, 7)
    (note,) = read(made, replayed).notes
    assert note.startswith("unknown: the calls of 1 kernel of communication; such are replays of CUDA graphs")
    behind = row("ncclDevKernel_AllReduce_Sum", "kernel", 30, 5, 7, correlation=5)
    late = read(made, behind)
    assert (late.notes, late.lost) == ((), "1 kernel of calls that were issued before the trace began")
    launched = row("cudaGraphLaunch", "cuda_runtime", 5, 5, correlation=5)
    assert (read(made, launched, behind).notes, read(made, launched, behind).lost) == ((note,), "")
    assert read(launched, behind).notes == (note, NO_CALLS)


def test_a_trace_without_calls_says_that_others_may_have_sent() -> None:
    assert read(step(0, 0, 100)).notes == (NO_CALLS,)


def test_a_call_inside_of_a_call_is_how_that_is_carried_out() -> None:
    """barrier of NCCL is an all_reduce."""
    fields: Json = {"Collective name": "barrier", "dtype": "Byte"}
    outer = row("record_param_comms", "cpu_op", 10, 50, **fields)
    (only,) = read(outer, call("all_reduce", 4, 20)).calls
    assert (only.op, only.payload_bytes, only.dtype) == ("barrier", 0, "uint8")


def test_a_trace_of_torch_1_13_has_calls_in_the_rows_of_nccl_and_no_groups() -> None:
    bare = row("record_param_comms", "cpu_op", 10, 10)
    shaped: Json = {"Input Dims": [[3, 5]], "Input type": ["c10::BFloat16"]}
    sent = row("nccl:all_reduce", "user_annotation", 12, 6, **shaped)
    waited = row("record_param_comms", "cpu_op", 30, 1)
    unshaped = [row("record_param_comms", "cpu_op", 40, 10), row("nccl:_all_gather_base", "user_annotation", 42, 6)]
    one, two = read(bare, sent, waited, unshaped).calls
    assert (one.op, one.payload_bytes, one.dtype, one.shapes) == ("all_reduce", 30, "bfloat16", ((3, 5),))
    assert (one.group, one.group_size) == ((), None)
    assert (two.op, two.payload_bytes, two.dtype) == ("all_gather", None, "")


def test_ranks_come_from_the_header_and_a_cut_list_is_none() -> None:
    many = range(40)
    (told,) = read(call("all_reduce", 8, 0, ranks=many), rank=3, world_size=40).calls
    assert told.group == tuple(many)
    cut = {"0": [0, 1, 2]}
    made = trace(call("all_reduce", 8, 0, ranks=many), rank=3, world_size=40, groups=cut)
    made["distributedInfo"]["pg_config"][0]["pg_size"] = 40
    (untold,) = trace_of(made["traceEvents"], made, "x.json").calls
    assert (untold.group, untold.group_size) == ((), 40)
    strided: Json = {"Global rank start": 1, "Global rank stride": 2}
    (apart,) = read(call("all_reduce", 8, 0, ranks=range(40), group="9", **strided), rank=3, world_size=80).calls
    assert apart.group == tuple(range(1, 81, 2))


def test_phases_come_from_autograd_annotations_and_optimizers_and_are_else_unknown() -> None:
    node = row("autograd::engine::evaluate_function: AddBackward0", "cpu_op", 100, 50, 2)
    wrapped = row("DistributedDataParallel.forward", "user_annotation", 20, 30)
    named = row("## Loss ##", "user_annotation", 60, 30)
    stepped = row("Optimizer.step#Adam.step", "user_annotation", 300, 50)
    read_ = read(
        call("broadcast", 8, 0),
        [wrapped, *call("broadcast", 8, 25)],
        [named, *call("all_reduce", 8, 65)],
        [node, *call("all_reduce", 8, 110, tid=2), *call("all_reduce", 8, 200, tid=2)],
        call("all_reduce", 8, 250),
        [stepped, *call("all_gather", 8, 310)],
        call("all_gather", 8, 400),
    )
    phases = ["", "forward", "loss", "backward", "backward", "grad_sync", "step", ""]
    assert [one.phase for one in read_.calls] == phases


def test_a_thread_with_nodes_is_autograds_only_beside_one_of_the_program() -> None:
    """On a CPU backward runs in the program's own thread, where other calls are too."""
    node = row("autograd::engine::evaluate_function: AddBackward0", "cpu_op", 100, 50)
    alone = [node, *call("all_reduce", 8, 200)]
    assert [one.phase for one in read(*alone).calls] == [""]
    assert [one.phase for one in read(step(0, 0, 400), *alone).calls] == [""]
    device = [{**event, "tid": 2} for event in alone if event["cat"] != "kernel"]
    assert [one.phase for one in read(step(0, 0, 400), *device).calls] == ["backward"]


def test_modules_and_lines_come_from_the_python_stack() -> None:
    rows = [
        row("train.py(12): main", "python_function", 0, 100),
        row("nn.Module: Model_0", "python_function", 10, 80),
        row("nn.Module: Linear_3", "python_function", 20, 50),
        row("torch/distributed/distributed_c10d.py(9): all_reduce", "python_function", 21, 40),
    ]
    (told,) = read(*rows, call("all_reduce", 8, 30)).calls
    assert (told.phase, told.module, told.caller) == ("forward", "Model_0.Linear_3", "train.py:12")


def test_exposed_is_what_no_kernel_of_computation_covers() -> None:
    rows = [step(0, 0, 200), row("gemm", "kernel", 30, 20, 8), row("gemm", "kernel", 60, 10, 9)]
    (told,) = read(*rows, call("all_reduce", 8, 20, kernel_us=40)).steps  # 40 to 80
    assert (told.compute_us, told.communication_us, told.exposed_us, told.device_us) == (30, 40, 20, 80)


@pytest.mark.parametrize("chunk", [7, 64, 2**22])
@pytest.mark.parametrize("indent", [None, 2, "profiler"])
def test_events_are_the_same_at_every_size_of_a_chunk_and_in_every_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | str | None
) -> None:
    """A text may hold what ends an event, and an event may hold objects like events."""
    odd = row(
        '}, {"ph": "X" \\" \u00e9', "cpu_op", 1, 1, inner=[{"ph": "X", "a": 1}, {"ph": "X", "cat": "q", "name": "z"}]
    )
    late = {"name": "process_name", "ph": "M", "pid": 0, "args": {}}
    flow = {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 3, "cat": "ac2g", "name": "ac2g"}
    made = trace([odd, flow, *call("all_reduce", 8, 20), odd, late, step(0, 0, 50), *call("broadcast", 8, 60), late])
    path = tmp_path / "x.json"
    if indent == "profiler":
        written(path, made)
    else:
        path.write_text(json.dumps(made, indent=indent if isinstance(indent, int) else None))
    monkeypatch.setattr(event_stream, "_CHUNK_BYTES", chunk)
    stream = event_stream.TraceEvents(path, lambda _category, _name: True)
    assert list(stream) == made["traceEvents"]
    assert (stream.header["distributedInfo"], stream.header["traceName"]) == (made["distributedInfo"], "made")
    assert [one.op for one in read_kineto(path).calls] == ["all_reduce", "broadcast"]


@pytest.mark.parametrize("chunk", [100, 2**22])
def test_a_group_of_which_torch_writes_no_description_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    described: Json = {"Process Group Description": "HOLE"}
    path = written(tmp_path / "x.json", trace([step(0, 0, 99), *call("all_reduce", 8, 20, **described)] * 2))
    path.write_text(path.read_text().replace('"HOLE"', ""))
    monkeypatch.setattr(event_stream, "_CHUNK_BYTES", chunk)
    assert [one.payload_bytes for one in read_kineto(path).calls] == [8]


def test_a_large_trace_takes_a_hundred_bytes_a_row_and_three_thousand_a_call() -> None:
    """Events are made as they are read, so that what grows is what the reader keeps."""

    def peak_bytes(events: Iterator[Json], number: int) -> float:
        tracemalloc.start()
        trace_of(events, trace([])["distributedInfo"], "x.json")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak / number

    frames = (row(f"train.py({n % 50}): f", "python_function", n, 1) for n in range(20_000))
    assert peak_bytes(frames, 20_000) < 100
    calls = (one for n in range(2_000) for one in call("all_reduce", 8, n * 40, kernel_us=5))
    assert peak_bytes(calls, 2_000) < 5_000
