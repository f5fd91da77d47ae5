"""Steps of a recorded program are held against the most typical one, sizes of uneven all-to-alls aside."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from shardproof.harness.ledger import COLUMNS
from shardproof.reports.pages.comment import render_comment
from shardproof.reports.programs import program_tables
from shardproof.reports.programs.unlike import find_unlike_steps
from shardproof.reports.stored.frames import Run, load
from tests.harness.command_line import CommandLine
from tests.reports import sample_run

USUAL: dict[str, Any] = {"phase": "backward", "op": "all_reduce", "caller": "train.py:7"}
SAVED: dict[str, Any] = {"phase": "checkpoint", "op": "all_gather", "caller": "save.py:3"}


def program(folder: Path, *steps: list[dict[str, Any]]) -> Run:
    """The run folder of a recorded program of two ranks, whose ranks issue these calls in each step."""
    folder.mkdir()
    (folder / "env.json").write_text('{"layout": 3}')
    (folder / "cases.jsonl").write_text('{"case": "train.py", "mode": "program", "world_size": 2}\n')
    event = sample_run.events(sample_run.TP, sample_run.CALLS[sample_run.TP])[0]
    plain = {**dict(zip(COLUMNS, sample_run.row(event), strict=True)), "region": "", "sent_rows": ""}
    for rank in (0, 1):
        part = folder / "ranks" / str(rank)
        part.mkdir(parents=True)
        calls = [{**call, "rank": rank, "step": step} for step, calls in enumerate(steps) for call in calls]
        frame = pd.DataFrame([{**plain, **call, "call_index": index} for index, call in enumerate(calls)])
        frame.to_csv(part / "ledger.csv", index=False)
        (part / "steps.csv").write_text("step,start_us,updated_us,microbatches\n0,0.0,1.0,1\n")
        (part / "groups.csv").write_text("axis,ranks\ntp,0 1\n")
        (part / "end.json").write_text('{"calls": 1}')
        (part / "rank.json").write_text('{"clock": "one"}')
    return load(folder)


def exchange(*rows: int) -> dict[str, Any]:
    """An all-to-all that sends these rows of 8 bytes."""
    text = "+".join(map(str, rows))
    return {**USUAL, "op": "all_to_all", "sent_rows": text, "payload_bytes": 8 * sum(rows), "caller": "moe.py:5"}


def test_uneven_exchanges_are_alike_whatever_they_send_and_even_ones_are_not(tmp_path: Path) -> None:
    sent = ((3, 1), (2, 2), (0, 5), (4, 4), (1, 1))
    uneven = [[USUAL, exchange(*rows)] for rows in sent]
    assert list(find_unlike_steps(program(tmp_path / "uneven", *uneven), "step")) == []
    uneven[2].append(SAVED)
    (found,) = find_unlike_steps(program(tmp_path / "saved", *uneven), "step")
    assert found.startswith(
        "step 2, unlike steps 0..1,3..4: 1 more, first checkpoint all_gather of 4,096 B float64 over tp"
    )
    even = [[USUAL, exchange(*rows)] for rows in ((2, 2), (2, 2), (3, 3))]
    (found,) = find_unlike_steps(program(tmp_path / "even", *even), "step")
    assert found.startswith("step 2, unlike steps 0..1: 1 more, first backward all_to_all of 48 B")


def test_the_standard_is_the_step_that_is_closest_to_all_where_none_repeats(tmp_path: Path) -> None:
    """The first step is a warm-up and the last one a save; each of those between has a call of its own size."""
    middle = [[USUAL] * 4 + [{**USUAL, "payload_bytes": 100 + step}] for step in range(4)]
    steps = [[*[SAVED] * 9, USUAL], *middle, [*[USUAL] * 4, *[SAVED] * 5]]
    found = list(find_unlike_steps(program(tmp_path / "run", *steps), "step"))
    assert found and all(
        f"unlike step {typical}:" in one for one in found for typical in (found[0].split()[4].rstrip(":"),)
    )
    assert found[0].split()[4].rstrip(":") in {"1", "2", "3", "4"}


def test_the_comment_says_what_the_page_says(shardproof: CommandLine, tmp_path: Path) -> None:
    run = program(tmp_path / "run", *[[USUAL]] * 3, [USUAL, SAVED])
    parts = program_tables.parts_of_page(run)
    status, out, _ = shardproof("page", "run", "--markdown")
    assert status == 0 and out.strip() == render_comment(run).strip()
    for finding in parts["findings"]:  # type: ignore[attr-defined]
        assert finding in out
    for table in (parts["program"], *parts["traffic"]):  # type: ignore[misc]
        assert f"### {table.title}" in out and table.note in out
    assert "| checkpoint | all_gather | tp | 2 | 1 |" in out
    for verdict in ("pass", "fail", "0 cases", "decided"):
        assert verdict not in out


@pytest.mark.parametrize("ranks", [2])
def test_a_program_without_calls_has_a_comment(tmp_path: Path, ranks: int) -> None:
    run = program(tmp_path / "run", [USUAL])
    for part in (tmp_path / "run" / "ranks").iterdir():
        text = (part / "ledger.csv").read_text()
        (part / "ledger.csv").write_text(text.partition("\n")[0] + "\n")
    found = render_comment(load(run.path))
    assert f"recorded on {ranks} ranks" in found and "no call was recorded" in found
