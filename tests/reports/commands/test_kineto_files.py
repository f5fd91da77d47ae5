"""A run as the torch profiler's files: read back they are the ledger, and HTA finds its calls and bytes."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from shardproof import run as run_cases
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.programs.traced import write_folder
from shardproof.harness.traces.calls import find_dtype
from shardproof.harness.traces.kineto import read_kineto
from shardproof.reports.commands.kineto_files import UNEVEN, add_durations, write_kineto
from shardproof.reports.stored.frames import Run, load
from tests.harness.command_line import CommandLine
from tests.harness.traces.nccl_trace import call, row, step, trace, written

SMALL = "layers=1 hidden=16 heads=2 vocab=24 seq=8"
LAYOUTS = f"mode=tp-sp tp=2 dp=2 {SMALL}", f"mode=tp tp=2 pp=2 micro=2 layers=2 {SMALL[9:]}"


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two layouts of our decoder, with messages, on four ranks."""
    return load(run_cases(LAYOUTS, SUBJECT, out=tmp_path_factory.mktemp("layouts")).path)


def told(run: Run, case: str, rank: int) -> list[tuple[Any, ...]]:
    """The calls of a rank in the ledger, in order of time: op, bytes, dtype, group's name and size, step."""
    events = run.ledger[(run.ledger["case"] == case) & (run.ledger["rank"] == rank)]
    ordered = events.sort_values(["start_us", "call_index"], kind="stable").astype({"op": "str", "axis": "str"})
    names = ["op", "payload_bytes", "dtype", "axis", "group_size", "step"]
    return [*ordered[names].itertuples(index=False, name=None)]


def test_the_files_read_back_are_the_ledger(layouts: Run, tmp_path: Path) -> None:
    assert write_kineto(layouts, tmp_path) == []
    for number, case in enumerate(layouts.cases["case"], 1):
        for rank in range(4):
            trace = read_kineto(tmp_path / f"case{number}" / f"rank{rank}.json")
            calls = [
                (one.op, one.payload_bytes, one.dtype, one.group_desc, one.group_size, one.step) for one in trace.calls
            ]
            assert calls == told(layouts, case, rank) and len(calls) > 20
            assert (trace.rank, trace.world_size, trace.lost) == (rank, 4, "")
            assert all(rank in one.group and len(one.group) == one.group_size for one in trace.calls)
            events = layouts.ledger[(layouts.ledger["case"] == case) & (layouts.ledger["rank"] == rank)]
            assert sum(one.device_us or 0 for one in trace.calls) == pytest.approx(events["duration_us"].sum(), abs=1)
            phases = events.sort_values(["start_us", "call_index"], kind="stable")["phase"].astype("str")
            assert {(one.phase or phase) == phase for one, phase in zip(trace.calls, phases, strict=True)} == {True}
            assert {"forward", "backward"} <= {one.phase for one in trace.calls}


def test_a_trace_that_was_read_goes_out_as_it_came_in(tmp_path: Path) -> None:
    calls = [*call("all_gather", 96, 5, kernel_us=9), *call("all_reduce", 64, 40, dtype="bfloat16")]
    bare = row("c10d::allreduce_", "cpu_op", 300, 5)  # of unknown bytes, outside of the steps
    made = written(tmp_path / "rank1.json", trace([step(3, 1, 100), *calls, bare], rank=1))
    first = read_kineto(made)
    run = load(write_folder([first], tmp_path / "runs", "job", ["read"], {}))
    assert write_kineto(run, tmp_path / "out") == [
        "of 2 of 3 calls no duration is known, so that HTA and TraceLens do not see them"
    ]
    again = read_kineto(tmp_path / "out" / "rank1.json")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["rank1.json"], "rank 0 left no trace"
    names = ("op", "payload_bytes", "dtype", "group", "group_size", "step", "device_us")
    assert [[getattr(one, name) for name in names] for one in again.calls] == [
        [getattr(one, name) for name in names] for one in first.calls
    ]
    kernels = [one["name"] for one in json.loads((tmp_path / "out" / "rank1.json").read_text())["traceEvents"]]
    assert "ncclKernel_all_gather(time of its kernels, where the host issued it)" in kernels


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32+int64", ""])
def test_every_dtype_keeps_its_bytes(run: Run, tmp_path: Path, dtype: str) -> None:
    case = run.cases["case"][0]
    ledger = run.ledger[run.ledger["case"] == case].assign(dtype=dtype, payload_bytes=24)
    changed = Run(**{name: getattr(run, name) for name in Run.__dataclass_fields__} | {"ledger": ledger})
    write_kineto(changed, tmp_path)
    trace = read_kineto(tmp_path / "rank1.json")
    assert {one.payload_bytes for one in trace.calls} == {24} and len(trace.calls) == 6
    assert {one.dtype for one in trace.calls} == {dtype if find_dtype(dtype) else "uint8"}
    assert {one.group for one in trace.calls} == {(0, 1)}


def test_what_the_files_do_not_tell_is_said(run: Run, tmp_path: Path) -> None:
    uneven = run.ledger.assign(op="all_to_all", duration_us=0.0)
    changed = Run(**{name: getattr(run, name) for name in Run.__dataclass_fields__} | {"ledger": uneven})
    unseen = f"of {len(uneven)} of {len(uneven)} calls no duration is known, so that HTA and TraceLens do not see them"
    assert write_kineto(changed, tmp_path / "uneven") == [UNEVEN, unseen]
    rows = json.loads((tmp_path / "uneven" / "case1" / "rank0.json").read_text())["traceEvents"]
    assert {row["cat"] for row in rows} == {"cpu_op", "user_annotation"}


def test_an_unknown_start_is_that_of_the_event_before_it_on_its_rank() -> None:
    starts = {("one", 0): [5.0, math.nan], ("one", 1): [math.nan, 9.0], ("two", 0): [math.nan]}
    rows = [(*of, index, start) for of, own in starts.items() for index, start in enumerate(own)]
    events = pd.DataFrame(rows, columns=["case", "rank", "call_index", "start_us"]).assign(duration_us=1.0)
    spans = pd.DataFrame(columns=["case", "rank", "call_index", "start_us", "end_us"]).astype(events.dtypes[:3])
    assert [*add_durations(events, spans)["start_us"]] == [5.0, 5.0, 0.0, 9.0, 0.0]


def test_the_command_writes_a_folder(shardproof: CommandLine, folder: Path, tmp_path: Path) -> None:
    status, out, err = shardproof("trace", str(folder), "--kineto")
    assert status == 0 and f"{folder / 'kineto'}  (opens in HTA and TraceLens)" in out, err
    assert sorted(path.name for path in (folder / "kineto" / "case2").iterdir()) == ["rank0.json", "rank1.json"]
    (tmp_path / "file").write_text("")
    refused = shardproof.refused("trace", str(folder), "--kineto", "-o", str(tmp_path / "file"))
    assert "cannot be written (" in refused and "legal: -o kineto" in refused


@pytest.mark.filterwarnings("ignore")  # HTA 0.5.0 uses what pandas 3 deprecates
def test_hta_finds_the_calls_and_bytes_of_the_ledger(layouts: Run, tmp_path: Path) -> None:
    analysis: Any = pytest.importorskip("hta.trace_analysis", reason="needs HolisticTraceAnalysis")
    parsing: Any = pytest.importorskip("hta.configs.parser_config", reason="needs HolisticTraceAnalysis")
    write_kineto(layouts, tmp_path)
    usual = parsing.ParserConfig.get_default_cfg()
    fields = [one for name, one in parsing.AVAILABLE_ARGS.items() if name.startswith("nccl::")]
    parsing.ParserConfig.set_default_cfg(parsing.ParserConfig([*parsing.ParserConfig.get_default_args(), *fields]))
    try:
        for number, case in enumerate(layouts.cases["case"], 1):
            found = analysis.TraceAnalysis(trace_dir=str(tmp_path / f"case{number}"), include_last_profiler_step=True)
            events = layouts.ledger[layouts.ledger["case"] == case].astype({"op": "str"})
            _, kernels = found.get_gpu_kernel_breakdown(visualize=False, num_kernels=50, duration_ratio=1.0)
            calls = (kernels["sum (us)"] / kernels["mean (us)"]).round().groupby(kernels["name"]).sum()
            assert {
                name.partition("(")[0].removeprefix("ncclKernel_"): int(count) for name, count in calls.items()
            } == {str(op): int(count) for op, count in events["op"].value_counts().items()}
            for rank in range(4):
                own = found.t.get_trace(rank)
                own = own[(own["stream"] >= 0) & (own["group_size"] > 0)]
                moved = own[["in_msg_nelems", "out_msg_nelems"]].max(axis=1) * own["msg_dtype"].map(
                    lambda word: getattr(find_dtype(str(word)), "item_bytes", 0)
                )
                assert moved.sum() == events[events["rank"] == rank]["payload_bytes"].sum() > 0
            spent = found.get_temporal_breakdown(visualize=False)
            assert (spent["non_compute_time(us)"] > 0).all() and (spent["compute_time(us)"] == 0).all()
            assert list(found.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]) == [0.0] * 4
    finally:
        parsing.ParserConfig.set_default_cfg(usual)
