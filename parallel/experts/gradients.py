"""Gradients of experts between the last backward and the optimizer, beside those of all other parameters.

A rank has the gradient of its experts over the tokens of all etp*ep ranks already. The gradient is summed over edp,
whose ranks hold the same part of them. Its squares count on every rank of etp and ep (experts.md 21.6).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from parallel.communication import gradients as sync
from parallel.layers.norm import wide
from parallel.model.strategy import Rank
from reference.model.parameters import dtype_of

COPIES = "edp"
"""The mesh axis whose ranks hold the same part of the same experts."""


def over_copies(others: Callable[[Rank], None], rank: Rank) -> None:
    """The sums of all gradients over the ranks with copies: experts' in one flat call, and `others`."""
    others(rank.of(rank.case.data_axis))
    experts = rank.of(COPIES)
    sync.sum_gradients(experts.step.partial(experts).values(), rank.mesh.axis(COPIES))


def norm_of_all(others: Callable[[Rank], Tensor], rank: Rank) -> Tensor:
    """The norm of all gradients, given that of all but experts'; a stage without any takes part."""
    dense, experts = rank.of(rank.case.data_axis), rank.of(COPIES)
    places = {**experts.updated_places, "": next(iter(dense.updated_places.values()))}
    nothing = torch.zeros((), device=rank.device)
    axes = [rank.mesh.axis(axis) for axis in rank.strategy.apart[COPIES]]
    mine = sync.norm({**experts.gradients(), "": nothing}, places, axes, wide(dtype_of(rank.case)))
    return torch.hypot(others(dense), mine)
