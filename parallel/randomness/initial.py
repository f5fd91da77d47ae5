"""Initial values of one rank's parameters, as Megatron sets them or as the case's weights are.

    init=whole   the case's weights (`reference.model.parameters`), cut
    init=field   a function of seed, name and place in the full tensor (`parallel.randomness.numbers`)
    init=shard   drawn by each rank, in the order of the model's parameters; the dense model must be given them

Megatron (`tp`, `tp-sp`): split parameters come from the model-parallel stream, whole ones from the default one.
InternEvo (`mtp`, `msp`, `fsp`, `isp`): all comes from a stream of the tensor rank (isp: weight rank), `seed + rank +
1024 * stage`. Then it broadcasts what is whole from the first rank, which every rank draws here too.

Weights have mean 0 and standard deviation 0.02, those of row linears 0.02 / sqrt(2 * layers); biases are 0, norms 1.
Data and context ranks draw alike. Sources: Megatron-Core 0.16.1 `_initialize_affine_weight_gpu`, `init_method_normal`;
InternEvo `parallel_context.py` set_seed.
"""

import math

import torch
from torch import Tensor

from shardproof.parallel.communication.layout import Coordinates, Placement, local_shape, shard
from shardproof.parallel.randomness.numbers import DEFAULT, MODEL_PARALLEL, Streams, indices, seeds_at, standard
from shardproof.parallel.schedules.stages import held_at
from shardproof.reference.case import Case
from shardproof.reference.language.core import MODES
from shardproof.reference.model.parameters import drawn

_STANDARD = 0.02
_ROW = ("wo", "w2")
_OWN, _FIRST = "own", "first rank's"
_STAGE = 1024


def streams_of(case: Case, at: Coordinates) -> Streams:
    """The streams from which the rank at these coordinates draws initial values."""
    if not _is_internevo(case):
        return Streams(seeds_at(case.seed, at, slices=False))
    first, rank = case.seed + _STAGE * held_at(case, at)[0].rank, at[_axis(case)][0]
    return Streams({_FIRST: first, **({_OWN: first + rank} if rank else {})})


def initial(case: Case, name: str, place: Placement, at: Coordinates, streams: Streams) -> Tensor:
    """Initial part of a parameter on the rank at these coordinates; padding is 0."""
    if case.init == "whole":
        return shard(drawn(case, name), place, at)
    real = shard(torch.ones(place.shape, dtype=torch.float64), place, at)  # 0 where there is padding
    module, _, leaf = name.replace(".experts.down.", ".experts.w2.").rpartition(".")
    if leaf == "bias":
        return torch.zeros_like(real)
    if module.endswith("norm"):
        return real
    scale = _STANDARD / math.sqrt(2 * case.layers) if module.rpartition(".")[2] in _ROW else _STANDARD
    if case.init == "field":
        return standard(case.seed, name, indices(place, at), place.shape) * scale * real
    if not _is_internevo(case):
        stream = MODEL_PARALLEL if "tp" in place.axes else DEFAULT  # of a pipeline's stage each rank holds all
        return _drawn(streams, stream, local_shape(place, at), scale) * real
    rank, size = at[_axis(case)]
    first = _drawn(streams, _FIRST, local_shape(place, {**at, _axis(case): (0, size)}), scale)
    own = _drawn(streams, _OWN, local_shape(place, at), scale) if rank else first
    return (own if _axis(case) in place.axes else first) * real


def _drawn(streams: Streams, stream: str, shape: tuple[int, ...], scale: float) -> Tensor:
    with streams.fork(stream) as generator:
        return torch.empty(shape, dtype=torch.float64).normal_(0, scale, generator=generator)


def _is_internevo(case: Case) -> bool:
    return MODES[case.mode].system == "InternEvo"


def _axis(case: Case) -> str:
    return MODES[case.mode].weight_axis
