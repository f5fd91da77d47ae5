"""How the branches of features (`reference.model.branches`) are found, and their further results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch
from shardproof.reference.features import module_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Further results of branches, of one micro-batch.

    `losses` are terms [] of its summed loss, and `counts` integers by name, whose first dim is that of the rows. `step`
    are all micro-batches of the step, on all data ranks.
    """

    step: Sequence[Batch] = ()
    losses: list[Tensor] = field(default_factory=list)
    counts: dict[str, Tensor] = field(default_factory=dict)


class Branch(Protocol):
    """A file of `reference.model.branches`."""

    shapes: Callable[[Case], dict[str, tuple[int, ...]]]
    values: Callable[[Case], dict[str, Tensor]]
    update_values: Callable[[Case, Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]
    forward: Callable[..., Tensor]


def values_of(case: Case) -> dict[str, Tensor]:
    """The tensors that no gradient changes (`values` of branches), by full name, before the first step."""
    return {name: value for branch in _with_values(case) for name, value in branch.values(case).items()}


def updated_values(case: Case, values: Mapping[str, Tensor], counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These tensors after a step with these counts."""
    return {
        name: value
        for branch in _with_values(case)
        for name, value in branch.update_values(case, values, counts).items()
    }


def _with_values(case: Case) -> list[Branch]:
    replaced = getattr(case, "replaced_branches", None)  # a case of plain words has no features
    features = {feature for layer in range(case.layers) for feature in replaced(layer).values()} if replaced else set()
    return [branch for feature in sorted(features) if hasattr(branch := branch_of(feature), "values")]


@lru_cache
def branch_of(feature: str) -> Branch:
    """The branch of a feature."""
    branch: Branch = module_in("shardproof.reference.model.branches", feature)
    return branch
