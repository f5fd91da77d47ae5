"""The ranks that diverge, their call, module and line: from real gloo jobs, generated dumps, and NCCL's."""

import itertools
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.engines.calls.matching import GroupCall, find_divergences
from shardproof.harness.engines.calls.signature import NOT_KNOWN, Signature
from shardproof.harness.errors import RequestError
from shardproof.harness.traces.hangs import RankStanding, lines_of_findings
from tests.harness.hangs.dumped import found_in, write_flight, write_last
from tests.harness.programs.launched import LIMIT_S, forked

SCRIPT = Path(__file__).with_name("diverging_script.py")
LINE = 1 + SCRIPT.read_text().splitlines().index("        dist.all_reduce(y)")
EVENT = (
    "call #{} of world (0 1 2): all_reduce sum float32 2x4 over world, 1 (forward, step {}), "
    f"at {SCRIPT.name}:{LINE}"
)
SKIPPED, EXTRA, STOPPED, OTHER = "skipped", "extra", "behind", "differs"


def test_a_real_job_that_hangs_and_then_skips_names_rank_call_module_and_line(tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path)
    ranks = forked(tmp_path, SCRIPT.name, world=3, record=["--silence", "1"])
    end_s = time.monotonic() + LIMIT_S
    while len(list(tmp_path.glob("runs/2*/ranks/*/last.json"))) < 3 and time.monotonic() < end_s:
        time.sleep(0.1)
    found, text = found_in(tmp_path / "runs" / "latest")
    (tmp_path / "go").touch()
    for rank in ranks:
        rank.ended(LIMIT_S)
    assert [(one.how, one.ranks, one.number, one.waiting) for one in found] == [(STOPPED, (1,), 8, (0, 2))]
    assert f"rank 1 never issued {EVENT.format(8, 2)} in forward; ranks 0 2 wait for it" in text
    assert f"its program is at {SCRIPT.name}:" in text
    found, text = found_in(tmp_path / "runs" / "latest")
    assert [(one.how, one.ranks, one.number) for one in found] == [(SKIPPED, (1,), 11)]
    assert f"rank 1 never issued {EVENT.format(11, 3)}" in text


WORLD, TP, LAYERS, CALLS, FIRST = 40, 8, 10, 60, 100
"""Ranks, those of a tp group, layers, collectives of each group in the window, the number of its first."""
GRADIENT, ROUTER = LAYERS, LAYERS + 1
"""Kinds of calls behind those of the layers."""


def write_generated(folder: Path, world: int, bug: str = "", rank: int = -1, number: int = -1) -> Path:
    """The dumps of a job: tp groups of 8 that issue a layer's all_reduce, and a dp group for each place in them."""
    for mine in range(world):
        tp, dp = mine // TP, mine % TP
        members = {f"tp{tp}": list(range(TP * tp, TP * tp + TP)), f"dp{dp}": list(range(dp, world, TP))}
        layer = [f"tp{tp}", "tp", "all_reduce", "sum", "float32", "4x8", -1, -1, "forward"]
        kinds: list[list[Any]] = [[*layer, f"layers.{i}", f"m.py:{i + 1}"] for i in range(LAYERS)]
        kinds.append([f"dp{dp}", "dp", "all_reduce", "sum", "float32", "999", -1, -1, "grad_sync", "", "t.py:9"])
        kinds.append([f"tp{tp}", "tp", "broadcast", "", "int64", "3", 0, -1, "forward", "router", "r.py:5"])
        tp_stops, dp_stops = (number, number + LAYERS) if bug == STOPPED else (CALLS + FIRST, CALLS + FIRST)
        issued: list[tuple[int, int]] = []  # kind, step
        for event in range(FIRST, FIRST + CALLS):
            step, kind = divmod(event - FIRST, LAYERS)
            planted = bug if (mine, event) == (rank, number) else ""
            if planted == STOPPED:
                break
            if planted in {EXTRA, OTHER}:
                issued.append((ROUTER, step))
            if planted not in {SKIPPED, OTHER}:
                issued.append((kind, step))
            if kind == LAYERS - 1:
                issued.append((GRADIENT, step))
            if (event >= tp_stops and tp == rank // TP) or event >= dp_stops:
                break  # its group waits for the rank that stopped, or in a later gradient's sum
        part = folder / "ranks" / str(mine)
        part.mkdir(parents=True)
        numbers = {axis: itertools.count(first) for axis, first in (("tp", FIRST), ("dp", 40))}
        records = [[kind, next(numbers[kinds[kind][1]]), 1000 + n, step, 0] for n, (kind, step) in enumerate(issued)]
        write_last(part / "last.json", mine, world, members, kinds, records)
    return folder


@pytest.mark.parametrize("bug", [SKIPPED, EXTRA, STOPPED, OTHER])
def test_generated_jobs_name_the_planted_rank_and_event(tmp_path: Path, bug: str) -> None:
    rank, number = 21, 133
    found, text = found_in(write_generated(tmp_path, WORLD, bug, rank, number))
    first = found[0]
    assert (first.how, first.ranks, first.number, first.channel[0]) == (bug, (rank,), number, "tp2")
    named = "router" if bug == EXTRA else f"layers.{(number - FIRST) % LAYERS}"
    assert f"over tp, {named}" in text.splitlines()[1]


def test_a_rank_that_was_killed_is_gone_and_one_whose_recorder_failed_is_named(tmp_path: Path) -> None:
    write_generated(tmp_path, 16)
    for rank, end in ((3, None), (12, {"failed": "OSError"})):
        part = tmp_path / "ranks" / str(rank)
        (part / "last.json").unlink()
        (part / "ledger.csv").write_text("op,axis,region,phase,caller\nall_reduce,tp,layers.4,forward,m.py:5\nall_re")
        if end is not None:
            (part / "end.json").write_text(json.dumps(end))
    found, text = found_in(tmp_path)
    assert [(one.how, one.ranks) for one in found] == [("gone", (3,))]
    killed = "rank 3: it was killed or crashed; the last call it completed: all_reduce over tp, layers.4, at m.py:5"
    assert killed in text.splitlines()
    assert "rank 12: its recorder failed before" in text.splitlines()
    assert "rank 3 is gone, and rank 11 issued last call #" in text


def test_a_rank_that_came_to_its_end_without_last_calls_is_one_of_a_trace_and_not_gone(tmp_path: Path) -> None:
    write_generated(tmp_path, 16)
    part = tmp_path / "ranks" / "3"
    (part / "last.json").unlink()
    (part / "end.json").write_text(json.dumps({"calls": 21, "failed": ""}))
    with pytest.raises(RequestError, match=r"a trace that `shardproof read` read has no last calls; legal: "):
        found_in(tmp_path)


def test_ranks_that_wait_for_each_other_are_a_cycle(tmp_path: Path) -> None:
    for rank, (mine, theirs) in enumerate((("a", "b"), ("b", "a"))):
        kind = [mine, mine, "all_reduce", "sum", "float32", "4", -1, -1, "forward", "", "m.py:5"]
        groups, numbers = {mine: [0, 1], theirs: [0, 1]}, [[mine, [0, 1], "", 3], [theirs, [0, 1], "", 2]]
        path = tmp_path / f"last_{rank}.json"
        write_last(path, rank, 2, groups, [kind], [[0, 3, 7, 0, 0]], inside=[7], numbers=numbers)
    found, text = found_in(tmp_path)
    assert [(one.how, one.ranks) for one in found] == [("cycle", (0, 1))]
    assert "ranks 0 1 wait for each other" in text


def test_a_message_that_was_never_sent_names_the_sender(tmp_path: Path) -> None:
    for rank, (op, peer, number) in enumerate((("send", 1, 4), ("recv", 0, 5))):
        kind = ["pp", "pp", op, "", "float32", "4", -1, peer, "pipeline", "", "m.py:5"]
        records = [[0, n, n, 0, 0] for n in range(1, number + 1)]
        write_last(tmp_path / f"last_{rank}.json", rank, 2, {"pp": [0, 1]}, [kind], records)
    found, text = found_in(tmp_path)
    assert [(one.how, one.ranks, one.number, one.waiting) for one in found] == [(STOPPED, (0,), 5, (1,))]
    assert "rank 0 never issued" in text


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ((0, 1), "ranks 0 1 issued the same calls in every group that they share; rank 2 left no calls, so that it"),
        ((0,), "ranks 1 2 left no calls, so that they may have diverged"),
        ((), "nothing to compare: ranks 0 1 2 left no calls"),
    ],
)
def test_a_rank_that_left_no_dump_may_have_diverged(known: tuple[int, ...], told: str) -> None:
    """The rank shares no group in which another rank waits, so that nothing shows its state."""
    group, silent = ("tp", (0, 1), ""), RankStanding(rank=0, world_size=3, source="")
    call = GroupCall(
        Signature("all_reduce", NOT_KNOWN, "sum", -1, NOT_KNOWN, NOT_KNOWN),
        ("forward", "", 0, 0),
        "tp",
        "m.py:5",
        0,
        True,
    )
    shown = {"calls": {group: {1: call}}, "last": {group: 1}, "ended": "at its end"}
    ranks = [replace(silent, rank=rank, **shown) for rank in known] or [silent]  # type: ignore[arg-type]
    text = "\n".join(lines_of_findings(ranks, find_divergences(ranks)))
    assert told in text and "no rank diverges" not in text


def test_a_healthy_job_has_no_finding(tmp_path: Path) -> None:
    assert found_in(write_generated(tmp_path / "ours", WORLD))[0] == []
    (tmp_path / "nccl").mkdir()
    write_flight(tmp_path / "nccl", as_json=False, rank_1_calls=9)
    assert found_in(tmp_path / "nccl")[0] == []
