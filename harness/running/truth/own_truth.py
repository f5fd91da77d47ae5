"""A truth of the subject's own: its dense model, or the subject itself on one rank; and the control runs of either.

Both run in float64 for the truth. Control runs are the same function in the case's dtype, every contraction cut into
partial sums (harness.running.truth.partial_sums). The subject on one rank sees the data ranks' micro-batches in
sequence: every axis is 1 and there are dp times as many micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.engines.engine import Engine
from harness.errors import ProgramError, RequestError
from harness.merging import merge
from harness.outcome import localize
from harness.plain_case import AXES, PlainCase
from harness.protocols import CaseLike, Value, case_text
from harness.running.execution import execute
from harness.running.truth.partial_sums import partial_sums
from harness.subject import ALONE, DenseModel, NamedSubject, answered, session

__all__ = ["EXACT", "InParts", "OwnTruth", "compared_with", "one_rank"]

EXACT = "float64"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnTruth:
    """The function (case, device) -> outcome of a truth of the subject's own; with `parts` one of its control runs.

    `dense` is the dense model, "alone" for the subject itself, which runs on `engine`.
    """

    subject: NamedSubject
    dense: DenseModel | str
    engine: Engine
    timeout_s: float = 60.0
    control: bool = False

    def __call__(self, case: CaseLike, device: torch.device, *, parts: int = 0) -> Mapping[str, Tensor]:
        """Every tensor full, by name. Raises RequestError when the subject's own code fails, or what it returns is not
        finite.
        """
        parts = (parts or 2) if self.control else 0
        run_in = case if self.control else case.but(dtype=EXACT)
        compute = self._alone if isinstance(self.dense, str) else self._own
        tensors = compute(run_in, device, parts)
        wrong = [name for name, tensor in tensors.items() if not _finite(tensor)]
        if wrong and not self.control:
            rule = f"the truth of {self.subject.name} is not finite in {wrong[0]}"
            raise RequestError(f"case {case_text(case)!r}: {rule}; legal: a case for which it is, such as a smaller lr")
        return tensors

    def _own(self, case: CaseLike, device: torch.device, parts: int) -> Mapping[str, Tensor]:
        dense: Any = self.dense

        def outcome() -> Mapping[str, Tensor]:
            with torch.random.fork_rng(devices=[]), session(self.subject.call), _cut(parts):
                torch.manual_seed(case.seed)
                return merge([localize(dense(case, device))]).tensors

        return answered("truth", outcome)

    def _alone(self, case: CaseLike, device: torch.device, parts: int) -> Mapping[str, Tensor]:
        one = one_rank(case, self.subject)
        call = InParts(self.subject, parts) if parts else self.subject.call
        name = "" if parts else self.subject.address
        try:
            run = execute(
                one,
                call,
                self.engine,
                text=case_text(one),
                record=False,
                device=str(device),
                timeout_s=self.timeout_s,
                name=name,
            )
        except ProgramError as problem:
            rule = f"{self.subject.name} does not finish on one rank, which is its truth"
            raise RequestError(
                f"case {case_text(one)!r}: {rule}: {problem.cause}; legal: --truth MODULE:OBJECT"
            ) from problem
        tensors = merge(run.outcomes).tensors
        return tensors if isinstance(case, PlainCase) else _by_data_rank(tensors, case)


def _by_data_rank(tensors: Mapping[str, Tensor], case: CaseLike) -> Mapping[str, Tensor]:
    """The tensors with the rows of logits in the decoder's order: all of the first data rank's, then the next one's."""
    dp: int = getattr(case, "dp", 1)

    def ordered(rows: Tensor) -> Tensor:
        turned: Tensor = rows.unflatten(0, (case.micro, dp, -1)).transpose(0, 1).flatten(0, 2)
        return turned

    return {name: ordered(rows) if name.startswith("logits/") else rows for name, rows in tensors.items()}


@dataclass(frozen=True, slots=True)
class InParts:
    """The subject with its contractions cut into partial sums on every rank."""

    subject: NamedSubject
    parts: int

    def __getattr__(self, attribute: str) -> Any:
        """Any other attribute is the subject's."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """The subject's outcome in partial sums."""
        with _cut(self.parts):
            return self.subject.call(case, device)


def one_rank(case: CaseLike, subject: NamedSubject) -> CaseLike:
    """The case on one rank, with the micro-batches of all data ranks in sequence.

    Raises RequestError where no such case can be.
    """
    micro = case.micro * getattr(case, "dp", 1)
    axes = (*AXES, "wp") if hasattr(case, "wp") else AXES
    try:
        return case.but(**dict.fromkeys(axes, 1), micro=micro)
    except ValueError as problem:
        rule = f"{subject.name} cannot be its own truth: there is no such case on one rank ({problem})"
        raise RequestError(f"case {case_text(case)!r}: {rule}; legal: --truth MODULE:OBJECT") from problem


def compared_with(truth: DenseModel | str | None) -> str:
    """What a subject is compared with, in words."""
    if truth is None:
        return "the dense model"
    if truth == ALONE:
        return "itself on one rank, in float64"
    return f"its own dense model {getattr(truth, '__module__', '')}:{getattr(truth, '__qualname__', truth)}"


def _cut(parts: int) -> Any:
    return partial_sums(parts) if parts else nullcontext()


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
