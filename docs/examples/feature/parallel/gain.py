"""A learned gain on the ranks of the axis `gp`: each multiplies its part of the hidden features, then all are gathered.

Forward takes the own features and gathers the products of all; backward does the same with the gradients.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from shardproof.parallel.communication.expectation import ACTIVATION, CallRow, in_modules
from shardproof.parallel.communication.layout import Axis, Cut, Mesh, Placement
from shardproof.parallel.communication.pairs import gather_from, scatter_to
from shardproof.parallel.model.strategy import Parts, Strategy
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of


class _Gain(nn.Module):
    def __init__(self, case: Case, axis: Axis, device: torch.device) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(case.hidden // axis.size, dtype=dtype_of(case), device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [.., hidden] -> the same, multiplied by 1 + w."""
        return gather_from(scatter_to(x, self.axis) * (1 + self.weight), self.axis)


def _modules(case: Case) -> Iterator[str]:
    return (f"layers.{layer}.gain" for layer in range(case.layers))


CALLS = CallRow(in_modules(_modules), "forward backward", "all_gather", ACTIVATION, "features of all ranks", axis="gp")


def apply(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the gain of a case behind its layers; itself without one."""
    if not case.gain:
        return strategy

    def parts(case: Case, mesh: Mesh, device: torch.device) -> Parts:
        parts = strategy.parts(case, mesh, device)
        gain = partial(_Gain, case, mesh.axis("gp"), device)
        return replace(parts, behind_layer={**parts.behind_layer, "gain": gain})

    def placements(case: Case) -> dict[str, Placement]:
        places = strategy.placements(case)
        gains = {name: place for name, place in places.items() if name.endswith(".gain.weight")}
        return {**places, **{name: replace(place, cuts=(*place.cuts, Cut(axis="gp"))) for name, place in gains.items()}}

    norm_axes = (*strategy.norm_axes, *(("gp",) if case.gp > 1 else ()))
    return replace(strategy, parts=parts, placements=placements, norm_axes=norm_axes, rows=(*strategy.rows, CALLS))
