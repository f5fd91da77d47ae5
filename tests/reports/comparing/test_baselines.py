"""Baselines: as good as the run they were made of, without a diff for equal runs, and one sentence when harmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import RequestError
from reports.comparing.comparison import compare
from reports.comparing.snapshot import members, save, side, snapshot, span
from reports.stored.frames import load
from tests.harness.command_line import CommandLine
from tests.reports import sample_run


def test_a_baseline_stands_for_its_run(runs: dict[str, Path], tmp_path: Path) -> None:
    kept = side(str(runs["right"]))
    folder = save(kept, "main", str(tmp_path / "b"))
    again = save(side(str(runs["again"])), "again", str(tmp_path / "b"))
    assert (folder / "events.csv").read_bytes() == (again / "events.csv").read_bytes(), "equal runs leave no diff"
    read = side("main", str(tmp_path / "b"))
    for name in ("cases", "events", "times", "memory"):
        assert getattr(read, name).equals(getattr(kept, name)), name
    assert compare(read, side(str(runs["again"]))).breaches == ()
    assert len(compare(read, side(str(runs["wider"]))).breaches) == 1


def test_counted_events_add_up_to_the_ledger(runs: dict[str, Path]) -> None:
    run = load(runs["gather"])
    events = snapshot(run).events
    cells = events[["ranks", "steps", "microbatches"]].map(lambda text: len(members(text))).prod(axis=1)
    assert (cells * events["calls"]).sum() == len(run.ledger)
    assert (cells * events["calls"] * events["payload_bytes"]).sum() == run.ledger["payload_bytes"].sum()


@pytest.mark.parametrize("numbers", [[0], [0, 1, 2, 3], [0, 2], [5, 0, 1], [-1, 0, 7, 8]])
def test_spans_read_back(numbers: list[int]) -> None:
    assert members(span(numbers)) == sorted(numbers)


@pytest.mark.parametrize("harm", ["torn", "foreign", "missing", "not numbers", "not json", "empty"])
def test_a_baseline_that_was_harmed_is_one_sentence(
    shardproof: CommandLine, runs: dict[str, Path], tmp_path: Path, harm: str
) -> None:
    folder = save(side(str(runs["right"])), "main", "baselines")
    events = folder / "events.csv"
    if harm == "torn":
        events.write_bytes(events.read_bytes()[:-7])
    elif harm == "foreign":
        events.write_text("a,b\n1,2\n")
    elif harm == "missing":
        events.unlink()
    elif harm == "not numbers":
        events.write_text(events.read_text().replace("0..2", "zero"))
    elif harm == "empty":
        events.write_text("")
    else:
        (folder / "baseline.json").write_text("{")
    assert "baseline" in shardproof.refused("compare", "main", str(runs["right"]))


def test_folders_and_names_that_are_none_are_one_sentence(
    shardproof: CommandLine, runs: dict[str, Path], tmp_path: Path
) -> None:
    right = str(runs["right"])
    (tmp_path / "nothing").mkdir()
    assert "no baseline of this name; legal: " in shardproof.refused("compare", "nowhere", right)
    assert "neither env.json nor cases.jsonl" in shardproof.refused("compare", right, "nothing")
    assert "must be a name" in shardproof.refused("compare", right, right, "--save-baseline", "../x")
    (tmp_path / "baselines" / "taken").mkdir(parents=True)
    (tmp_path / "baselines" / "taken" / "thesis.tex").touch()
    empty = sample_run.write(tmp_path / "empty")
    (empty / "ledger.csv").write_text((empty / "ledger.csv").read_text().split("\n")[0] + "\n")
    assert "fail=bytes:x" in shardproof.refused("compare", right, right, "--fail", "bytes:x")
    with pytest.raises(RequestError, match="holds something else"):
        save(side(right), "taken")
    with pytest.raises(RequestError, match="holds no event"):
        save(side(str(empty)), "main")
