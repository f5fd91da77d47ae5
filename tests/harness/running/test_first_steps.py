"""The first place in later steps: an update that is wrong if the case ends behind it, else the forward of the step."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.proofs import proved, verdict_of
from tests.harness.toy_subjects import Changed


class Trained:
    """A weight trained by SGD on the samples of every data rank; `change` plants a mistake on several ranks."""

    truth, words = "alone", {"micro": 1}

    def __init__(self, change: str, keeps: bool = False, steps: Any = 2) -> None:
        self.change, self.keeps, self.words = change, keeps, {**self.words, "steps": steps}

    def _wrong(self, case: Any, step: int, what: str) -> bool:
        return case.dp > 1 and self.change == f"{what} {step}"

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        w = torch.ones(3, dtype=torch.float64)
        outcome: dict[str, Tensor] = {}
        for step in range(case.steps):
            gradient, total = torch.zeros_like(w), torch.zeros((), dtype=torch.float64)
            for micro in range(case.micro):
                for number in case.samples(step, micro, dist.get_rank(), 2):
                    x = torch.rand(3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
                    y = (w * x).sum() * (2.0 if self._wrong(case, step, "forward") else 1.0)
                    gradient += 2 * y * x / (2 * case.micro * case.dp)
                    total += y.square() / (2 * case.micro * case.dp)
            dist.all_reduce(gradient)
            dist.all_reduce(total)
            outcome[f"loss/{step}"] = total
            if step == 0:
                outcome["grad/w"] = gradient
            w = w - (0.05 if self._wrong(case, step, "update") else 0.1) * gradient
            if self.keeps and step < case.steps - 1:
                outcome[f"param_after/{step}/w"] = w
        return {**outcome, "param/w": w}


def place(subject: Any, case: str, check: str = "forward") -> str:
    """The line of the first place of a case in which this check fails."""
    message: str = verdict_of(proved(subject, case), check).message
    return next(line for line in message.splitlines() if line.startswith("first:")).removeprefix("first:").strip()


@pytest.mark.parametrize(
    ("change", "steps", "first"),
    [
        ("update 0", 2, "optimizer update in step 0: param/w; found by running with steps=1"),
        ("update 1", 3, "optimizer update in step 1: param/w; found by running with steps=2"),
        ("forward 1", 2, "loss in step 1: loss/1; parameters are right where the case ends before that step (steps=1)"),
    ],
)
def test_a_step_that_begins_wrong_is_traced_to_the_update_before_it_or_not(change: str, steps: int, first: str) -> None:
    assert place(Trained(change), f"dp=2 micro=2 steps={steps}") == first


def rated(case: Any, device: torch.device) -> Mapping[str, Tensor]:
    """A layer trained by SGD, whose learning rate is off by 5e-9 on several ranks."""
    layer = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(layer.weight)
    optimizer, outcome = torch.optim.SGD(layer.parameters(), lr=0.01 * (1 + 5e-9 * (case.dp > 1))), {}
    for step in range(case.steps):
        optimizer.zero_grad()
        numbers = [n for micro in range(case.micro) for n in case.samples(step, micro, dist.get_rank(), 2)]
        x = torch.tensor(numbers, dtype=torch.float64)[:, None].add(torch.arange(3.0)).sin()
        loss = layer(x).square().mean() / case.dp
        loss.backward()
        outcome[f"loss/{step}"] = loss.detach()
        for tensor in (outcome[f"loss/{step}"], layer.weight.grad):
            dist.all_reduce(tensor)
        optimizer.step()
    return {**outcome, "param/weight": layer.weight.detach()}


def test_an_error_of_every_update_that_no_loss_shows_is_one_of_the_first() -> None:
    """The loss of step 1 is right to 1e-9 behind an update that is off by 5e-9."""
    first = "optimizer update in step 0: param/weight; found by running with steps=1"
    assert place(Changed(rated, truth="alone", words={}), "dp=2", "update") == first


class OneMicroBatch(Trained):
    """Reads the first micro-batch alone, or every data rank's samples in one request: `change` says which."""

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        numbers = case.samples(0, 0, dist.get_rank() if self.change == "first" else 0, 2)
        if self.change == "all":
            count = case.dp * case.micro
            numbers = case.samples(0, 0, 0, 2 * count)[2 * dist.get_rank() :: count]
        total = torch.tensor([float(number) for number in numbers], dtype=torch.float64).square().sum() * case.dp
        dist.all_reduce(total)
        return {"loss/0": total}


def causes(subject: Any, case: str) -> list[tuple[str, str]]:
    """Ids and words of the causes of a case."""
    return [(cause.id, cause.words) for cause in proved(subject, case).diagnoses["forward"].causes]


def test_samples_that_were_never_asked_for_are_named_and_others_are_no_cause() -> None:
    (found,) = causes(OneMicroBatch("first", steps=1), "dp=2 micro=2")
    assert found[0] == "other_samples"
    assert found[1] == (
        "samples of micro-batch 1 were never asked for (case.samples): "
        "in step 0 the ranks ask for samples 0 1 2 3, and the truth for 0 1"
    )
    for subject in (OneMicroBatch("all", steps=1), Trained("forward 0", steps=1)):
        assert "other_samples" not in dict(causes(subject, "dp=2 micro=2"))


def test_returned_parameters_show_it_without_another_run() -> None:
    assert place(Trained("forward 1", keeps=True), "dp=2") == "loss in step 1: loss/1"


def test_what_cannot_end_earlier_blames_the_update_by_what_was_returned() -> None:
    assert place(Trained("update 0", steps=(2, 3)), "dp=2") == "optimizer update in step 0: loss/1"
