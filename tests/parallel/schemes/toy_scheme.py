"""A scheme in one file: InternEvo's mtp, and once a step a heartbeat, one number summed over tp."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from parallel.communication.collectives import all_reduce
from parallel.communication.expectation import CompleteTerm, per_step
from parallel.model.strategy import Rank, Step
from parallel.schemes.mtp import MTP
from reference.case import Case


def _heartbeat(rank: Rank) -> None:
    all_reduce(torch.ones((), dtype=torch.float64, device=rank.device), rank.mesh.axis("tp"))


def _step(_case: Case, step: Step) -> Step:
    return dataclasses.replace(step, reductions={**step.reductions, "heartbeat": _heartbeat})


def _calls(case: Case) -> Iterator[CompleteTerm]:
    return per_step(case, "all_reduce", 8, axis="tp", dtype="float64")


TOY = dataclasses.replace(MTP, name="toy", step=_step, once={**MTP.once, "heartbeat": _calls})
