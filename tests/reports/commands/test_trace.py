"""Runs written down otherwise: `trace`, every event once in the format's words; `expect`, terms that hold for it."""

import dataclasses
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardproof import run as run_cases
from shardproof.harness.checking.checks import CHECKS
from shardproof.harness.differences import find_differences
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.protocols import TermLike
from shardproof.harness.running.proof import prove
from shardproof.parallel.subject import subject as ours
from shardproof.reference.case import Case
from shardproof.reports.commands import expect
from shardproof.reports.commands.trace import trace_events, write_trace
from shardproof.reports.stored.frames import Run, load
from tests.harness.command_line import CommandLine
from tests.reports import sample_run
from tests.reports.toy_traffic import stored

NEEDED = {"X": {"name", "cat", "ts", "dur", "pid", "tid", "args"}, "M": {"name", "pid", "tid", "args"}}
NEEDED |= {"C": {"name", "ts", "pid", "args"}}
METADATA = {"process_name", "thread_name", "process_sort_index"}


def broken(trace: Any) -> list[str]:
    """Breaches of the Chrome trace format in this trace."""
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
    trace = json.loads(write_trace(run, tmp_path / "trace.json").read_text())
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


def test_cases_follow_each_other_and_asynchronous_calls_have_a_track(run: Run) -> None:
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
    events = list(trace_events(dataclasses.replace(run, ledger=run.ledger.assign(duration_us=350.0))))
    assert broken({"traceEvents": events}) == []
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "async tp (2)" in lanes, "calls that overlap"


def test_the_validator_sees_a_broken_trace(run: Run) -> None:
    harms: list[dict[str, Any]] = [{"dur": -1.0}, {"ts": "soon"}, {"ph": "Z"}, {"tid": 99}, {"dur": 1e9}]
    for harm in harms:
        events = list(trace_events(run))
        place = [n for n, event in enumerate(events) if event.get("cat") == "phase"][1]
        events[place] |= harm
        assert broken({"traceEvents": events}), harm


def test_the_command_writes_where_it_is_told(shardproof: CommandLine, folder: Path) -> None:
    assert shardproof("trace", str(folder))[0] == 0
    assert shardproof("trace", str(folder), "-o", "t.json.gz")[0] == 0
    packed = gzip.decompress(Path("t.json.gz").read_bytes())
    assert json.loads(packed) == json.loads((folder / "trace.json").read_text())
    assert "-o no/t.json: cannot be written" in shardproof.refused("trace", str(folder), "-o", "no/t.json")
    Path("bare").mkdir()
    Path("bare", "env.json").write_text('{"layout": 3}')
    status, _, err = shardproof("trace", "bare")
    assert (status, "ledger.csv is missing" in err) == (0, True)


CASE = Case.parse("mode=tp-sp tp=2 dp=2 layers=1 hidden=16 heads=2 seq=4")


def stating(expected: Callable[[Any], Any] | None = None, *, extra: bool = False) -> Callable[..., Mapping[str, Any]]:
    """Our subject with another closed form, and on request with one all_reduce more."""

    def program(case: Any, device: torch.device) -> Mapping[str, Any]:
        outcome = ours(case, device)
        if extra:
            dist.all_reduce(torch.ones(3))
        return outcome

    vars(program).update(refuses=lambda case: "", expected=expected)
    return program


unstated = stating()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases([str(CASE)], f"{__name__}:unstated", out=tmp_path_factory.mktemp("runs")).path


@pytest.mark.parametrize("options", [(), ("--short",)], ids=["whole", "short"])
def test_recorded_printed_pasted_proved(recorded: Path, shardproof: CommandLine, options: tuple[str, ...]) -> None:
    status, out, err = shardproof("expect", str(recorded), *options)
    assert (status, err) == (0, "")
    pasted: dict[str, Any] = {}
    exec(out, pasted)
    expected = pasted["expected"]
    assert all(bool(term.left_out) == bool(options) for term in expected(CASE))
    assert expected(CASE.but(seed=1)) is None, "it is of this case alone"
    with InprocEngine() as engine:
        right = prove(CASE, stating(expected), engine, checks={"ledger": CHECKS["ledger"]})
        wrong = prove(CASE, stating(expected, extra=True), engine, checks={"ledger": CHECKS["ledger"]})
    assert (right.verdict, wrong.verdict) == ("pass", "fail")
    assert "all_reduce sum of 12 B float32" in wrong.verdicts[0].message


def test_the_case_is_named_where_a_run_has_several(failing: Run, shardproof: CommandLine) -> None:
    run = str(failing.path)
    legal = 'legal: "mode=tp tp=2", "mode=tp-sp tp=2 seq=64"'
    assert f"has 2 cases, so name one; {legal}" in shardproof.refused("expect", run)
    assert f"case 'mode=isp': is not in run {run}; {legal}" in shardproof.refused("expect", run, "mode=isp")
    status, out, err = shardproof("expect", run, "tp=2 mode=tp-sp seq=64", "--short")
    assert (status, err) == (0, "")
    assert 'Term(op="all_gather", axis="tp", calls=6, total_bytes=24576),' in out
    _, _, err = shardproof("expect", run, "mode=tp tp=2")
    assert err == "note: mode=tp tp=2 did not pass (update): what it did may be wrong\n"


@pytest.mark.parametrize("short", [False, True])
def test_ranks_that_differ_have_a_comment_and_a_term_that_holds_for_all(run: Run, short: bool) -> None:
    events = run.events.copy()
    of_rank_1 = (events["case"] == sample_run.TP_SP) & (events["rank"] == 1)
    gathers = of_rank_1 & (events["op"] == "all_gather")
    events.loc[gathers & (events["phase"] == "forward"), "payload_bytes"] = 4000
    events = events[~(of_rank_1 & (events["op"] == "reduce_scatter"))]
    found = expect.lines_of_terms(dataclasses.replace(run, ledger=events), sample_run.TP_SP, short=short)
    terms: list[TermLike] = [line.term for line in found]
    ledger = sample_run.events(sample_run.TP_SP, sample_run.CALLS[sample_run.TP_SP])
    smaller = [(event.rank, event.op, event.phase) == (1, "all_gather", "forward") for event in ledger]
    kept = [
        dataclasses.replace(event, payload_bytes=4000 if less else 4096)
        for event, less in zip(ledger, smaller, strict=True)
        if event.rank == 0 or event.op != "reduce_scatter"
    ]
    axes = {"tp": ((0, 1),)}
    assert find_differences(kept, terms, range(2), axes=axes) == []
    assert find_differences([*kept, kept[0]], terms, range(2), axes=axes)
    text = expect.write_terms("c", "r", found)
    if short:
        told = [line.differ for line in found if line.differ]
        assert told[-1] == "rank 0: 2 calls, 8192 B; rank 1: 0 calls, 0 B"
        assert text.count("# ranks differ, and a term is for all of them: ") == 2
    else:
        assert "# ranks differ" not in text
        assert [text.count(f'at={{"tp": {place}}}') for place in range(2)] == [2, 1], "gathers on both, sums on one"
        assert "payload_bytes=4096, calls=4)" in text, "what is equal on all ranks holds for all"
