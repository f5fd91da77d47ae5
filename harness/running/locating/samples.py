"""Samples that ranks and truth get from the case: where these are others, nothing can agree.

A subject that is its own truth on one rank runs once more on both sides, and the numbers from `case.samples` are noted.
The samples of a step are the same in both where it takes every micro-batch of every data rank.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.errors import ShardproofError, ranks_text
from shardproof.harness.plain_case import PlainCase
from shardproof.harness.protocols import CaseLike, case_text
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.running.truth.own import EXACT, one_rank
from shardproof.harness.subject import ALONE, NamedSubject, called

Asked = tuple[int, int, int, int]
"""Step, micro-batch, first and past-the-last number of its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched(PlainCase):
    """A case that notes the samples that it gives."""

    noted_samples: list[Asked]

    def samples(self, step: int, micro: int, dp_rank: int, batch: int) -> range:
        """The same, noted."""
        numbers = PlainCase.samples(self, step, micro, dp_rank, batch)
        self.noted_samples.append((step, micro, numbers.start, numbers.stop))
        return numbers


@dataclass(frozen=True, slots=True)
class _Asking:
    """A subject whose outcome is the samples that it takes on this rank, by names."""

    subject: NamedSubject

    def __getattr__(self, attribute: str) -> Any:
        """Any other attribute is the subject's."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        """Run the subject and return each request as a name."""
        asked: list[Asked] = []
        watched = _Watched(vocabulary=case.vocabulary, values=case.values, noted_samples=asked)
        called(self.subject.call, watched, device)
        return {" ".join(map(str, one)): torch.ones(()) for one in asked}


def with_other_samples(trial: Trial, evidence: Evidence, wrong: Collection[str]) -> Evidence:
    """Evidence with how the samples of the ranks differ from those of their truth; else as it is."""
    own = trial.reference.own
    if not wrong or own is None or own.dense != ALONE or not isinstance(trial.case, PlainCase):
        return evidence
    try:
        with trial.timed("located"):
            ranks = _asked(trial, trial.case)
            truth = _asked(trial, one_rank(trial.case, trial.subject).but(dtype=EXACT))
    except ShardproofError:  # a subject that takes no other case: its errors stand
        return evidence
    return replace(evidence, other_samples=_difference(ranks, truth, trial.case.micro))


def _asked(trial: Trial, case: CaseLike) -> set[Asked]:
    run = execute(
        case,
        _Asking(trial.subject),
        trial.engine,
        text=case_text(case),
        record=False,
        device=trial.device,
        timeout_s=trial.timeout_s,
    )
    names = {name for outcome in run.outcomes for name in outcome}
    return {(step, micro, start, stop) for step, micro, start, stop in (map(int, name.split()) for name in names)}


def _difference(ranks: set[Asked], truth: set[Asked], micro: int) -> str:
    """How the samples of the first step in which they differ do, in words; "" where all are the same."""
    for step in sorted({step for step, *_ in ranks} & {step for step, *_ in truth}):
        mine, theirs = (_numbers(asked, step) for asked in (ranks, truth))
        if mine == theirs:
            continue
        known = {number for of_step, number, *_ in ranks if of_step == step}
        lacking = [number for number in range(micro) if number not in known]
        read = f"in step {step} the ranks ask for samples {ranks_text(mine)}, and one rank for {ranks_text(theirs)}"
        if lacking:
            plural = "es" * (len(lacking) > 1)
            return f"samples of micro-batch{plural} {ranks_text(lacking)} were never asked for (case.samples): {read}"
        return f"other samples than those of the truth were asked for (case.samples): {read}"
    return ""


def _numbers(asked: set[Asked], step: int) -> list[int]:
    """The numbers of the samples of a step, in their order."""
    return sorted({number for of_step, _, start, stop in asked if of_step == step for number in range(start, stop)})
