"""Calls, members of coalesced calls and messages in dumps of NCCL's Flight Recorder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.errors import RequestError
from tests.harness.hangs.dumped import Recorded, entry, found_in, right_job, write_entries, write_flight


@pytest.mark.parametrize("as_json", [False, True])
def test_flight_recorder_dumps_name_rank_call_and_line(tmp_path: Path, as_json: bool) -> None:
    write_flight(tmp_path, as_json=as_json, rank_1_calls=8)
    found, text = found_in(*sorted(tmp_path.iterdir()))
    assert [(one.how, one.ranks, one.number, one.waiting) for one in found] == [("behind", (1,), 9, (0, 2))]
    assert "rank 1 never issued call #9 of default_pg (0-2)" in text.replace("0 1 2", "0-2")
    assert "all_reduce float32 9x4 over default_pg, at /home/me/model.py:19 in forward" in text


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
    values = "_broadcast_oop float32 3x5 on rank 2, _broadcast_oop float32 5x5 on ranks 0 1"
    assert f"ranks disagree in call #1 of default_pg (0 1 2): member 2 is {values}; rank 2 issued" in text
    assert text.count("ALLGATHER_coalesced of 2 over default_pg, at /home/me/model.py:8 in forward") > 1
    _, text = found_in(write_entries(tmp_path / "fewer", usual, usual, coalesced(0, 1, [4, 4])))
    assert "call #1 of default_pg (0 1 2): member 2 is nothing on rank 2, _broadcast_oop float32 5x5 on" in text
    later = [entry(8, ("0", "default_pg"), "all_reduce", [[2]], "completed", 9)]
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
    words = "send #3 to rank 1 of default_pg (0 1): rank 0 sends float32 4 to rank 1, which receives float32 3"
    assert f"ranks disagree in {words}, at /home/me/model.py:9 in forward" in text


def test_messages_are_not_counted_where_the_first_ones_are_gone(tmp_path: Path) -> None:
    """Rank 1 issued more beside, so that its dump reaches back less far: its second message is rank 0's third."""
    sent = [message(5, "send 0->1", [4]), message(6, "send 0->1", [5]), message(7, "send 0->1", [6])]
    received = [message(15, "recv 1<-0", [5]), message(16, "recv 1<-0", [6])]
    found, text = found_in(write_entries(tmp_path / "cut", sent, received))
    assert found == [] and "no rank diverges" in text


def test_messages_of_batches_and_others_may_overtake_each_other(tmp_path: Path) -> None:
    """Each pair of ranks has a communicator for the others, where NCCL's were not made at once."""
    sent = Recorded().message("send 0->1", [7]).message("send 0->1", [3]).batch(("send 0->1", [4]))
    received = Recorded().message("recv 1<-0", [7]).batch(("recv 1<-0", [4])).message("recv 1<-0", [3])
    assert found_in(write_entries(tmp_path / "right", sent.entries, received.entries))[0] == []
    received = Recorded().message("recv 1<-0", [8]).batch(("recv 1<-0", [4])).message("recv 1<-0", [3])
    ((wrong,), _) = found_in(write_entries(tmp_path / "wrong", sent.entries, received.entries))
    assert (wrong.how, wrong.number) == ("message", 1)


@pytest.mark.parametrize("batch_end", ["completed", "scheduled"])
def test_right_dumps_are_silent_wherever_their_rings_were_cut(tmp_path: Path, batch_end: str) -> None:
    length = len(right_job(0, 3, batch_end))
    for n, keep in enumerate([(0, 0, 0), *((n, 7 * n % length, 0) for n in range(length)), (1, 2, 3), (2, 2, 2)]):
        ranks = [right_job(rank, 3, batch_end, keep[rank]) for rank in range(3)]
        found, text = found_in(write_entries(tmp_path / str(n), *ranks))
        assert found == [], (keep, text)


Change = Callable[[Recorded], Recorded]
WRONG: dict[str, tuple[Change, Change, str]] = {
    "members in another order": (
        lambda job: job.coalesced("coalesced", [2], [3]),
        lambda job: job.coalesced("coalesced", [3], [2]),
        "call #2 of default_pg (0 1): member 1 is _broadcast_oop float32 3 on rank 1, _broadcast_oop float32 2 on rank",
    ),
    "another op": (
        lambda job: job.coalesced("coalesced", [2], [3]),
        lambda job: job.call("all_reduce", [[2]]),
        "call #2 of default_pg (0 1): the op is all_reduce on rank 1, coalesced on rank 0",
    ),
    "a member of a batch": (
        lambda job: job.batch(("send 0->1", [4]), ("recv 0<-1", [2])).call("all_reduce", [[1]]),
        lambda job: job.batch(("send 1->0", [2]), ("recv 1<-0", [3])).call("all_reduce", [[1]]),
        "send #1 to rank 1 of default_pg (0 1): rank 0 sends float32 4 to rank 1, which receives float32 3",
    ),
    "a batch that the other rank lacks": (
        lambda job: job.batch(("recv 0<-1", [4]), ("send 0->1", [4]), state="scheduled"),
        lambda job: job.message("recv 1<-0", [4]),
        "rank 1 never issued the other end of recv #1 from rank 1 of default_pg (0 1): recv float32 4 over default_pg",
    ),
    "a message that nobody receives": (
        lambda job: job.batch(("send 0->1", [4]), state="scheduled"),
        lambda job: job,
        "rank 1 never issued the other end of send #1 to rank 1 of default_pg (0 1): send float32 4 over default_pg",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_two_ranks_issued_otherwise_is_named(tmp_path: Path, case: str) -> None:
    mine, theirs, told = WRONG[case]
    ranks = [change(Recorded().call("all_reduce", [[4]])) for change in (mine, theirs)]
    found, text = found_in(write_entries(tmp_path / "wrong", *(one.entries for one in ranks)))
    assert len(found) == 1 and told in text, text


def test_calls_that_a_dump_does_not_tell_apart_are_no_difference(tmp_path: Path) -> None:
    """A rank that is about to issue further members, a group that was made anew, and a recorder that was reset."""
    ended, open_call = (Recorded().coalesced("ALLGATHER_coalesced", [4], [5], [6], ends=ends) for ends in (True, False))
    assert found_in(write_entries(tmp_path / "open", ended.entries, open_call.entries[:2]))[0] == []
    old, new = Recorded().call("all_reduce", [[4]]).call("all_reduce", [[4]]), Recorded().call("broadcast", [[7]])
    again = [{**one, "record_id": 2 + n, "pg_id": 1} for n, one in enumerate(new.entries)]
    assert found_in(write_entries(tmp_path / "anew", old.entries + again, again))[0] == []
    job = [Recorded().message(op, [1]).message(op, [2]).message(op, [3]) for op in ("send 0->1", "recv 1<-0")]
    reset = [{**one, "record_id": n} for n, one in enumerate(job[1].entries[1:])]
    assert found_in(write_entries(tmp_path / "reset", job[0].entries, reset))[0] == []


def test_a_dump_of_active_calls_alone_is_refused(tmp_path: Path) -> None:
    job = Recorded().call("all_reduce", [[4]]).call("all_reduce", [[4]]).call("all_reduce", [[4]])
    with pytest.raises(RequestError, match=r"rank_0: .*it has active calls alone, .*onlyActive=False.*legal: "):
        found_in(write_entries(tmp_path / "active", [job.entries[0], job.entries[2]]))
