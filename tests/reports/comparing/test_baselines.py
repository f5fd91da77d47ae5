"""Baselines, as good as the run they were made of; times compared, on a machine that changes its speed."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from shardproof.harness.errors import RequestError
from shardproof.reports.comparing.comparison import compare
from shardproof.reports.comparing.intervals import phase_times, ratio_of_medians
from shardproof.reports.comparing.snapshot import (
    TIME_TYPES,
    format_span,
    parse_span,
    read_side,
    save_snapshot,
    snapshot,
)
from shardproof.reports.stored.frames import load
from tests.harness.command_line import CommandLine
from tests.reports import sample_run


def test_a_baseline_stands_for_its_run(runs: dict[str, Path], tmp_path: Path) -> None:
    kept = read_side(str(runs["right"]))
    folder = save_snapshot(kept, "main", str(tmp_path / "b"))
    again = save_snapshot(read_side(str(runs["again"])), "again", str(tmp_path / "b"))
    assert (folder / "events.csv").read_bytes() == (again / "events.csv").read_bytes(), "equal runs leave no diff"
    read = read_side("main", str(tmp_path / "b"))
    for name in ("cases", "events", "times", "memory"):
        assert getattr(read, name).equals(getattr(kept, name)), name
    assert compare(read, read_side(str(runs["again"]))).breaches == ()
    assert len(compare(read, read_side(str(runs["wider"]))).breaches) == 1


def test_counted_events_add_up_to_the_ledger(runs: dict[str, Path]) -> None:
    run = load(runs["gather"])
    events = snapshot(run).events
    cells = events[["ranks", "steps", "microbatches"]].map(lambda text: len(parse_span(text))).prod(axis=1)
    assert (cells * events["calls"]).sum() == len(run.ledger)
    assert (cells * events["calls"] * events["payload_bytes"]).sum() == run.ledger["payload_bytes"].sum()


@pytest.mark.parametrize("numbers", [[0], [0, 1, 2, 3], [0, 2], [5, 0, 1], [-1, 0, 7, 8]])
def test_spans_read_back(numbers: list[int]) -> None:
    assert parse_span(format_span(numbers)) == sorted(numbers)


def test_folders_that_are_none_are_one_sentence(shardproof: CommandLine, runs: dict[str, Path], tmp_path: Path) -> None:
    right = str(runs["right"])
    (tmp_path / "nothing").mkdir()
    assert "neither env.json nor cases.jsonl" in shardproof.refused("compare", right, "nothing")
    (tmp_path / "baselines" / "taken").mkdir(parents=True)
    (tmp_path / "baselines" / "taken" / "thesis.tex").touch()
    empty = sample_run.write(tmp_path / "empty")
    (empty / "ledger.csv").write_text((empty / "ledger.csv").read_text().split("\n")[0] + "\n")
    with pytest.raises(RequestError, match="holds something else"):
        save_snapshot(read_side(right), "taken")
    with pytest.raises(RequestError, match="holds no event"):
        save_snapshot(read_side(str(empty)), "main")


def drawn(seed: int, slow: str = "", factor: float = 1.3, blocks: int = 40) -> pd.DataFrame:
    """Times of one run: a common drift of up to threefold, 5 % jitter, `slow` slower by `factor`."""
    random = np.random.default_rng(seed)
    drift = 1 + 2 * random.random()
    usual_us = {"data": 200.0, "forward": 3000.0, "loss": 500.0, "backward": 5000.0}
    rows = []
    for block in range(blocks):
        busy = drift * random.lognormal(0, 0.2)
        for phase, usual in usual_us.items():
            spent = usual * busy * random.lognormal(0, 0.05) * (factor if phase == slow else 1.0)
            for region, share in (("layers.0", 0.5), ("layers.1", 0.5 if phase != slow else 0.9)):
                rows.append(("c", "tp", phase, region, block // 2, block % 2, spent * share, spent * share / 2))
    return pd.DataFrame(rows, columns=list(TIME_TYPES))


def test_ten_pairs_of_equal_runs_on_a_changing_machine_are_no_slower() -> None:
    for seed in range(10):
        times = phase_times(drawn(seed), drawn(100 + seed))
        assert times[times["low"] > 1.1].empty
        assert set(times["blocks"]) == {40}


@pytest.mark.parametrize("phase", ["forward", "backward", "loss"])
def test_a_phase_that_is_slower_by_a_third_is_named_and_no_other(phase: str) -> None:
    times = phase_times(drawn(1), drawn(2, slow=phase))
    broken = times[times["low"] > 1.1]
    assert set(broken["phase"]) == {phase}
    assert set(broken["measure"]) == {"elapsed", "in calls"}
    assert set(broken["mostly"]) == {"layers.1"}
    assert broken["ratio"].between(1.5, 2.1).all(), "1.3, and its second module grew from 0.5 to 0.9: 1.4 times more"
    faster = phase_times(drawn(3), drawn(4, slow=phase, factor=0.3))
    assert not (faster["low"] > 1.1).any()
    assert set(faster[faster["change"] == "faster"]["phase"]) >= {phase}


def test_intervals_hold_the_truth_and_say_when_they_cannot() -> None:
    random = np.random.default_rng(0)
    held_true = 0
    for seed in range(100):
        base, new = random.lognormal(0, 0.3, 12), 1.5 * random.lognormal(0, 0.3, 12)
        found = ratio_of_medians(base, new, seed)
        held_true += found.low <= 1.5 <= found.high
        assert found.low <= found.ratio <= found.high
        assert found.ratio == pytest.approx(np.median(new) / np.median(base))
    assert held_true >= 97
    assert np.isnan(ratio_of_medians(np.ones(3), np.ones(3)).ratio), "too few"
    assert np.isnan(ratio_of_medians(np.zeros(9), np.ones(9)).ratio), "no time at all"
    exact = ratio_of_medians(base, 1.3 * base)
    assert exact.low == pytest.approx(1.3) == exact.high
    assert ratio_of_medians(base, new, 1) == ratio_of_medians(base, new, 1)
