"""Float32 inside a float64 case: named, judged by float32's limits, and no excuse for a bug."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.cases import read_case
from harness.engines.threads.inproc import InprocEngine
from harness.recording.capturing.operator_probes import Probed
from harness.running.proof import prove
from harness.running.ranks.execution import execute
from harness.subject import case_of, named
from suites.mutants.catalogue import MUTANTS
from suites.mutants.rows import mutant_killed
from tests.harness import own_words
from tests.harness.own_words import Network


def sigmoid(x: Tensor) -> Tensor:
    """The island."""
    rounded: Tensor = torch.special.expit(x.float()).double()
    return rounded


class Sharp(Network):
    """The same in float64, as truth and subject have it."""

    words = {**own_words.WORDS, "act": ("expit", "rounded", "wrong")}
    cases = ("tp=2 dp=3 act=rounded", "tp=2", "dp=2")

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        """Dense training, all of it in float64."""
        return own_words.truth(case.but(act="expit"), device)


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"expit": torch.special.expit, "rounded": sigmoid, "wrong": lambda x: sigmoid(x) * 1.0001}
    for name, act in known.items():
        monkeypatch.setattr(torch, name, act, raising=False)


@pytest.mark.usefixtures("acts")
def test_an_island_is_named_and_judged_by_its_limits() -> None:
    with InprocEngine() as engine:
        subject = named(Sharp())
        result = prove(case_of("tp=2 dp=3 act=rounded", subject), subject, engine)
        wrong = prove(case_of("tp=2 dp=3 act=wrong", subject), subject, engine)
    assert result.verdict == "pass"
    unchecked = {name for verdict in result.verdicts for name in verdict.unchecked}
    said = "errors below those of float32 (the float64 case uses float32, which enters at tests/harness/running/test_"
    assert any(name.startswith(said) for name in unchecked), unchecked
    assert wrong.verdict == "fail", "0.01 % is no rounding of float32"


class Narrow(Network):
    """Sums over tp in float32; refuses one rank where `shy`."""

    def __init__(self, *, shy: bool) -> None:
        super().__init__()
        self.shy = shy

    def refuses(self, case: Any) -> str:
        """One rank, where shy."""
        return "needs ranks" if self.shy and case.world_size == 1 else ""


@pytest.mark.parametrize(("shy", "verdict"), [(False, "fail"), (True, "unknown")])
def test_on_several_ranks_alone_it_is_wrong(shy: bool, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the model has; where no run on one rank shows it, nobody can know."""
    summed = own_words.Reduced.forward

    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        several = dist.get_world_size(group) > 1
        total: Tensor = summed(ctx, x.float() if several else x, group)
        return total.to(x.dtype)

    monkeypatch.setattr(own_words.Reduced, "forward", staticmethod(forward))
    subject = named(Narrow(shy=shy))
    with InprocEngine() as engine:
        result = prove(case_of("tp=2 dp=3", subject), subject, engine)
    assert result.verdict == verdict
    messages = [one.message for one in result.verdicts if one.verdict == verdict and one.check != "regrouping"]
    assert messages and all("float32, which enters at tests/harness/running/test_islands.py" in one for one in messages)


def test_our_own_subject_has_none() -> None:
    case = read_case("mode=isp tp=2 dp=2 wp=2 micro=3 optimizer=adamw clip=0.1 metric=true recompute=full")
    with InprocEngine() as engine:
        run = execute(case, Probed(named("parallel.subject:subject")), engine, text=str(case), record=False)
    assert run.outcomes == ({},) * 4


class Cast(Network):
    """Right on one rank; on several its loss is too large by 1e-8 where `wrong`."""

    wrong = False

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        """The outcome."""
        self.factor = 1 + 1e-8 if self.wrong and case.tp > 1 else 1.0
        return super().__call__(case, device)


@pytest.mark.parametrize("truth", ["", "alone"])
def test_constants_that_both_sides_cast_are_no_excuse(truth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = own_words.weights

    def cast(case: Any) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(w.tolist(), dtype=torch.float32).to(w.dtype) for w in drawn(case))

    monkeypatch.setattr(own_words, "weights", cast)
    monkeypatch.setattr(torch, "relu", lambda x: x.clamp_min(0) * torch.tensor(0.3))  # a table in float32
    subject = Cast()
    given = named(subject, truth)
    with InprocEngine() as engine:
        assert prove(case_of("tp=2 dp=3", given), given, engine).verdict == "pass"
        subject.wrong = True
        wrong = prove(case_of("tp=2 dp=3", given), given, engine)
    assert {"forward", "parameter_gradients"} <= {v.check for v in wrong.verdicts if v.verdict == "fail"}


class Patched(Network):
    """Runs inside its session alone."""

    inside = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """A patch that a library needs."""
        self.inside = True
        yield
        self.inside = False

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        """The outcome."""
        if not self.inside:
            raise RuntimeError("not patched")
        return super().__call__(case, device)


def test_they_are_looked_for_in_the_session_of_the_subject() -> None:
    given = named(Patched())
    with InprocEngine() as engine:
        run = execute(case_of("tp=2", given), Probed(given), engine, text="tp=2", record=False)
    assert run.outcomes == ({},) * 2


def test_parameters_that_are_stored_in_float32_are_no_part_of_the_model() -> None:
    (mutant,) = (one for one in MUTANTS if one.name == "parameters-rounded-to-float32")
    with InprocEngine() as engine:
        row = mutant_killed(mutant, "tp-sp", engine).row
    assert "update" in row.killed_by and row.cause_told == "right"
