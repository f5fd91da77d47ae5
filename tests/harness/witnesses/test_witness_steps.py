"""Chosen steps of a run: witnesses see no others."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from shardproof.harness.dense_model import parse_cases
from shardproof.harness.running.witnessing import witnesses
from shardproof.harness.traces.nsys_export import nsys_path
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN
from shardproof.harness.witnesses import session
from shardproof.harness.witnesses.chosen import step_ends, terms_of, watch_steps
from tests.harness.noted import reasons_of
from tests.harness.witnesses.stepped_subject import CALLS, subject, uneven
from tests.harness.witnesses.test_witness_session import forked

NAME = "tests.harness.witnesses.stepped_subject:subject"
NSYS = pytest.mark.skipif(nsys_path() is None, reason="nsys is not on PATH (Debian: nsight-systems, non-free)")
CHOSEN = range(1, 3)
EXPECTED = subject.expected  # type: ignore[attr-defined]


CLEAN, INSIDE, BEFORE, AFTER, SHORT = parse_cases(
    [*(f"mode=tp tp=2 steps=4 seed={n}" for n in (9, 2, 0, 3)), "mode=tp tp=2 steps=1"]
)
"""No slip, one in step 2, 0 and 3; and a program that ends before the chosen steps do."""


@pytest.mark.parametrize("tool", ["torch", pytest.param("nsys", marks=NSYS)])
def test_witnesses_see_the_chosen_steps_alone(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session of all cases, which takes ten CPU seconds under nsys, and all of its messages.

    A closed form that knows no single steps is not held against some, and steps that a program lacks are named.
    """
    cases = (CLEAN, INSIDE, BEFORE, AFTER, SHORT)
    monkeypatch.setattr(session, "_run_child", forked)  # nsys starts its own
    seen = witnesses(cases, NAME, (tool,), tmp_path, device="cpu", timeout_s=60.0, steps=CHOSEN)
    for case in (CLEAN, BEFORE, AFTER):
        told = seen.judge_case(case, (), EXPECTED(case), EXPECTED).verdict
        assert told.verdict == PASS, told.message
        events = 2 * CALLS * len(CHOSEN)
        assert told.message == f"ledger, {tool}, closed_form agree on {events} events of 2 ranks in steps 1:3"
    told = seen.judge_case(INSIDE, (), EXPECTED(INSIDE), EXPECTED).verdict
    assert told.verdict == FAIL
    # It follows the broadcast of step 2, the second that is watched: calls 0 to 5 of step 1, then 6 and 7.
    assert told.message.splitlines()[0] == (
        f"what:   event {CALLS + 1} of rank 0: the ledger has data broadcast of 32 B over 0,1; "
        "closed_form saw nothing; 1 more event differs (check witnesses)"
    )
    assert told.message.splitlines()[-1].endswith(f"--profile {tool} --profile-steps 1:3")
    told = seen.judge_case(CLEAN, (), list(uneven(CLEAN)), uneven).verdict
    assert told.verdict == PASS
    assert told.message.endswith(
        "the closed form was not asked: the closed form does not tell which step has what: "
        "1 data broadcast in no module in 4 steps, and 1 in one"
    )
    assert reasons_of(told) == ["closed form of the chosen steps"]
    told = seen.judge_case(SHORT, (), None).verdict
    assert told.verdict == UNKNOWN
    assert "steps 1:3 cannot be watched: the program ends 1 of them, as its optimizers tell" in told.message


class Run:
    """A toy run of steps with two optimizers that writes down what happens, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self) -> None:
        model = nn.Linear(2, 2)
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        for step in range(4):
            self.told.append(f"data {step}")
            model(torch.ones(1, 2)).sum().backward()
            for optimizer in optimizers:
                self.told.append(f"update {step}")
                optimizer.step()
        self.told.append("metric")

    @contextmanager
    def marked(self) -> Iterator[None]:
        self.told.append("[")
        yield
        self.told.append("]")


def step(number: int) -> list[str]:
    return [f"data {number}", f"update {number}", f"update {number}"]


@pytest.mark.parametrize("chosen", [range(1), range(1, 3), range(4)])
def test_a_stretch_begins_and_ends_with_its_steps_whatever_the_number_of_optimizers(chosen: range) -> None:
    run = Run()
    ends = step_ends(0, run)
    assert ends == (2, 4, 6, 8)
    run.told.clear()
    with watch_steps(chosen, ends, run.marked):
        run()
    every = [*step(0), *step(1), *step(2), *step(3)]
    first, last = 3 * chosen.start, 3 * chosen.stop
    inside, after = every[first:last], every[last:]
    end = [*after, "metric"] if after else []
    assert run.told == [*every[:first], "[", *inside, *([] if after else ["metric"]), "]", *end]


def test_the_closed_form_of_chosen_steps_is_as_many_times_that_of_one_step() -> None:
    (case,) = parse_cases(["mode=tp tp=2 steps=4"])
    terms, why = terms_of(CHOSEN, case, EXPECTED(case), EXPECTED)
    assert terms is not None and not why and [term.calls for term in terms] == [2] * 6
    assert terms_of(CHOSEN, case, EXPECTED(case), None)[0] is None

    def broken(_case: object) -> object:
        raise ValueError("no")

    why = "the closed form of one step failed: ValueError: no"
    assert terms_of(CHOSEN, case, EXPECTED(case), broken) == (None, why)
