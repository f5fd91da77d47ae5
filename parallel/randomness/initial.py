"""Initial values of one rank's parameters, as Megatron sets them or as the case's weights are.

    init=whole   the case's weights (`reference.model.parameters`), cut
    init=field   a function of seed, name and place in the full tensor (`parallel.randomness.field`)
    init=shard   drawn by each rank for its shard: what is split from the model-parallel stream, what is whole from the
                 default one, in the order of the model's parameters; the dense model must be given them

Weights have mean 0 and standard deviation 0.02, those of row linears 0.02 / sqrt(2 * layers); biases are 0, norms 1.
Data and context ranks draw alike. Source: Megatron-Core 0.16.1 `_initialize_affine_weight_gpu`, `init_method_normal`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallel.layout import Coordinates, Placement, local_shape, shard
from parallel.randomness.field import indices, standard
from parallel.randomness.streams import DEFAULT, MODEL_PARALLEL, Streams
from reference.case import Case
from reference.model.parameters import full

__all__ = ["initial"]

_STANDARD = 0.02
_ROW = ("wo", "w2")


def initial(case: Case, name: str, place: Placement, at: Coordinates, streams: Streams) -> Tensor:
    """What the rank at these coordinates holds of a parameter; padding is 0."""
    if case.init == "whole":
        return shard(full(case, name), place, at)
    real = shard(torch.ones(place.shape, dtype=torch.float64), place, at)  # 0 where there is padding
    module, _, leaf = name.rpartition(".")
    if leaf == "bias":
        return torch.zeros_like(real)
    if module.endswith("norm"):
        return real
    scale = _STANDARD / math.sqrt(2 * case.layers) if module.rpartition(".")[2] in _ROW else _STANDARD
    if case.init == "field":
        return standard(case.seed, name, indices(place, at), place.shape) * scale * real
    with streams.fork(MODEL_PARALLEL if place.cuts else DEFAULT) as generator:
        drawn = torch.empty(local_shape(place, at), dtype=torch.float64)
        return drawn.normal_(0, scale, generator=generator) * real
