"""A database of nsys: NCCL's own ranges, which know bytes and communicators and neither dtype nor group.

The database is made by hand from NCCL's payload schemas: no GPU was here whose job nsys could have watched.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.errors import RequestError, ShardproofError
from shardproof.harness.traces.nsys import read_nsys
from shardproof.harness.traces.reading import read_traces

THREAD = 0x1000000 * 77 + 5


def database(path: Path, *ranges: tuple[str, dict[str, Any]], domain: str = "NCCL", payloads: bool = True) -> Path:
    made = sqlite3.connect(path)
    more = ", jsonTextId INTEGER" if payloads else ""
    made.execute(
        "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, "
        f"category INTEGER, domainId INTEGER, globalTid INTEGER, int64Value INTEGER{more})"
    )
    made.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    row: tuple[object, ...] = (0, None, 75, domain, None, None, 3, THREAD, None)
    made.execute(f"INSERT INTO NVTX_EVENTS VALUES ({','.join('?' * (9 + payloads))})", (*row, *([None] * payloads)))
    for number, (name, fields) in enumerate(ranges):
        row = (number * 10_000, number * 10_000 + 5000, 59, None, number, None, 3, THREAD, None)
        made.execute("INSERT INTO StringIds VALUES (?, ?)", (number, name))
        made.execute("INSERT INTO StringIds VALUES (?, ?)", (1000 + number, json.dumps(fields)))
        own = (*row, *([1000 + number] if payloads else []))
        made.execute(f"INSERT INTO NVTX_EVENTS VALUES ({','.join('?' * len(own))})", own)
    made.commit()
    made.close()
    return path


JOB = ("ncclCommInitRank", {"NCCL communicator ID": 9, "No. of ranks": 4, "Rank": 2})
HALF = ("ncclCommInitRankConfig", {"NCCL communicator ID": 11, "No. of ranks": 2, "Rank": 0})


def test_bytes_are_those_of_all_ranks_where_nccl_counts_one_message(tmp_path: Path) -> None:
    summed = {"NCCL communicator ID": 9, "Message size [bytes]": 64, "Reduction operation": "Sum"}
    gathered = {"NCCL communicator ID": 11, "Message size [bytes]": 64}
    unknown = {"NCCL communicator ID": 12, "Message size [bytes]": 64}
    path = database(
        tmp_path / "x.sqlite",
        *(JOB, HALF, ("ncclAllReduce", summed), ("ncclAllGather", gathered), ("ncclAllGather", unknown)),
        ("ncclGroupStart", {}),
    )
    (read,) = read_traces([str(path)])
    assert (read.rank, read.world_size, read.format) == (2, 4, "nsys")
    told = [(c.op, c.payload_bytes, c.group_size, c.reduce_op, c.group, c.dtype) for c in read.calls]
    assert told == [
        ("all_reduce", 64, 4, "sum", (), ""),
        ("all_gather", 128, 2, "", (), ""),
        ("all_gather", None, None, "", (), ""),
    ]
    assert [c.host_us for c in read.calls] == [5.0] * 3


def test_a_database_without_payloads_or_ranges_says_so(tmp_path: Path) -> None:
    (read,) = read_nsys(database(tmp_path / "x.sqlite", JOB, ("ncclAllReduce", {}), payloads=False))
    assert [c.payload_bytes for c in read.calls] == [None]
    assert "this nsys did not export it" in read.notes[0]
    with pytest.raises(RequestError, match="holds no nvtx ranges of NCCL"):
        read_nsys(database(tmp_path / "y.sqlite", domain="other"))
    (tmp_path / "z.nsys-rep").write_bytes(b"x")
    with pytest.raises(ShardproofError, match=r"nsys is not on PATH; legal: nsys export|nsys is missing: "):
        read_traces([str(tmp_path / "z.nsys-rep")])


@pytest.mark.parametrize(
    "broken", ["UPDATE NVTX_EVENTS SET globalTid = NULL", "UPDATE StringIds SET value = '{' WHERE id > 999"]
)
def test_a_database_with_fields_of_another_kind_is_refused_in_one_sentence(tmp_path: Path, broken: str) -> None:
    path = database(tmp_path / "x.sqlite", JOB, ("ncclAllReduce", {}))
    with closing(sqlite3.connect(path)) as made:
        made.execute(broken)
        made.commit()
    with pytest.raises(RequestError, match="is cut, or is no trace"):
        read_traces([str(path)])
