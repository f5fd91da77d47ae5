"""The choices of a learned router, by the dense model: who must know how many rows ranks send asks here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from reference.case import Case
from reference.model.dense_case import dense_case
from reference.model.parameters import weights
from reference.training.steps import train

__all__ = ["chosen_by_the_dense_model"]


def chosen_by_the_dense_model(case: Case) -> Mapping[tuple[int, int], Tensor]:
    """(step, layer) -> the experts of every token, bool [dp*micro*rows, seq, experts], in the order of the logits."""
    return _chosen(dense_case(case))


@lru_cache(maxsize=4)
def _chosen(case: Case) -> Mapping[tuple[int, int], Tensor]:
    outcome = train(case, weights(case, torch.device("cpu")))
    found: dict[tuple[int, int], Tensor] = {}
    for name, chosen in outcome.items():
        kind, _, rest = name.partition("/")
        if kind == "routing":
            step, _, module = rest.partition("/")
            found[int(step), int(module.split(".")[1])] = chosen.bool()
    return found
