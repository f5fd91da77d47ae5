"""What the torch profiler and Nsight Systems saw of each mode, read back: the recorder's ledger, call by call.

On gloo, and for NCCL with stored traces in their place (test_public_traces, and nccl_trace.py, which lays them out).
"""

from pathlib import Path

import pytest

from shardproof.harness.dense_model import SUBJECT, parse_cases
from shardproof.harness.ledger import Event
from shardproof.harness.programs.meant import compare_with_form
from shardproof.harness.protocols import case_text
from shardproof.harness.subject import resolve_subject
from shardproof.harness.traces.calls import Trace
from shardproof.harness.traces.nsys import read_own_ranges
from shardproof.harness.traces.nsys_export import nsys_path
from shardproof.harness.traces.reading import read_traces
from shardproof.harness.witnesses import session
from shardproof.harness.witnesses.measured import SessionRequest
from tests.harness.witnesses.test_witness_session import forked

CALL = resolve_subject(SUBJECT).call
MODES = ("tp", "tp-sp", "mtp", "msp", "fsp", "isp", "autotp")
SMALL = "layers=1 hidden=16 heads=2 vocab=24 seq=8 steps=2"
NSYS = pytest.mark.skipif(nsys_path() is None, reason="nsys is not on PATH (.ci/nsys fetches one)")


def told(events: tuple[Event, ...]) -> list[tuple[object, ...]]:
    return [(one.op, one.payload_bytes, one.dtype, one.group) for one in sorted(events, key=lambda e: e.call_index)]


def read_back(trace: Trace) -> list[tuple[object, ...]]:
    return [(one.op, one.payload_bytes, one.dtype, one.group) for one in trace.calls]


@pytest.mark.parametrize(
    ("tool", "modes"),
    [
        ("torch", ("tp-sp", "isp")),  # all kinds of calls
        pytest.param("torch", MODES, marks=pytest.mark.deep("half a CPU minute")),
        pytest.param("nsys", MODES, marks=[NSYS, pytest.mark.deep("half a CPU minute")]),
    ],
)
def test_traces_of_each_mode_read_back_are_the_ledger(
    tool: str, modes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = parse_cases([*(f"mode={mode} tp=2 {SMALL}" for mode in modes), f"mode=tp tp=1 dp=2 {SMALL}"])
    monkeypatch.setattr(session, "_run_child", forked)  # nsys starts its own
    job = SessionRequest(subject=SUBJECT, cases=tuple(cases), tool=tool, warmup=0, repeats=1)
    held = session.hold(job, tmp_path / "held")
    in_database = {} if tool == "torch" else read_own_ranges(next((tmp_path / "held").glob("*.sqlite")))
    for case in cases:
        one = held[case_text(case)]
        assert not one.problem, one.problem
        traces = in_database.get(case_text(case)) or read_traces([str(one.folder)])
        assert sorted(trace.rank or 0 for trace in traces) == [0, 1]
        for trace in traces:
            assert read_back(trace) == told(one.ranks[trace.rank or 0].events), case
        assert len(traces[0].calls) > 4
        against = compare_with_form(traces, case, CALL)
        assert [str(one) for one in against.unmeant] == []
        assert not any("modules" in note or "phase and" in note for note in against.notes), against.notes
