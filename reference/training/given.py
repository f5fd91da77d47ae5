"""What the dense model cannot know and must be given: masks and initial values that an implementation drew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from reference.case import Case
from reference.data.batches import Batch, micro_batch
from reference.model.dropout import masks, sites
from reference.model.initial import deviation
from reference.model.parameters import shapes, weights
from reference.training.steps import Feed

__all__ = ["deviations", "drawn", "fed", "kinds"]


def kinds(case: Case) -> tuple[str, ...]:
    """The kinds of names of an outcome that truth, control and kinks take as given=, none where they know all."""
    return (("mask",) if case.random == "stateful" else ()) + (("init",) if case.init == "shard" else ())


def fed(given: Mapping[str, Tensor]) -> Feed:
    """The case's micro-batches with these masks."""

    def feed(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        return replace(micro_batch(case, step, micro, dp_rank, device=device), masks=given)

    return feed if given else micro_batch


def drawn(case: Case, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a case is random, as an outcome has it: masks, and initial values that are Megatron's."""
    names = [f"mask/{step}/{site}" for step in range(case.steps) for site in sites(case)]
    found = masks(case) if case.random == "field" else {name: given[name] for name in names}
    if case.init == "whole":
        return found
    return {f"init/{name}": w for name, w in weights(case, torch.device("cpu"), given).items()} | found


def deviations(case: Case) -> dict[str, float]:
    """The standard deviation of every parameter's initial values, by name; none where they are this project's own."""
    return {} if case.init == "whole" else {name: deviation(case, name) for name in shapes(case)}
