"""What-ifs of the dense model, for diagnoses: each is one rule that is not kept, and what is computed then.

An outcome that equals a prediction shows which rule was not kept. All arithmetic is in float64.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch, micro_batch
from shardproof.reference.model import decoder
from shardproof.reference.model.decoder import Arithmetic
from shardproof.reference.model.given import holding
from shardproof.reference.model.parameters import full, shapes
from shardproof.reference.training.activations import observe
from shardproof.reference.training.steps import Feed

Weights: TypeAlias = "dict[str, Tensor]"
FORWARD = frozenset({"act", "logits", "loss", "grad"})
"""Wrong tensors that data or weights read otherwise may explain; what is wrong in backward follows."""
ACTIVATIONS = frozenset({"act"})


class Dense:
    """The dense model of a case before its first step, on a device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device

    @cached_property
    def weights(self) -> Weights:
        """The full weights before the first step."""
        return {name: full(self.case, name).to(self.device, torch.float64) for name in shapes(self.case)}

    @cached_property
    def batches(self) -> list[Batch]:
        """Every micro-batch of the first step: those of a data rank lie together."""
        places = [(data_rank, micro) for data_rank in range(self.case.dp) for micro in range(self.case.micro)]
        return [micro_batch(self.case, 0, micro, data_rank, device=self.device) for data_rank, micro in places]

    @cached_property
    def logits(self) -> list[Tensor]:
        """The logits of every micro-batch of the first step."""
        return [decoder.logits(self.case, self.weights, batch) for batch in self.batches]

    @property
    def first_batches(self) -> list[Batch]:
        """The first micro-batch of every data rank: the rows of activations."""
        return self.batches[:: self.case.micro]


Broken: TypeAlias = "dict[str, dict[str, Tensor]]"
"""Every way to break a rule, by its name ("" for the only one) -> tensors by name, as an outcome has them."""
Readings: TypeAlias = "Iterable[tuple[str, Mapping[str, Tensor]]]"
"""The same, one after the other."""
Experiment: TypeAlias = "Callable[[Dense], Readings]"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A rule that is not kept: `words` go on from "what the dense model computes". `explains` are the kinds of wrong
    tensors for which it is tried. `names_readings`: whether the words of a cause name the readings that fit.
    """

    id: str
    words: str
    experiment: Experiment
    explains: frozenset[str] = FORWARD
    names_readings: bool = False

    def readings(self, case: Case, device: torch.device, *, given: Mapping[str, Tensor] | None = None) -> Broken:
        """The outcome by each reading; {} where the rule makes no difference in this case."""
        found: Broken = {}
        with holding(given):
            for reading, tensors in self.experiment(Dense(case, device)):
                found.setdefault(reading, {}).update({name: tensor.detach() for name, tensor in tensors.items()})
        return found


def both(*experiments: Experiment) -> Experiment:
    """The readings of several experiments on one rule."""
    return lambda dense: (reading for experiment in experiments for reading in experiment(dense))


def by_arithmetic(readings: Callable[[Case], Mapping[str, Arithmetic]], *, gradients: bool = False) -> Experiment:
    """Activations, and their gradients if wanted, under another arithmetic."""
    return lambda dense: (
        (reading, observe(dense.case, dense.weights, arithmetic=arithmetic, gradients=gradients))
        for reading, arithmetic in readings(dense.case).items()
    )


def by_attention(
    readings: Callable[[Case], Mapping[str, Callable[..., Tensor]]], *, gradients: bool = False
) -> Experiment:
    """Activations, and their gradients if wanted, under another core of attention."""
    return by_arithmetic(
        lambda case: {reading: Arithmetic(attention=core) for reading, core in readings(case).items()},
        gradients=gradients,
    )


def by_places(readings: Callable[[Case], Mapping[str, Feed]]) -> Experiment:
    """Activations of data whose tokens have other places."""
    return lambda dense: (
        (reading, observe(dense.case, dense.weights, feed=feed, gradients=False))
        for reading, feed in readings(dense.case).items()
    )


def by_weights(readings: Callable[[Case, Weights], Mapping[str, Weights]]) -> Experiment:
    """Activations and their gradients with other weights."""
    return lambda dense: (
        (reading, observe(dense.case, weights)) for reading, weights in readings(dense.case, dense.weights).items()
    )
