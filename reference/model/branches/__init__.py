"""Branches of features in the place of a layer's attention or MLP: a file each, found by the name of the feature.

A file has `shapes(case)`, the parameters without the prefix of their layer, and `forward(run, layer, x_BSH,
visible_SS)`, the branch as a function of normed hidden states. `Core.replaced` names the layers that have it. A branch
behind the decoder (`Core.behind_decoder`) is such a file too. Its parameters have full names, a transformer layer of
its own (`Core.blocks`) is one name among them. Its layer is "", and its result is not used.

A file may have `values(case)` too, tensors by full name that no gradient changes; `weights` of a pass has them beside
the parameters. `updated(case, values, counts)` gives them after a step with these counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from torch import Tensor

from reference.case import Case
from reference.data.batches import Batch
from reference.features import module_in

__all__ = ["Beside", "Branch", "Forward", "branch_of", "updated_values", "values_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Values of branches beside their output, of one micro-batch.

    `losses` are terms [] of its summed loss, and `counts` integers by name, whose first dim is that of the rows. `step`
    are all micro-batches of the step, on all data ranks.
    """

    step: Sequence[Batch] = ()
    losses: list[Tensor] = field(default_factory=list)
    counts: dict[str, Tensor] = field(default_factory=dict)


class Forward(Protocol):
    """The forward pass that a branch is part of (`reference.model.decoder`)."""

    @property
    def case(self) -> Case:
        """The case."""
        ...

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Every parameter by its full name."""
        ...

    @property
    def batch(self) -> Batch:
        """The micro-batch."""
        ...

    @property
    def arithmetic(self) -> Any:
        """How sums are taken (`reference.model.decoder.Arithmetic`)."""
        ...

    @property
    def beside(self) -> Beside:
        """Where a branch leaves what it has beside its output."""
        ...

    def linear(self, name: str, x: Tensor) -> Tensor:
        """The linear of this name, a module."""
        ...

    def norm(self, name: str, x: Tensor) -> Tensor:
        """The norm of this name, a module."""
        ...

    def core(self, name: str, q_BSND: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, visible_SS: Tensor) -> Tensor:
        """Attention of these queries, keys and values, [B, S, N*E], with the dropout of this branch's shares."""
        ...

    def block(self, name: str, x_BSH: Tensor, visible_SS: Tensor) -> Tensor:
        """Hidden states behind the transformer layer of this name."""
        ...

    def dropped(self, site: str, x_BSH: Tensor) -> Tensor:
        """Hidden states with the dropout of this site (`reference.model.dropout`)."""
        ...

    def tapped(self, name: str, output: Tensor) -> Tensor:
        """The output of the module of this name."""
        ...


class Branch(Protocol):
    """A file of this folder."""

    shapes: Callable[[Case], dict[str, tuple[int, ...]]]
    values: Callable[[Case], dict[str, Tensor]]
    updated: Callable[[Case, Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]
    forward: Callable[[Forward, str, Tensor, Tensor], Tensor]


def values_of(case: Case) -> dict[str, Tensor]:
    """The values of all features of a case before its first step."""
    return {name: value for branch in _with_values(case) for name, value in branch.values(case).items()}


def updated_values(case: Case, values: Mapping[str, Tensor], counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These values after a step whose micro-batches left these counts."""
    return {
        name: value for branch in _with_values(case) for name, value in branch.updated(case, values, counts).items()
    }


def _with_values(case: Case) -> list[Branch]:
    replaced = getattr(case, "replaced", None)  # a case that is words alone has no features
    features = {feature for layer in range(case.layers) for feature in replaced(layer).values()} if replaced else set()
    return [branch for feature in sorted(features) if hasattr(branch := branch_of(feature), "values")]


@lru_cache
def branch_of(feature: str) -> Branch:
    """The branch of a feature."""
    branch: Branch = module_in(__name__, feature)
    return branch
