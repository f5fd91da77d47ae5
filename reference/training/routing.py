"""The choices of a learned router, by the dense model: from these follow the rows that ranks send."""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.model.dense_case import dense_case
from shardproof.reference.model.parameters import weights
from shardproof.reference.training.steps import train


def chosen_by_the_dense_model(case: Case) -> Mapping[tuple[int, str], Tensor]:
    """(step, layer) -> the experts of every token, bool [dp*micro*rows, seq, experts], rows as those of the logits."""
    return _chosen(dense_case(case))


@lru_cache(maxsize=4)
def _chosen(case: Case) -> Mapping[tuple[int, str], Tensor]:
    outcome = train(case, weights(case, torch.device("cpu")))
    found: dict[tuple[int, str], Tensor] = {}
    for name, chosen in outcome.items():
        kind, _, rest = name.partition("/")
        if kind == "routing":
            step, _, module = rest.partition("/")
            found[int(step), module.removesuffix(".mlp")] = chosen.bool()
    return found
