"""What the dense model cannot know and must be given: the masks that an implementation drew from streams of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from reference.case import Case
from reference.data.batches import Batch, micro_batch
from reference.model.dropout import masks, sites
from reference.training.steps import Feed

__all__ = ["drawn", "fed", "kinds"]


def kinds(case: Case) -> tuple[str, ...]:
    """The kinds of names of an outcome that truth, control and kinks take as given=, none where they know all."""
    return ("mask",) if case.random == "stateful" else ()


def fed(given: Mapping[str, Tensor]) -> Feed:
    """The case's micro-batches with these masks."""

    def feed(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        return replace(micro_batch(case, step, micro, dp_rank, device=device), masks=given)

    return feed if given else micro_batch


def drawn(case: Case, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks of a case as an outcome has them: the field's, or those given."""
    if case.random == "field":
        return masks(case)
    return {name: given[name] for step in range(case.steps) for site in sites(case) if (name := f"mask/{step}/{site}")}
