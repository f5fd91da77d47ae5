"""The ledger from a Chrome trace: phases by nesting, groups and dtypes by torch's own log, times by overlap of rows."""

import inspect
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.harness.traces.flight_recorder import trace_of as trace_of_dump
from shardproof.harness.traces.kineto import trace_of
from shardproof.harness.traces.reading import with_log
from shardproof.harness.witnesses.agreement import UNKNOWN, Sighting
from shardproof.harness.witnesses.spread import spread
from shardproof.harness.witnesses.torch_trace import Timed, read_rank, time_sightings
from shardproof.harness.witnesses.torch_trace import sightings as sightings_of_trace

HEADER = {"pg_config": [{"pg_name": "0", "ranks": [0, 1, 2, 3]}, {"pg_name": "7", "ranks": [0, 1]}]}
HEADER["pg_config"].append({"pg_name": "9", "ranks": [2, 3]})


def sightings(trace: dict[str, Any], log: list[dict[str, object]], rank: int) -> list[Sighting]:
    entries = [{**one, "record_id": n, "collective_seq_id": n} for n, one in enumerate(log)]
    read = trace_of(trace["traceEvents"], trace, "x.json")
    return sightings_of_trace(with_log(read, trace_of_dump({"entries": entries}, "x.flight.json")), rank)


def row(name: str, category: str, start: float, length: float, **args: object) -> dict[str, Any]:
    return {"name": name, "cat": category, "ts": start, "dur": length, "tid": 1, "args": args}


def call(name: str, start: float, dims: object, *, at: int = 0, kind: str = "TensorList") -> dict[str, Any]:
    blank: list[object] = [[]] * at
    return row(f"c10d::{name}", "cpu_op", start, 2, **{"Input Dims": [*blank, dims], "Input type": [""] * at + [kind]})


def module(name: str, start: float, length: float) -> dict[str, Any]:
    return row(f"nn.Module: {name}", "python_function", start, length)


def node(start: float, length: float) -> dict[str, Any]:
    return row("autograd::engine::evaluate_function: MmBackward0", "cpu_op", start, length)


def grad_mode(function: Any, start: float) -> dict[str, Any]:
    line = inspect.unwrap(function).__code__.co_firstlineno
    return row(f"torch/autograd/grad_mode.py({line}): {function.__name__}", "python_function", start, 1)


TRACE = {
    "distributedInfo": HEADER,
    "traceEvents": [
        call("broadcast_", 0, [[4]]),
        module("Model_0", 10, 20),
        module("Linear_0", 12, 10),
        call("_allgather_base_", 14, [8, 2], kind="c10::BFloat16"),
        grad_mode(torch.no_grad.__enter__, 31),
        module("Metric_0", 33, 5),
        call("allreduce_", 34, [[1]]),
        grad_mode(torch.no_grad.__exit__, 39),
        module("Loss_0", 41, 5),
        call("allreduce_", 42, [[3]]),
        node(50, 20),
        call("_reduce_scatter_base_", 52, [8, 2], at=1, kind="float"),
        module("Linear_0", 56, 8),
        call("allreduce_", 58, [[5]]),
        call("allreduce_", 66, [[6]]),
        call("reduce_scatter_", 80, [[[2], [2]]], at=1),
        row("Optimizer.step#SGD.step", "user_annotation", 90, 10),
        call("allreduce_", 92, [[7]]),
        call("barrier", 110, []),
    ],
}
LOWERED = ("broadcast", "all_gather", *["all_reduce"] * 8, "barrier")
"""Ops of gloo for these calls; the list form of reduce_scatter is two."""


def entry(name: str, number: int, dtype: str = "Double") -> dict[str, object]:
    dtypes = ["BFloat16"] if name == "all_gather" else [dtype]
    group = "0" if number in {0, 10} else "7"
    return {
        "profiling_name": f"gloo:{name}",
        "process_group": [group, "x"],
        "input_dtypes": dtypes,
        "output_dtypes": [],
        "input_sizes": [],
        "output_sizes": [],
    }


LOG = [entry(name, number) for number, name in enumerate(LOWERED)]


def test_phases_follow_from_rows_and_groups_and_dtypes_from_torchs_own_log_and_the_header() -> None:
    """Phases: from what a row lies in, and from what follows."""
    seen = sightings(TRACE, LOG, 0)
    before = ["data", "forward", "metric", "loss", "backward", "recompute", "backward"]
    assert [s.phase for s in seen] == [*before, "grad_sync", "step", "metric"]
    assert [s.op for s in seen[:5]] == ["broadcast", "all_gather", "all_reduce", "all_reduce", "reduce_scatter"]
    assert [s.groups for s in seen] == [((0, 1, 2, 3),), *[((0, 1),)] * 8, ((0, 1, 2, 3),)]
    sizes = [8 * 4, 2 * 16, 8 * 1, 8 * 3, 4 * 16, 8 * 5, 8 * 6, 8 * 4, 8 * 7, 0]
    assert [s.payload_bytes for s in seen] == sizes


def test_what_a_trace_does_not_hold_is_left_open() -> None:
    """Messages, which may go between stages; gathers after a step; what follows a backward where nothing steps."""
    model = [module("Model_0", 10, 20), module("Linear_0", 12, 10)]
    sent = [call("send", 32, [[[4]]]), call("broadcast_", 34, [[4]])]
    back = [node(50, 20), call("allreduce_", 80, [[7]])]
    stepped = [
        row("Optimizer.step#SGD.step", "user_annotation", 90, 10),
        call("_allgather_base_", 110, [8, 2]),
        call("allreduce_", 112, [[1]]),
        call("allreduce_", 114, [[3]]),
        module("Model_0", 120, 20),
        module("Linear_0", 122, 10),
    ]

    def phases(*rows: Any) -> list[str]:
        return [s.phase for s in sightings({"distributedInfo": HEADER, "traceEvents": [*model, *rows]}, [], 0)]

    assert phases(*sent, *back) == ["", "data", ""]
    assert phases(*sent[:1], *back, *stepped) == ["", "grad_sync", "", "metric", "data"]
    evaluated = [grad_mode(torch.no_grad.__enter__, 0), module("Loss_0", 41, 5), call("allreduce_", 42, [[3]])]
    assert phases(*evaluated) == ["loss"]


@pytest.mark.parametrize("log", [[], LOG[:-1], [*LOG, LOG[-1]], LOG[::-1]])
def test_a_log_that_does_not_reconcile_names_no_group(log: list[dict[str, object]]) -> None:
    seen = sightings(TRACE, log, 0)
    assert {s.groups for s in seen} == {((0, 1, 2, 3), (0, 1))}
    assert seen[0].payload_bytes == UNKNOWN
    assert seen[1].payload_bytes == 32


def issued(op: str, start: float, **ids: object) -> dict[str, Any]:
    return row("record_param_comms", "cpu_op", start, 3, **{"Collective name": op, **ids})


def timed(folder: Path, *ranks: list[dict[str, Any]], **header: Any) -> list[Timed]:
    """The times of the calls in the traces of ranks 0, 1, ..."""
    seen = []
    for rank, rows in enumerate(ranks):
        (folder / f"rank{rank}.trace.json").write_text(json.dumps({"traceEvents": rows, **header}))
        seen += read_rank(folder / f"rank{rank}.trace.json", rank)
    return time_sightings(folder, [replace(one, groups=((0, 1),)) for one in seen])


def test_collectives_are_timed_by_the_backends_rows_and_late_by_the_first_rank(tmp_path: Path) -> None:
    rows = [
        [
            issued("allreduce", 11 + late),
            row("gloo:all_reduce", "user_annotation", 12 + late, 10),
            row("aten::mm", "cpu_op", 5 + late, 8),  # covers one of it
            row("aten::mm", "cpu_op", 15 + late, 4),
            row("aten::add", "cpu_op", 16 + late, 1),
        ]
        for late in (0.0, 7.0)
    ]
    told = timed(tmp_path, *rows, baseTimeNanoseconds=5000)
    assert [(t.duration_us, t.overlapped_us, t.exposed_us) for t in told] == [(10, 5, 5)] * 2
    assert [t.late_us for t in told] == [0, 7]


def test_on_a_gpu_collectives_are_timed_by_the_kernels_that_their_rows_launched(tmp_path: Path) -> None:
    ids = [{"External id": number} for number in range(5)]
    rows = [
        *(issued("allreduce", 11, **ids[1]), issued("all_to_all", 21, **ids[3]), issued("barrier", 31)),
        row("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 100, 30, **ids[1]),
        row("gemm", "kernel", 110, 15, **ids[2]),
        row("ncclDevKernel_SendRecv", "kernel", 140, 8, **ids[3]),
        row("ncclDevKernel_SendRecv", "kernel", 150, 10, **ids[4]),  # launched outside of the trace
        row("aten::mm", "cpu_op", 11, 4),
    ]
    told = timed(tmp_path, rows)
    assert [(t.duration_us, t.overlapped_us, t.exposed_us) for t in told] == [(30, 15, 15), (8, 0, 8)]


def test_the_interval_of_a_median_is_that_of_fair_coins() -> None:
    ten = spread([float(n) for n in range(1, 11)])
    # P(at most 1 of 10 coins) = 11/1024 <= 0.025 < P(at most 2) = 56/1024: the second and the ninth value.
    assert (ten.low, ten.median, ten.high) == (2.0, statistics.median(range(1, 11)), 9.0)
    assert (spread([3.0, 1.0, 2.0]).low, spread([3.0, 1.0, 2.0]).high) == (1.0, 3.0)
