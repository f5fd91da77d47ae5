"""A second process beside the first: the same run folder, no case lost whatever becomes of it, one sentence."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor

from harness.cases import parse_cases
from harness.running.proved import Proved
from harness.running.request import Request
from harness.running.run import RunResult, run
from harness.running.sharing import Sharing
from harness.subject import named
from reference.case import Case
from reference.training import subject as dense

FIRST = "SHARDPROOF_TEST_FIRST_PROCESS"
CASES = tuple(
    f"mode=tp tp=1 layers=1 hidden=16 heads=2 vocab=24 seq=8 micro=1 steps=1 seed={seed}" for seed in range(5)
)


def told(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The dense model; wrong with an odd seed."""
    outcome = dense.subject(case, device)
    outcome["loss/0"] *= 1 + case.seed % 2
    return outcome


def mortal(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The dense model, which kills every process but the first."""
    if str(os.getpid()) != os.environ[FIRST]:
        os.kill(os.getpid(), signal.SIGKILL)
    return dense.subject(case, device)


def ran(out: Path, subject: str, processes: int) -> tuple[RunResult, list[str]]:
    """The result, and the cases in the order in which they were told."""
    order: list[str] = []
    request = Request(cases=parse_cases(CASES), subject=named(f"{__name__}:{subject}"), out=out, processes=processes)
    return run(request, lambda done, total, case, verdict: order.append(str(case))), order


def test_two_processes_write_the_folder_that_one_writes(tmp_path: Path) -> None:
    (alone, order), (both, order_of_both) = (ran(tmp_path / str(n), "told", n) for n in (1, 2))
    assert order == order_of_both == [str(Case.parse(text)) for text in CASES]
    assert [dataclasses.replace(v, message="") for v in both.verdicts] == [
        dataclasses.replace(v, message="") for v in alone.verdicts
    ]
    assert (both.exit_status, both.notes) == (alone.exit_status, alone.notes) == (1, ())
    for name in ("cases.jsonl", "summary.csv", "memory.csv"):
        assert (both.path / name).read_text() == (alone.path / name).read_text()
    assert list(pd.read_csv(both.path / "timings.csv")["case"].unique()) == order


def test_a_second_process_that_dies_costs_no_case_and_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FIRST, str(os.getpid()))
    result, order = ran(tmp_path, "mortal", 2)
    assert (result.exit_status, len(order)) == (0, len(CASES))
    ended = "killed by SIGKILL, as the system does when memory runs out"
    assert result.notes == (f"a process that proves cases ended ({ended}): its cases were proved in the first",)


def test_what_was_finished_is_kept_when_the_first_is_interrupted() -> None:
    second, kept = Answering(), list[str]()

    def interrupted(number: int) -> Proved:
        if number:
            raise KeyboardInterrupt
        return answer(str(number))

    with pytest.raises(KeyboardInterrupt):
        sharing("abcdef", interrupted, kept, second).prove_all()
    assert kept == ["0", "b", "c", "e", "f"], "all but the one that was being proved"


def test_cases_that_stand_together_are_proved_by_one_process() -> None:
    second, kept, here = Answering(), list[str](), list[int]()

    def prove_here(number: int) -> Proved:
        here.append(number)
        return answer("abcdefg"[number])

    sharing("abcdefg", prove_here, kept, second).prove_all([[0, 1, 2], [3, 4], [5, 6]])
    assert kept == list("abcdefg")
    assert here == [0, 1, 2], "the second had the others, and was given more whenever it held one case or none"


def sharing(cases: str, prove_here: Callable[[int], Proved], kept: list[str], second: Answering) -> Sharing:
    """Cases that are letters, shared with a process that answers at once."""

    def keep(result: Proved) -> bool:
        kept.append(result.text)
        return True

    return Sharing(cases=list(cases), keep=keep, prove_here=prove_here, processes=[second])  # type: ignore[arg-type,list-item]


def answer(text: str) -> Proved:
    return Proved(
        text=text, verdicts=(), verdict="pass", machine=False, seconds={}, ledger="", rows=(), saved_bytes=(), ran=()
    )


class Answering:
    """A second process that has answers at once."""

    note = ""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.error = None
        self.texts: dict[int, str] = {}

    def ask(self, number: int, text: str) -> None:
        """Take a case."""
        self.asked.append(number)
        self.texts[number] = text

    def answers(self) -> dict[int, Proved]:
        """All that it was asked."""
        found = {number: answer(self.texts[number]) for number in self.asked}
        self.asked.clear()
        return found
