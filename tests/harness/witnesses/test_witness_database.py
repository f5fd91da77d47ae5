"""The ledger from an Nsight Systems database: rebuilt from a hand-made one, refused when a part is missing."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from harness.errors import MachineError
from harness.witnesses.database import read_database

PROCESS = 0x1000000
DOMAIN, CATEGORY, PUSHED, STARTED, MARK = 75, 33, 59, 60, 34
CATEGORIES = {1: "rank", 2: "phase", 3: "all_reduce 0,1", 4: "broadcast 0,1", 5: "module"}
Row = tuple[int, int | None, int, str, int | None, int | None]


def header(rank: int) -> str:
    return json.dumps({"rank": rank, "pid": rank, "world_size": 2, "mode": "tp", "case": "tp=2"})


def footer(rank: int, calls: int) -> str:
    return json.dumps({"rank": rank, "calls": calls})


def rows(rank: int, calls: int = 4) -> list[Row]:
    """Start, end, type, text, category, payload: calls in data, forward, after backward, and a mark at the end."""
    return [
        (10, None, MARK, header(rank), 1, None),
        (20, 25, PUSHED, "broadcast", 4, 8),
        (30, 50, STARTED, "forward", 2, None),
        (31, 48, PUSHED, "layers.0", 5, None),
        (35, 40, PUSHED, "layers.0 all_reduce", 3, 64),
        (50, 60, STARTED, "backward", 2, None),
        (65, 70, PUSHED, "all_reduce", 3, 256),
        (80, 90, STARTED, "step", 2, None),
        (95, None, MARK, "all_reduce", 3, 4),
        (99, None, MARK, footer(rank, calls), 1, None),
    ]


def database(path: Path, ranks: dict[int, list[Row]]) -> Path:
    """A database as nsys exports it, ids of the domain and of categories made per process."""
    strings: dict[str, int] = {}
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        made.execute(
            "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER,"
            " category INTEGER, domainId INTEGER, globalTid INTEGER, int64Value INTEGER)"
        )
        insert = "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        for process, told in ranks.items():
            thread, domain = (process + 7) * PROCESS + 5, process + 1
            made.execute(insert, (0, None, DOMAIN, "shardproof", None, None, domain, thread, None))
            made.execute(insert, (0, None, DOMAIN, "NCCL", None, None, domain + 50, thread, None))
            made.execute(insert, (36, 37, PUSHED, "ncclAllReduce", None, None, domain + 50, thread, None))
            for number, name in CATEGORIES.items():
                made.execute(insert, (1, None, CATEGORY, name, None, number + process, domain, thread, None))
            for start, end, kind, text, category, payload in told:
                text_id = strings.setdefault(text, len(strings))
                own = None if category is None else category + process
                made.execute(insert, (start, end, kind, None, text_id, own, domain, thread, payload))
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
    with sqlite3.connect(path) as made:
        columns = "start + 1000, end + 1000, eventType, text, textId, category, domainId, globalTid, int64Value"
        made.execute(f"INSERT INTO NVTX_EVENTS SELECT {columns} FROM NVTX_EVENTS WHERE eventType != {DOMAIN}")
        moved = f"category + (CASE WHEN text IS NULL THEN 0 WHEN text = '{CATEGORIES[5]}' THEN -4 ELSE 1 END)"
        made.execute(f"UPDATE NVTX_EVENTS SET category = {moved} WHERE start >= 1000 AND eventType = {CATEGORY}")
        later = "CASE WHEN category % 100 - (domainId - 1) = 5 THEN category - 4 ELSE category + 1 END"
        made.execute(f"UPDATE NVTX_EVENTS SET category = {later} WHERE start >= 1000 AND eventType != {CATEGORY}")
        made.execute(
            "UPDATE NVTX_EVENTS SET text = (SELECT replace(value, 'tp=2', 'later') FROM StringIds WHERE id = textId)"
            " WHERE start >= 1000 AND textId IS NOT NULL"
        )
    made.close()
    seen = read_database(path)
    told = {case: [(s.op, s.payload_bytes, s.phase, s.groups) for s in sightings] for case, sightings in seen.items()}
    assert told["later"] == told["tp=2"]


def test_a_database_without_ranges_is_refused(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "empty.sqlite").close()
    with pytest.raises(MachineError, match="refused: empty.sqlite holds no NVTX events"):
        read_database(tmp_path / "empty.sqlite")
    with pytest.raises(MachineError, match="holds no rank of shardproof"):
        read_database(database(tmp_path / "silent.sqlite", {1: []}))
