"""The trace: what the format demands, every event once, the right process and track, slices that enclose or part."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from reports.commands.trace import trace_events, write
from reports.stored.frames import load
from tests.harness.command_line import CommandLine
from tests.reports import sample_run
from tests.reports.toy_traffic import stored

NEEDED = {"X": {"name", "cat", "ts", "dur", "pid", "tid", "args"}, "M": {"name", "pid", "tid", "args"}}
NEEDED |= {"C": {"name", "ts", "pid", "args"}}
METADATA = {"process_name", "thread_name", "process_sort_index"}


def broken(trace: Any) -> list[str]:
    """What the Chrome trace format forbids, found in this trace."""
    found = [] if isinstance(trace, dict) and isinstance(trace.get("traceEvents"), list) else ["no traceEvents"]
    tracks: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named = set()
    for event in trace["traceEvents"] if not found else []:
        kind = event.get("ph")
        if kind not in NEEDED or NEEDED[kind] - set(event):
            found.append(f"{event}: lacks {NEEDED.get(kind, {'a known ph'}) - set(event)}")
        elif kind == "M":
            found += [] if event["name"] in METADATA else [f"unknown metadata {event['name']}"]
            named |= {(event["pid"], event["tid"])} if event["name"] == "thread_name" else set()
        elif not isinstance(event["ts"], int | float) or event["ts"] < 0 or event.get("dur", 0) < 0:
            found.append(f"{event}: not a time")
        elif kind == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], round(event["ts"] + event["dur"], 3)))
        elif any(not isinstance(value, int | float) for value in event["args"].values()):
            found.append(f"{event}: a counter holds numbers only")
    found += [f"track {track} has no name" for track in tracks if track not in named]
    for track, slices in tracks.items():
        ends: list[float] = []
        for start, end in sorted(slices, key=lambda pair: (pair[0], -pair[1])):
            while ends and ends[-1] <= start:
                ends.pop()
            found += [f"track {track}: {start}..{end} crosses {ends[-1]}"] if ends and end > ends[-1] else []
            ends.append(end)
    return found


def test_the_trace_of_real_ranks_is_valid_and_whole(tmp_path: Path) -> None:
    run = load(stored(tmp_path))
    trace = json.loads(write(run, tmp_path / "trace.json").read_text())
    assert broken(trace) == []
    calls = [event for event in trace["traceEvents"] if "call_index" in event.get("args", {})]
    assert len(calls) == len(run.ledger) == 48
    assert {event["pid"] for event in calls} == {0, 1}
    phases = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "phase" and event["pid"] == 0]
    assert phases == ["forward", "backward"] * 6
    enclosing = {kind: sum(event.get("cat") == kind for event in trace["traceEvents"]) for kind in ("case", "step")}
    assert enclosing == {"case": 2, "step": 6}
    spent_us = sum(event["dur"] for event in calls)
    assert spent_us == pytest.approx(run.ledger["duration_us"].sum(), abs=0.01 * len(calls))


def test_cases_follow_each_other_and_asynchronous_calls_have_a_track(tmp_path: Path) -> None:
    run = load(sample_run.write(tmp_path / "run"))
    events = list(trace_events(run))
    assert broken({"traceEvents": events}) == []
    first, second = (event for event in events if event.get("cat") == "case" and event["pid"] == 0)
    assert first["ts"] + first["dur"] < second["ts"]
    assert (first["name"], second["name"]) == (sample_run.TP, sample_run.TP_SP)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"program", "calls tp", "async tp"}
    sent = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == 1]
    # an all-reduce of 4096 bytes sends as much on two ranks, a gather or scatter half of it
    assert sent[-1] == 6 * 4096 + 8 * 2048


def test_calls_that_overlap_lie_in_lanes(tmp_path: Path) -> None:
    run = load(sample_run.write(tmp_path / "run"))
    events = list(trace_events(dataclasses.replace(run, ledger=run.ledger.assign(duration_us=350.0))))
    assert broken({"traceEvents": events}) == []
    assert "async tp (2)" in {event["args"]["name"] for event in events if event["name"] == "thread_name"}


@pytest.mark.parametrize(
    "harm", [{"dur": -1.0}, {"ts": "soon"}, {"ph": "Z"}, {"tid": 99}, {"dur": 1e9}], ids=lambda harm: next(iter(harm))
)
def test_the_validator_sees_a_broken_trace(tmp_path: Path, harm: dict[str, Any]) -> None:
    events = list(trace_events(load(sample_run.write(tmp_path / "run"))))
    place = [n for n, event in enumerate(events) if event.get("cat") == "phase"][1]
    events[place] |= harm
    assert broken({"traceEvents": events})


def test_the_command_writes_where_it_is_told(shardproof: CommandLine, tmp_path: Path) -> None:
    folder = sample_run.write(tmp_path / "run")
    assert shardproof("trace", str(folder))[0] == 0
    assert shardproof("trace", str(folder), "-o", "t.json.gz")[0] == 0
    assert json.loads(gzip.decompress(Path("t.json.gz").read_bytes())) == json.loads(
        (folder / "trace.json").read_text()
    )
    assert "-o no/t.json: cannot be written" in shardproof.refused("trace", str(folder), "-o", "no/t.json")
    assert "no such folder" in shardproof.refused("trace", "nowhere")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "env.json").write_text("{}")
    status, _, err = shardproof("trace", "bare")
    assert (status, "ledger.csv is missing" in err) == (0, True)
