"""The check of packed rows: what crosses a border is found with the numbers of both documents, forward and backward.

Every bug here is in a model that truth and ranks share, so that no other check can notice it.
"""

from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardproof
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.running.trials.document_runs import _separating_sets
from tests.harness.proofs import contradicted, proved

NUMBERS = torch.tensor([[4, 4, 7, 7, 7, 9], [5, 5, 5, 8, 8, -1]])
"""The document of every token, for two rows; -1 for a token of no document."""
Mix = Callable[[Tensor, Tensor], Tensor]
"""(tokens [rows, tokens, width], documents) -> what each token makes of the tokens before it."""


def own(x: Tensor, numbers: Tensor) -> Tensor:
    """The sum over the tokens of its own document."""
    return torch.einsum("rts,rsw->rtw", (numbers[:, :, None] == numbers[:, None]).to(x), x)


def all_before(x: Tensor, numbers: Tensor) -> Tensor:
    """The sum over the whole row up to a token."""
    return x.cumsum(1)


def backward_alone(x: Tensor, numbers: Tensor) -> Tensor:
    """Right in forward, but in backward the gradient reaches the whole row."""
    beyond = x.cumsum(1)
    return own(x, numbers) + beyond - beyond.detach()


def other_rows(x: Tensor, numbers: Tensor) -> Tensor:
    """A function of the row's own document, and beside it a mean over all rows."""
    return own(x, numbers) + x.mean(0)


def rounded(x: Tensor, numbers: Tensor) -> Tensor:
    """A change as small as rounding, as when the number of rows of a product depends on values."""
    return own(x, numbers) * (1 + torch.finfo(x.dtype).eps * ((1000 * x.detach().sum()).long() % 3).to(x))


class Packed:
    """A subject of two packed rows. Every data rank draws tokens of its own for the same documents."""

    words, cases = {"micro": (1,)}, ("dp=2",)

    def __init__(self, mix: Mix, numbers: Tensor = NUMBERS) -> None:
        self.mix, self.numbers = mix, numbers

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        """A step of SGD a step, over the data ranks."""
        return self.train(case, [dist.get_rank()], dist.all_reduce)

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        """The same with every data rank's rows."""
        return self.train(case, range(case.dp), lambda x: None)

    def train(self, case: Any, dp_ranks: Any, over: Callable[[Tensor], Any]) -> Mapping[str, Any]:
        """Losses, gradient and parameter."""
        draws, outcome = torch.Generator().manual_seed(case.seed), dict[str, Any]()
        weight = torch.randn(3, 3, generator=draws, dtype=torch.float64).requires_grad_()
        for step in range(case.steps):
            loss = torch.zeros((), dtype=torch.float64)
            for dp_rank in dp_ranks:
                first = case.samples(step, 0, dp_rank, 2).start
                x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(first), dtype=torch.float64) @ weight
                numbers = torch.where(self.numbers < 0, self.numbers, self.numbers + 10 * dp_rank)
                x = shardproof.documents(x, numbers)
                loss = loss + shardproof.documents(self.mix(x, numbers), numbers).sin().sum()
            (gradient,) = torch.autograd.grad(loss, weight)
            for x in (outcome.setdefault(f"loss/{step}", loss.detach()), gradient):
                over(x)
            outcome |= {"grad/weight": gradient.clone()} if step == 0 else {}
            weight = (weight - 0.1 * gradient).detach().requires_grad_()
        return outcome | {"param/weight": weight.detach()}


LEAKS: Mapping[str, tuple[Mix, str, str]] = {
    "all_before": (all_before, "document 7 changes document 9: token 5 on rank 0 ", "forward"),
    "backward_alone": (backward_alone, "the gradient of document 9 reaches document 4: token ", "backward"),
    "other_rows": (other_rows, "document 4 changes document 5: token ", "forward"),
}
"""Mixes that cross a border, what is said of them, and the phase."""


def test_documents_that_stay_apart_pass_and_padding_is_of_none() -> None:
    result = proved(Packed(own), "dp=2")
    (found,) = [one for one in result.verdicts if one.check == "documents"]
    message = "10 documents: none changes another one, and no gradient crosses a border"
    assert (result.verdict, found.message) == ("pass", message)
    assert "documents" in result.seconds


@pytest.mark.parametrize(("mix", "told", "phase"), LEAKS.values(), ids=LEAKS)
def test_what_crosses_a_border_is_told_with_both_documents_and_by_no_other_check(
    mix: Mix, told: str, phase: str
) -> None:
    result = proved(Packed(mix), "dp=2")
    assert contradicted(result) == {"documents"}
    (found,) = [one for one in result.verdicts if one.check == "documents"]
    what, *_ = found.message.splitlines()
    assert told in what and "between test_packed_rows.py:" in what
    first = next(line for line in found.message.splitlines() if line.startswith("first:"))
    assert first.startswith(f"first:  {phase}: ") and told in first


def test_a_change_within_rounding_is_unknown_and_so_is_a_single_document() -> None:
    for subject, told in (
        (Packed(rounded), "as little as rounding may change it"),
        (Packed(own, torch.full((2, 6), -1)), "the step has one document"),
    ):
        (found,) = [one for one in proved(subject, "dp=2").verdicts if one.check == "documents"]
        assert found.verdict == "unknown" and told in found.message


def test_numbers_that_are_not_one_for_each_token_are_refused() -> None:
    x = torch.zeros(2, 6, 3)
    for wrong in (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 6)):
        with pytest.raises(ValueError, match="needs a whole number for each token; legal: numbers"):
            shardproof.documents(x, wrong)
    assert shardproof.documents(x, NUMBERS) is x, "outside of a run it is the tensor itself"


def test_every_ordered_pair_of_documents_is_told_apart_by_few_runs() -> None:
    for count, runs in ((2, 2), (6, 4), (70, 8)):
        sets = [*_separating_sets(range(count))]
        assert len(sets) == runs
        assert all(any(a in chosen and b not in chosen for chosen in sets) for a, b in permutations(range(count), 2))


leaking = Packed(all_before)


@pytest.mark.slow
def test_ranks_that_are_processes_are_told_apart_too(pool: PoolEngine) -> None:
    result = proved(f"{__name__}:leaking", "dp=2", pool, explain=False)
    assert contradicted(result) == {"documents"}
