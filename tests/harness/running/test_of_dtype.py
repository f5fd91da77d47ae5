"""Truths that depend on the dtype by an operator are named by it, and compared in the dtype of the case."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.foreign import numpy_truth
from shardproof.harness.running.truth.of_dtype import Forward, OperatorStep, differing_operator
from shardproof.harness.verdicts.verdict import PASS
from shardproof.reports.stored.frames import load
from shardproof.reports.stored.unchecked import unchecked_notes
from tests.harness.noted import reasons_of
from tests.harness.proofs import proved, ran, verdict_of


def _summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


class Normed:
    """Trains rows behind a norm over dp; `norm` is a function of rows, `factor` a bug of the ranks' loss."""

    words, cases = {"micro": 1, "steps": 1}, ("dp=2 dtype=float32",)

    def __init__(self, norm: Callable[[Tensor], Tensor], factor: float = 1.0, drawn: bool = False) -> None:
        self.norm, self.factor, self.drawn = norm, factor, drawn

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        return self.trained(case, range(case.dp), 1.0, lambda x: x)

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        return self.trained(case, [dist.get_rank()], self.factor, _summed)

    def trained(self, case: Any, ranks: Any, factor: float, total: Callable[[Tensor], Tensor]) -> Mapping[str, Tensor]:
        dtype, generator = getattr(torch, case.dtype), torch.Generator().manual_seed(case.seed)
        drawn = torch.randn(8, 8, generator=generator, dtype=dtype if self.drawn else torch.float64)
        w, losses = drawn.to(dtype).requires_grad_(), []
        for rank, micro in itertools.product(ranks, range(case.micro)):
            rows = [torch.randn(8, generator=torch.Generator().manual_seed(n)) for n in case.samples(0, micro, rank, 4)]
            y = self.norm(torch.stack(rows).to(dtype) * 0.02) @ w
            losses.append(y.square().mean() * factor / (case.dp * case.micro))
            losses[-1].backward()
        assert w.grad is not None
        return {"loss/0": total(torch.stack(losses).sum().detach()), "grad/w": total(w.grad)}


def by_hand(x: Tensor) -> Tensor:
    """A norm with the dtype's eps, and attention whose mask is the dtype's least number."""
    scores = (x @ x.T).masked_fill(torch.ones(4, 4).triu(1).bool(), torch.finfo(x.dtype).min)
    x = torch.softmax(scores, -1) @ x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)


DEFAULT_EPS = torch.nn.RMSNorm(8, elementwise_affine=False)
CALLED, EPS = Normed.trained.__code__.co_firstlineno + 6, by_hand.__code__.co_firstlineno + 4


@pytest.mark.parametrize(
    ("norm", "dtype", "truth", "line"),
    [(DEFAULT_EPS, "float32", "", CALLED), (by_hand, "float32", "alone", EPS), (by_hand, "bfloat16", "", EPS)],
)
def test_a_function_that_depends_on_the_dtype_is_compared_in_it(norm: Any, dtype: str, truth: str, line: int) -> None:
    result = proved(Normed(norm), f"dp=2 dtype={dtype}", truth=truth)
    verdict = verdict_of(result, "truth")
    assert (result.verdict, verdict.verdict) == ("pass", "pass") and f"so it is compared in {dtype}" in verdict.message
    (reason,) = reasons_of(verdict)
    assert reason.startswith("add") and f"test_of_dtype.py:{line} " in reason
    assert reason.endswith("is given 1.19209e-07 in float32 and 2.22045e-16 in float64")
    off = proved(Normed(norm, factor=1.0001 if dtype == "float32" else 1.2), f"dp=2 dtype={dtype}", truth=truth)
    assert off.verdict == "fail" or truth == "alone"  # one rank has the factor too


def test_a_note_names_the_operator(tmp_path: Path) -> None:
    result = ran(tmp_path, Normed(by_hand), "dp=2 dtype=float32")
    (note,) = [one for one in unchecked_notes(load(str(result.path))) if "depends on the dtype" in one]
    assert note.startswith("not checked: the dense model in float64, for its function depends on the dtype: add at ")
    assert note.endswith("in float64 (1 case); legal: state that number, or prove float64")


def test_an_operator_that_takes_a_number_from_the_dtype_itself_is_named() -> None:
    def solved(dtype: torch.dtype) -> list[OperatorStep]:
        a, b = torch.tensor([[1.0, 0.0], [0.0, 1e-10]], dtype=dtype), torch.ones(2, 1, dtype=dtype)
        forward = Forward()
        with forward:
            torch.linalg.lstsq(a, b, driver="gelsd").solution.mul(2)  # what is below the dtype's epsilon counts as 0
        return forward.steps

    told = differing_operator(solved(torch.float64), solved(torch.float32), 1.0)
    assert (
        told.startswith("linalg_lstsq at ") and "another result in float32 than in float64 of the same numbers" in told
    )
    assert differing_operator(solved(torch.float32), solved(torch.float32), 1.0) == ""


def test_weights_that_are_drawn_in_the_dtype_are_no_operator_of_it() -> None:
    verdict = verdict_of(proved(Normed(by_hand, drawn=True), "dp=2 dtype=float32"), "truth")
    assert verdict.verdict == "fail" and "draw its numbers in float64 and round them" in verdict.message


def test_a_dtypes_bound_that_changes_nothing_makes_no_other_function() -> None:
    def masked(x: Tensor) -> Tensor:
        scores = (x @ x.T).masked_fill(torch.ones(4, 4).triu(1).bool(), torch.finfo(x.dtype).min)
        return torch.softmax(scores, -1) @ x

    verdict = verdict_of(proved(Normed(masked), "dp=2 dtype=float32"), "truth")
    assert verdict.verdict == "pass" and "one function in float32 and in float64" in verdict.message


def test_a_truth_of_numpy_whose_loss_cancels_is_one_function() -> None:
    """Operators of numpy are not seen, so no run with moved results shows how rounding changes a small difference."""
    result = proved(numpy_truth.subject, "dp=2 micro=3 dtype=bfloat16 seed=4247")
    assert verdict_of(result, "truth").verdict == PASS
