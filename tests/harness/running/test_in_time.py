"""The time limit of the dense model: it binds what computes in Python, and leaves nothing behind."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from torch import Tensor

from harness.errors import TimeLimit
from harness.running.proof import prove
from harness.running.trials.trial import in_time
from harness.subject import NamedSubject
from reference.case import Case
from reference.training import subject as dense
from tests.harness.command_line import ONE
from tests.harness.toy_subjects import LoopEngine


def endless() -> None:
    """Compute for ever."""
    while True:
        time.sleep(0.01)


def test_what_takes_longer_than_its_limit_ends_with_the_line_where_it_stood() -> None:
    begin_s = time.monotonic()
    told = r"time limit of 0\.1 s: the model is at work at \S*test_in_time\.py:\d+ in endless"
    with pytest.raises(TimeLimit, match=told), in_time(0.1, "the model"):
        endless()
    assert time.monotonic() - begin_s < 10
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_body_that_catches_the_interruption_is_interrupted_again() -> None:
    caught = 0
    with pytest.raises(TimeLimit), in_time(0.1, "the model"):
        try:
            endless()
        except Exception:
            caught += 1
            endless()
    assert caught == 1


def test_a_program_with_an_alarm_of_its_own_keeps_it() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    try:
        with in_time(0.01, "the model"):
            time.sleep(0.7)
        assert not heard and signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


class Endless:
    """A right subject whose truth never ends."""

    def __call__(self, case: Case, device: torch.device) -> dict[str, Tensor]:
        return dense.subject(case, device)

    @staticmethod
    def truth(case: Case, device: torch.device) -> dict[str, Tensor]:
        """Nothing, ever."""
        endless()
        return {}


def test_a_truth_that_never_ends_is_unknown_in_the_time_of_a_run() -> None:
    subject = NamedSubject(name="my:subject", call=Endless())
    result = prove(Case.parse(ONE), subject, LoopEngine(), timeout_s=0.2)
    assert result.verdict == "unknown" and result.machine.startswith("time limit of 0.2 s: the dense model is at work")
