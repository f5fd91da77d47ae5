"""Sessions on real processes: every witness sees what the recorder saw, and none changes a bit of the outcome. The
ledger is rebuilt from an Nsight Systems database, which is refused when a part is missing.
"""

import json
import os
import pickle
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from shardproof.harness.dense_model import parse_cases
from shardproof.harness.engines.processes.rank_program import RankResult
from shardproof.harness.errors import MachineError
from shardproof.harness.running.witnessing import witnesses
from shardproof.harness.traces.nsys_export import command_under_nsys, database_of, on_gpus
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN
from shardproof.harness.witnesses import measured
from shardproof.harness.witnesses import session as session_module
from shardproof.harness.witnesses.measured import SessionRequest
from shardproof.harness.witnesses.session import hold, read_database
from tests.forked import started
from tests.harness.witnesses.stepped_subject import CALLS, subject

NAME = "tests.harness.witnesses.stepped_subject:subject"


def forked(_program: object, folder: Path, limit_s: float, environment: dict[str, str]) -> None:
    """The ranks of a session's only world size, in processes that need not import torch again."""
    job: SessionRequest = pickle.loads((folder / "job.pickle").read_bytes())
    words = {name: environment[name] for name in ("TORCH_FR_BUFFER_SIZE", "KINETO_LOG_LEVEL")}
    ranks = [
        started(measured._rank, None, -1, rank, 2, folder, job, folder=folder, environment=words) for rank in range(2)
    ]
    assert [rank.ended(limit_s) for rank in ranks] == [0, 0], ranks[0].err


def test_views_changed_in_place_are_seen_by_every_witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nsight Systems sees chosen steps of it, in test_witness_steps."""
    tool = "torch"
    monkeypatch.setattr(session_module, "_run_child", forked)
    (case,) = parse_cases(["mode=tp tp=2 steps=2 seed=9"])
    seen = witnesses([case], NAME, (tool,), tmp_path, device="cpu", timeout_s=60.0)
    assert tool in seen.sessions, seen.notes
    (session,) = seen.sessions[tool].values()
    assert session.disturbed == ()
    told = seen.judge_case(case, (), subject.expected(case))  # type: ignore[attr-defined]
    assert told.verdict.verdict == PASS, told.verdict.message
    assert told.verdict.message == f"ledger, {tool}, closed_form agree on {4 * CALLS} events of 2 ranks"
    assert told.verdict.notes == ()
    columns, rows = told.tables["witnesses.csv"]
    assert [row[columns.index(tool)] for row in rows] == ["="] * 4 * CALLS

    # One bit of an outcome, one event less, a rank that failed: none is a pass.
    (text,) = seen.sessions[tool]
    other = (replace(session.ranks[0], watched="other"), session.ranks[1])
    for spoiled, verdict, words in (
        (replace(session, ranks=other), FAIL, "the outcome of rank 0 is not the same bit for bit when the recorder"),
        (replace(session, seen=session.seen[1:]), FAIL, f"{tool} saw nothing"),
        (replace(session, problem="rank 1 failed: why"), UNKNOWN, "nothing was witnessed: rank 1 failed: why"),
    ):
        verdict_ = replace(seen, sessions={tool: {text: spoiled}}).judge_case(case, (), None).verdict
        assert (verdict_.verdict, words in verdict_.message) == (verdict, True)


def test_a_missing_or_broken_nsys_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    cases = parse_cases(["mode=tp tp=2 steps=2 seed=9"])
    seen = witnesses(cases, NAME, ("nsys",), tmp_path / "traces", device="cpu", timeout_s=5.0)
    assert seen.sessions == {}
    assert seen.notes[-1].startswith("witness nsys is missing: nsys is not on PATH (Debian: nsight-systems")
    told = seen.judge_case(cases[0], (), None)
    assert told.verdict.verdict == UNKNOWN
    assert "nsys is not on PATH" in told.verdict.message
    broken = tmp_path / "nsys"
    broken.write_text("#!/bin/sh\necho 'no license for you'\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{path}")
    with pytest.raises(MachineError, match="witness nsys is missing: nsys ended with status 3: no license for you"):
        database_of(["true"], tmp_path, device="cpu", timeout_s=20.0, environment=os.environ)
    broken.write_text("#!/bin/sh\nsleep 60\n")
    with pytest.raises(MachineError, match="nsys did not end within 1 s"):
        database_of(["true"], tmp_path, device="cpu", timeout_s=1.0, environment=os.environ)


def test_a_session_is_a_process_of_its_own_that_ends_in_time(tmp_path: Path) -> None:
    assert hold(SessionRequest(subject=NAME, cases=(), tool="torch"), tmp_path) == {}
    assert (tmp_path / "session.log").read_text() == "", "a program that cannot be started, or fails, says so"
    with pytest.raises(MachineError, match="witness torch is missing: the session did not end within 0 s"):
        session_module._run_child(["sleep", "60"], tmp_path, 0.1, os.environ)


def test_a_rank_that_failed_or_left_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = parse_cases(["mode=tp tp=2 steps=2 seed=9"])
    job = SessionRequest(subject=NAME, cases=(case,), tool="torch")
    monkeypatch.setattr(session_module, "_run_child", lambda *_: None)
    (session,) = hold(job, tmp_path).values()
    assert session.problem.startswith("rank 0 left no result")
    end = RankResult(rank=0, error=ValueError("why"))
    (tmp_path / "0" / "rank0.pickle").write_bytes(pickle.dumps(end))
    (session,) = hold(job, tmp_path).values()
    assert session.problem == "rank 0 failed: ValueError: why"


def test_commands_trace_ranges_on_a_cpu_and_a_capture_range_on_a_gpu() -> None:
    here = command_under_nsys("nsys", Path("x"), ["program"])
    assert here[:3] == ["nsys", "profile", "--trace=nvtx"]
    assert here[-1] == "program"
    there = on_gpus()
    assert "--trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop" in there
    assert there.endswith("python -m shardproof.harness.witnesses.measured FOLDER")


PROCESS = 0x1000000
DOMAIN, CATEGORY, PUSHED, STARTED, MARK = 75, 33, 59, 60, 34
CATEGORIES = {1: "rank", 2: "phase", 3: "all_reduce 0,1 float32", 4: "broadcast 0,1", 5: "module"}
Row = tuple[int, int | None, int, str, int | None, int | None]


def rows(rank: int, case: str = "tp=2") -> list[Row]:
    """Start, end, type, text, category, payload: calls in data, forward, after backward, and a mark at the end."""
    header = {"rank": rank, "pid": rank, "world_size": 2, "mode": "tp", "case": case}
    return [
        (10, None, MARK, json.dumps(header), 1, None),
        (20, 25, PUSHED, "broadcast", 4, 8),
        (30, 50, STARTED, "forward", 2, None),
        (31, 48, PUSHED, "layers.0", 5, None),
        (35, 40, PUSHED, "layers.0 all_reduce", 3, 64),
        (50, 60, STARTED, "backward", 2, None),
        (65, 70, PUSHED, "all_reduce", 3, 256),
        (80, 90, STARTED, "step", 2, None),
        (95, None, MARK, "all_reduce", 3, 4),
        (99, None, MARK, json.dumps({"rank": rank, "calls": 4}), 1, None),
    ]


def database(path: Path, ranks: dict[int, list[Row]], *, at: int = 0) -> Path:
    """A database as nsys exports it, ids of the domain and of categories made per process.

    Rows that are added `at` a later time have other numbers of categories.
    """
    strings: dict[str, int] = {}
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE IF NOT EXISTS StringIds (id INTEGER, value TEXT)")
        made.execute(
            "CREATE TABLE IF NOT EXISTS NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT,"
            " textId INTEGER, category INTEGER, domainId INTEGER, globalTid INTEGER, int64Value INTEGER)"
        )
        insert = "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        for process, told in ranks.items():
            thread, domain = (process + 7) * PROCESS + 5, process + 1
            own = {number: process + (number % 5 + 1 if at else number) for number in CATEGORIES}
            if not at:
                made.execute(insert, (0, None, DOMAIN, "shardproof", None, None, domain, thread, None))
                made.execute(insert, (0, None, DOMAIN, "NCCL", None, None, domain + 50, thread, None))
                made.execute(insert, (36, 37, PUSHED, "ncclAllReduce", None, None, domain + 50, thread, None))
            for number, name in CATEGORIES.items():
                made.execute(insert, (at + 1, None, CATEGORY, name, None, own[number], domain, thread, None))
            for start, end, kind, text, category, payload in told:
                text_id, ends = strings.setdefault(text, at + len(strings)), None if end is None else at + end
                of = None if category is None else own[category]
                made.execute(insert, (at + start, ends, kind, None, text_id, of, domain, thread, payload))
        made.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, text) for text, number in strings.items()])
    made.close()
    return path


def test_the_ledger_is_rebuilt_from_the_database_alone(tmp_path: Path) -> None:
    (seen,) = read_database(database(tmp_path / "x.sqlite", {1: rows(0), 2: rows(1)})).values()
    for rank in (0, 1):
        mine = [s for s in seen if s.rank == rank]
        told = [(s.phase, s.region, s.op, s.payload_bytes, s.duration_us) for s in mine]
        assert told == [
            ("data", "", "broadcast", 8, 0.005),
            ("forward", "layers.0", "all_reduce", 64, 0.005),
            ("grad_sync", "", "all_reduce", 256, 0.005),
            ("metric", "", "all_reduce", 4, 0.0),
        ]
        assert {s.groups for s in mine} == {((0, 1),)}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda told: told[:-1], "rank 1 has no last mark"),
        (lambda told: told[1:], "rank 1 has an end without a beginning"),
        (lambda told: told[:4] + told[5:], "rank 1 says that it made 4 calls, 3 are there"),
        (lambda told: [*told[:4], told[4], *told[4:]], "rank 1 says that it made 4 calls, 5 are there"),
        (lambda told: [], "tp=2 has 2 ranks, and the database has 0"),
    ],
)
def test_a_database_that_does_not_reconcile_is_refused(tmp_path: Path, spoil: object, words: str) -> None:
    assert callable(spoil)
    path = database(tmp_path / "x.sqlite", {1: rows(0), 2: spoil(rows(1))})
    with pytest.raises(MachineError, match=words):
        read_database(path)


def test_a_later_case_of_a_process_may_number_its_categories_anew(tmp_path: Path) -> None:
    path = database(tmp_path / "x.sqlite", {1: rows(0), 2: rows(1)})
    seen = read_database(database(path, {1: rows(0, "later"), 2: rows(1, "later")}, at=1000))
    told = {case: [(s.op, s.payload_bytes, s.phase, s.groups) for s in sightings] for case, sightings in seen.items()}
    assert told["later"] == told["tp=2"]


def test_a_database_without_ranges_is_refused(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "empty.sqlite").close()
    with pytest.raises(MachineError, match="refused: empty.sqlite holds no NVTX events"):
        read_database(tmp_path / "empty.sqlite")
    with pytest.raises(MachineError, match="holds no rank of shardproof"):
        read_database(database(tmp_path / "silent.sqlite", {1: []}))
