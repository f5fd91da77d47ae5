"""What the dense model computes of a case, by the names of `harness.dense_model.DenseModelLike`.

Outcomes are full tensors by name; a truth is in float64, a control in the dtype of the case.
"""

from collections.abc import Mapping

from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch, unread_rows
from shardproof.reference.model.parameters import weights
from shardproof.reference.model.randomness import takes_given
from shardproof.reference.training.adam import bound_adam
from shardproof.reference.training.control import control, measure_relu_flips
from shardproof.reference.training.size import first_batch, sizes_by_part
from shardproof.reference.training.size import word_of_size as too_large
from shardproof.reference.training.truth import dense_case as alike
from shardproof.reference.training.truth import initial_deviations, list_given_kinds, shares, truth
from shardproof.reference.training.truth import without_draws as self_contained

__all__ = [
    "alike",
    "bound_adam",
    "control",
    "initial",
    "initial_deviations",
    "list_given_kinds",
    "measure_relu_flips",
    "read_data",
    "self_contained",
    "shares",
    "sizes",
    "too_large",
    "truth",
    "unread_rows",
]

initial = takes_given(weights)
"""The value of every parameter before the first step, to be read only."""


def read_data(case: Case) -> None:
    """Read a first micro-batch. Raises ValueError or OSError when the data cannot be read."""
    micro_batch(case, 0, 0, 0)


def sizes(case: Case, *, shapes_alone: bool) -> Mapping[str, int]:
    """Numbers of elements by what they belong to: of dense training, or of one micro-batch if `shapes_alone`."""
    return first_batch(case) if shapes_alone else sizes_by_part(case)
