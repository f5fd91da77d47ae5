"""Calls, members of coalesced calls and messages in dumps of NCCL's Flight Recorder."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.harness.hangs.dumped import entry, found_in, write_flight


@pytest.mark.parametrize("as_json", [False, True])
def test_flight_recorder_dumps_name_rank_call_and_line(tmp_path: Path, as_json: bool) -> None:
    write_flight(tmp_path, as_json=as_json, rank_1_calls=8)
    found, text = found_in(*sorted(tmp_path.iterdir()))
    assert [(one.how, one.ranks, one.number, one.waiting) for one in found] == [("behind", (1,), 9, (0, 2))]
    assert "rank 1 never issued call #9 of default_pg (0-2)" in text.replace("0 1 2", "0-2")
    assert "all_reduce float 9x4 over default_pg, at /home/me/model.py:19 in forward" in text


def write_entries(folder: Path, *ranks: list[dict[str, Any]]) -> Path:
    """The dumps of ranks of one group with these entries."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(len(ranks))])}}
    folder.mkdir()
    for rank, entries in enumerate(ranks):
        dump = {"version": "2.10", "pg_config": config, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    return folder


def coalesced(first: int, sequence: int, *sizes: list[int]) -> list[dict[str, Any]]:
    """A coalesced all_gather of one member a size, as NCCL's Flight Recorder writes it: of one number, its end last."""
    group = ("0", "default_pg")
    members = [entry(first + n, group, "_broadcast_oop", [size], "completed", 7) for n, size in enumerate(sizes)]
    end = entry(first + len(sizes), group, "ALLGATHER_coalesced", [[]], "scheduled", 8)
    return [{**one, "collective_seq_id": sequence} for one in (*members, end)]


def test_members_of_coalesced_calls_are_compared_but_for_one_that_may_be_cut(tmp_path: Path) -> None:
    usual = coalesced(0, 1, [4, 4], [5, 5])
    found, text = found_in(write_entries(tmp_path / "other", usual, usual, coalesced(0, 1, [4, 4], [3, 5])))
    assert [(one.how, one.ranks, one.number) for one in found] == [("differs", (2,), 1)]
    values = "_broadcast_oop float 3x5 on rank 2, _broadcast_oop float 5x5 on ranks 0 1"
    assert f"ranks disagree in call #1 of default_pg (0 1 2): member 2 is {values}; rank 2 issued" in text
    assert text.count("ALLGATHER_coalesced float of 2 over default_pg, at /home/me/model.py:8 in forward") > 1
    _, text = found_in(write_entries(tmp_path / "fewer", usual, usual, coalesced(0, 1, [4, 4])))
    assert "call #1 of default_pg (0 1 2): member 2 is nothing on rank 2, _broadcast_oop float 5x5 on" in text
    later = [entry(9, ("0", "default_pg"), "all_reduce", [[2]], "completed", 9)]
    cut = [coalesced(5, 6, [4, 4], [5, 5])[keep:] + later for keep in (0, 1, 2)]
    assert found_in(write_entries(tmp_path / "cut", *cut))[0] == []


def message(number: int, op: str, size: list[int], dtype: str = "Float") -> dict[str, Any]:
    """An entry of a message between ranks 0 and 1."""
    found = entry(number, ("0", "default_pg"), op, [size], "scheduled", 9)
    return {**found, "is_p2p": True, "collective_seq_id": 0, "input_dtypes": [dtype], "output_dtypes": [dtype]}


def test_both_ends_of_a_message_have_the_same_number_of_bytes(tmp_path: Path) -> None:
    first = [message(0, "send 0->1", [2, 2])], [message(0, "recv 1<-0", [4])]  # other shapes and dtypes carry the same
    second = [message(1, "send 0->1", [4], "BFloat16")], [message(1, "recv 1<-0", [8], "Byte")]
    assert found_in(write_entries(tmp_path / "right", first[0] + second[0], first[1] + second[1]))[0] == []
    third = [message(2, "send 0->1", [4])], [message(2, "recv 1<-0", [3])]
    ends = [first[rank] + second[rank] + third[rank] for rank in (0, 1)]
    found, text = found_in(write_entries(tmp_path / "wrong", *ends))
    assert [(one.how, one.ranks, one.number) for one in found] == [("message", (0, 1), 3)]
    words = "send #3 to rank 1 of default_pg (0 1): rank 0 sends float 4 to rank 1, which receives float 3"
    assert f"ranks disagree in {words}, at /home/me/model.py:9 in forward" in text


def test_messages_are_not_counted_where_the_first_ones_are_gone(tmp_path: Path) -> None:
    """Rank 1 issued more beside, so that its dump reaches back less far: its second message is rank 0's third."""
    sent = [message(5, "send 0->1", [4]), message(6, "send 0->1", [5]), message(7, "send 0->1", [6])]
    received = [message(15, "recv 1<-0", [5]), message(16, "recv 1<-0", [6])]
    found, text = found_in(write_entries(tmp_path / "cut", sent, received))
    assert found == [] and "no rank parted" in text
