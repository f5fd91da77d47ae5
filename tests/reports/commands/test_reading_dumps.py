"""`read` of Flight Recorder dumps: their calls as a run folder, and laws where no ring has lost its start."""

import json
from pathlib import Path

import pytest

from tests.harness.command_line import CommandLine
from tests.harness.hangs.dumped import Recorded, right_job, write_entries


@pytest.mark.parametrize("kept", [(0, 0, 0), (2, 5, 9)])
def test_a_ring_that_lost_its_start_breaks_no_law(
    shardproof: CommandLine, tmp_path: Path, kept: tuple[int, ...]
) -> None:
    dumps = write_entries(tmp_path / "dumps", *(right_job(rank, 3, "completed", kept[rank]) for rank in range(3)))
    status, out, err = shardproof("read", str(dumps))
    assert status == 0 and "broken law" not in out, err
    silent = "laws: not looked at, since the first calls of ranks 0 1 2 are lost (shardproof hang compares by number)"
    assert (silent in out) == any(kept)
    assert ("2 entries, which the recorder's ring has dropped (TORCH_FR_BUFFER_SIZE" in out) == any(kept)
    (env,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/2*/env.json"))
    assert [(one["format"], one["rank"]) for one in env["source"]] == [("flight recorder", rank) for rank in range(3)]


def test_names_that_no_file_takes_and_times_that_nobody_knows_are_written(
    shardproof: CommandLine, tmp_path: Path
) -> None:
    entries = Recorded().call("all_reduce", [[4]]).call("all_reduce", [[4]]).entries
    for one in entries:
        one["time_created_ns"], one["frames"][1]["name"] = None, "half of a pair \ud800"
    dump = {"version": "2.10", "rank": 0, "pg_config": {}, "entries": entries}
    (tmp_path / "fr_rank0.json").write_text(json.dumps(dump))
    assert shardproof("read", "fr_rank0.json")[0] == 0
    assert shardproof("trace", "-o", "trace.json")[0] == 0
    assert shardproof("trace", "--kineto", "-o", "kineto")[0] == 0
    for path in (tmp_path / "trace.json", tmp_path / "kineto" / "rank0.json"):
        written = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"it has a {word}"))
        calls = [one["args"] for one in written["traceEvents"] if "caller" in one.get("args", {})]
        lines = [f"/home/me/model.py:{line} in half of a pair \\ud800" for line in (10, 11)]
        assert [one["caller"] for one in calls] == lines
