"""`shardproof expect`: what a run did, printed as terms, holds for the same program and for no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardproof
from harness.checking.checks import CHECKS
from harness.differences import differences
from harness.engines.threads.inproc import InprocEngine
from harness.protocols import TermLike
from harness.running.proof import prove
from parallel.subject import subject as ours
from reference.case import Case
from reports.commands import expect
from reports.stored import frames
from tests.harness.command_line import CommandLine, command_line
from tests.reports import sample_run

CASE = Case.parse("mode=tp-sp tp=2 dp=2 layers=1 hidden=16 heads=2 seq=4")


class Stating:
    """Ours under another closed form, with one all_reduce more on request."""

    refuses = staticmethod(lambda case: "")

    def __init__(self, expected: Callable[[Any], Any] | None = None, *, extra: bool = False) -> None:
        self.expected, self._extra = expected, extra

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        outcome = ours(case, device)
        if self._extra:
            dist.all_reduce(torch.ones(3))
        return outcome


unstated = Stating()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shardproof.run([str(CASE)], f"{__name__}:unstated", out=tmp_path_factory.mktemp("runs")).path


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return command_line(tmp_path, monkeypatch, capsys)


def pasted(text: str) -> Callable[[Any], list[shardproof.Term] | None]:
    """The function that this Python defines."""
    names: dict[str, Any] = {}
    exec(text, names)
    found: Callable[[Any], list[shardproof.Term] | None] = names["expected"]
    return found


@pytest.mark.parametrize("options", [(), ("--short",)], ids=["whole", "short"])
def test_recorded_printed_pasted_proved(recorded: Path, command: CommandLine, options: tuple[str, ...]) -> None:
    status, out, err = command("expect", str(recorded), *options)
    assert (status, err) == (0, "")
    expected = pasted(out)
    terms = expected(CASE)
    assert terms is not None
    assert all(bool(term.left_out) == bool(options) for term in terms)
    assert expected(CASE.but(seed=1)) is None, "it is of this case alone"
    with InprocEngine() as engine:
        right = prove(CASE, Stating(expected), engine, checks={"ledger": CHECKS["ledger"]})
        wrong = prove(CASE, Stating(expected, extra=True), engine, checks={"ledger": CHECKS["ledger"]})
    assert (right.verdict, wrong.verdict) == ("pass", "fail")
    assert "all_reduce sum of 12 B float32" in wrong.verdicts[0].message


def test_the_case_is_named_where_a_run_has_several(tmp_path: Path, command: CommandLine) -> None:
    run = str(sample_run.write(tmp_path / "stored", failing=True))
    legal = 'legal: "mode=tp tp=2", "mode=tp-sp tp=2 seq=64"'
    assert f"has 2 cases, so name one; {legal}" in command.refused("expect", run)
    assert f"case 'mode=isp': is not in run {run}; {legal}" in command.refused("expect", run, "mode=isp")
    status, out, err = command("expect", run, "tp=2 mode=tp-sp seq=64", "--short")
    assert (status, err) == (0, "")
    assert 'Term(op="all_gather", axis="tp", calls=6, total_bytes=24576),' in out
    assert (
        command("expect", run, "mode=tp tp=2")[2]
        == "note: mode=tp tp=2 did not pass (update): what it did may be wrong\n"
    )


@pytest.mark.parametrize("short", [False, True])
def test_ranks_that_differ_have_a_comment_and_a_term_that_holds_for_all(tmp_path: Path, short: bool) -> None:
    run = frames.load(sample_run.write(tmp_path / "stored"))
    events = run.events.copy()
    of_rank_1 = (events["case"] == sample_run.TP_SP) & (events["rank"] == 1)
    gathers = of_rank_1 & (events["op"] == "all_gather")
    events.loc[gathers & (events["phase"] == "forward"), "payload_bytes"] = 4000
    events = events[~(of_rank_1 & (events["op"] == "reduce_scatter"))]
    found = expect.lines(dataclasses.replace(run, ledger=events), sample_run.TP_SP, short=short)
    terms: list[TermLike] = [line.term for line in found]
    ledger = [event for event in sample_run.events(sample_run.TP_SP, sample_run.CALLS[sample_run.TP_SP])]
    kept = [
        dataclasses.replace(event, payload_bytes=4000 if (event.op, event.phase) == ("all_gather", "forward") else 4096)
        if event.rank == 1
        else event
        for event in ledger
        if event.rank == 0 or event.op != "reduce_scatter"
    ]
    axes = {"tp": ((0, 1),)}
    assert differences(kept, terms, range(2), axes=axes) == []
    assert differences([*kept, kept[0]], terms, range(2), axes=axes)
    text = expect.written("c", "r", found)
    if short:
        told = [line.differ for line in found if line.differ]
        assert told[-1] == "rank 0: 2 calls, 8192 B; rank 1: 0 calls, 0 B"
        assert text.count("# ranks differ, and a term is for all of them: ") == 2
    else:
        assert "# ranks differ" not in text
        assert [text.count(f'at={{"tp": {place}}}') for place in range(2)] == [2, 1], "gathers on both, sums on one"
        assert "payload_bytes=4096, calls=4)" in text, "what is equal on all ranks holds for all"
