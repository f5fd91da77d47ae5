"""Initial values as Megatron sets them: what they are, not where they come from.

    weight of a column linear, table, head    mean 0, standard deviation 0.02
    weight of a row linear (wo, w2)            the same / sqrt(2 * layers), so that residuals do not grow with depth
    bias                                       0
    weight of a norm                           1

Source: Megatron-Core 0.16.1 `init_method_normal`, `scaled_init_method_normal`; GPT-2 (Radford et al. 2019).
"""

import math

import torch
from torch import Tensor

from reference.case import Case
from reference.model.field import words

STANDARD = 0.02
_ROW = (".wo", ".w2", ".experts.down")


def deviation(case: Case, name: str) -> float:
    """The standard deviation of a parameter's initial values; 0 for one that begins as a constant."""
    module, _, leaf = name.rpartition(".")
    if leaf == "bias" or module.endswith("norm"):
        return 0.0
    return STANDARD / math.sqrt(2 * case.layers) if module.endswith(_ROW) else STANDARD


def of_field(case: Case, name: str, shape: tuple[int, ...]) -> Tensor:
    """A parameter's values in float64 by the field: a sum of four uniform numbers for each element, or its constant."""
    scale = deviation(case, name)
    if not scale:
        return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, dtype=torch.float64, device="cpu")
    four = words(f"{case.seed} init {name}", samples=range(1), step=0, shape=shape)[:, 0]
    centred = four.sum(0) - 2 * (2**32 - 1)
    return centred.double() / math.sqrt((2.0**64 - 1) / 3) * scale
