"""Numbers that are drawn in forward, dropout apart: named as the cause where the truth does not draw them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from harness.engines.threads.inproc import InprocEngine
from harness.running.proof import CaseResult
from tests.harness.proofs import proved

ROWS, WIDTH, EXPERTS = 4, 8, 3


class Router(nn.Module):
    """Scores of experts, with numbers of a random stream or without: `noise` is a word of the case."""

    def __init__(self, noise: str) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.noise = noise

    def forward(self, x: Tensor, numbers: range) -> Tensor:
        """The shares [rows, experts]."""
        logits: Tensor = self.gate(x)
        if self.noise == "jitter":
            logits = logits * (1 + 0.01 * torch.rand_like(logits))
        if self.noise == "gumbel":
            return functional.gumbel_softmax(logits, hard=False)
        if self.noise == "normal":
            logits = logits + torch.zeros(logits.shape, dtype=logits.dtype).normal_(0, 0.1)
        if self.noise == "dropout":
            logits = functional.dropout(logits, 0.25)
        if self.noise == "seeded":
            drawn = [torch.rand(EXPERTS, generator=torch.Generator().manual_seed(n)) for n in numbers]
            logits = logits + torch.stack(drawn).to(logits)
        return logits.softmax(-1)


class Model(nn.Module):
    """One router and its experts, all computed."""

    def __init__(self, noise: str) -> None:
        super().__init__()
        self.router = Router(noise)
        self.experts = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor, numbers: range) -> Tensor:
        """[rows]."""
        y: Tensor = (self.router(x, numbers) * self.experts(x)).sum(-1)
        return y


def trained(case: Any, noise: str, dp_ranks: range, factor: float = 1.0) -> Mapping[str, Any]:
    """Gradients of one step, added up over data ranks where several are."""
    torch.manual_seed(case.seed)
    model = Model(noise).to(getattr(torch, case.dtype))
    total = torch.zeros((), dtype=getattr(torch, case.dtype))
    for micro in range(case.micro):
        for dp_rank in dp_ranks:
            numbers = case.samples(0, micro, dp_rank, ROWS)
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(numbers.start)).to(total)
            loss = model(x, numbers).square().sum() / (case.dp * case.micro) * factor
            loss.backward()
            total = total + loss.detach()
    gradients = {f"grad/{name}": one.grad for name, one in model.named_parameters() if one.grad is not None}
    for tensor in (total, *gradients.values()) if case.world_size > 1 and len(dp_ranks) == 1 else ():
        dist.all_reduce(tensor)
    return {"loss/0": total, **gradients}


class Noisy:
    """The subject. `factor` of its loss: any but 1 is a bug."""

    words = {"noise": ("jitter", "gumbel", "normal", "dropout", "seeded", "none"), "steps": 1}
    cases = ("dp=2",)

    def __init__(self, truth: Any, factor: float = 1.0) -> None:
        self.truth, self.factor = truth, factor

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        return trained(case, case.noise, range(dist.get_rank(), dist.get_rank() + 1), self.factor)


def same(case: Any, device: torch.device) -> Mapping[str, Any]:
    """The dense model with the same noise."""
    return trained(case, case.noise, range(case.dp))


def quiet(case: Any, device: torch.device) -> Mapping[str, Any]:
    """The dense model without any, unless it is seeded."""
    return trained(case, case.noise if case.noise == "seeded" else "none", range(case.dp))


OPERATORS = {
    "jitter": "torch.rand_like",
    "gumbel": "Tensor.exponential_",
    "normal": "Tensor.normal_",
    "dropout": "Tensor.bernoulli_",
}


@pytest.mark.parametrize("truth", ["alone", same, quiet])
@pytest.mark.parametrize("noise", ["jitter", "gumbel", "normal"])
def test_they_are_the_cause_with_operator_line_and_module(noise: str, truth: Any, engine: InprocEngine) -> None:
    result = proved(Noisy(truth), f"dp=2 noise={noise}", engine)
    assert result.verdict == "fail"
    _one_cause(result, noise)


def _one_cause(result: CaseResult, noise: str) -> None:
    causes = {cause for one in result.diagnoses.values() if one for cause in one.causes}
    assert {cause.id for cause in causes} == {"other_numbers"}, causes
    (words,) = {cause.words for cause in causes}
    assert words.startswith(f"{OPERATORS[noise]} at ") and " in module router draws other numbers than" in words, words
    assert "switch that off for the proof" in words


def test_dropout_that_the_truth_has_not_is_one_of_them(engine: InprocEngine) -> None:
    _one_cause(proved(Noisy(quiet), "dp=2 noise=dropout", engine), "dropout")


def test_one_rank_that_draws_what_the_truth_draws_is_right(engine: InprocEngine) -> None:
    alone = proved(Noisy("alone"), "noise=jitter", engine)
    assert {verdict.check for verdict in alone.verdicts if verdict.verdict == "fail"} == {"regrouping"}
    causes = {cause.words for one in alone.diagnoses.values() if one for cause in one.causes}
    assert len(causes) == 1 and "draws other numbers than a run with dp=2 micro=1 does" in causes.pop()
    assert proved(Noisy("alone"), "dp=2 noise=seeded", engine).verdict == "pass"
    assert proved(Noisy(quiet), "dp=2 noise=seeded", engine).verdict == "pass"


@pytest.mark.parametrize("noise", ["seeded", "none"])
def test_a_bug_beside_equal_numbers_keeps_its_own_cause(noise: str, engine: InprocEngine) -> None:
    result = proved(Noisy(same, factor=2.0), f"dp=2 noise={noise}", engine)
    causes = {cause.id for one in result.diagnoses.values() if one for cause in one.causes}
    assert result.verdict == "fail" and causes and "other_numbers" not in causes


class Functions(Noisy):
    """The same noise in code of functions, behind the first product."""

    words = {"steps": 1}

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        return functions(case, range(dist.get_rank(), dist.get_rank() + 1))


def functions(case: Any, dp_ranks: range) -> Mapping[str, Any]:
    """One step without modules."""
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).to(getattr(torch, case.dtype))
    weight.requires_grad_()
    for micro in range(case.micro):
        for dp_rank in dp_ranks:
            numbers = case.samples(0, micro, dp_rank, ROWS)
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(numbers.start)).to(weight.dtype)
            y = x @ weight
            (y * torch.rand(y.shape, dtype=y.dtype)).square().sum().div(case.dp * case.micro).backward()
    assert weight.grad is not None
    if case.world_size > 1 and len(dp_ranks) == 1:
        dist.all_reduce(weight.grad)
    return {"grad/weight": weight.grad}


def test_functions_are_looked_at_too(engine: InprocEngine) -> None:
    subject = Functions(lambda case, device: functions(case, range(case.dp)))
    causes = {cause for one in proved(subject, "dp=2", engine).diagnoses.values() if one for cause in one.causes}
    (cause,) = causes
    assert cause.id == "other_numbers" and cause.words.startswith("torch.rand at tests/harness/running/subjects/test_d")
