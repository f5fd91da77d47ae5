"""Every way in which the tensors of several ranks may be parts of one, and how to join the parts.

A part has a place: the coordinates of its rank on the axes of a mesh, then the number of its call.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

CALLS = ""
"""The name of the axis on which the calls of one rank lie."""
Coordinate = tuple[int, ...]
"""Coordinates on the axes, the call last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """For each axis "whole", "sum", "cut" or "zigzag", and the dim; also the order in which cuts are undone."""

    acts: tuple[tuple[str, int], ...]
    order: tuple[int, ...]

    def words(self, names: Sequence[str]) -> str:
        """The layout in words: "cut along dim 1 over tp, partial sums over dp"."""
        words = []
        for name, (act, dim) in zip(names, self.acts, strict=True):
            if name and act == "sum":
                words.append(f"partial sums over {name}")
            elif name and act != "whole":
                words.append(f"{'cut' if act == 'cut' else 'in zigzag'} along dim {dim} over {name}")
        return ", ".join(words) or "whole"

    def summed_axis(self, names: Sequence[str]) -> str:
        """The axis over which there are partial sums, "" without."""
        return next((name for name, (act, _) in zip(names, self.acts, strict=True) if act == "sum"), "")


@lru_cache(maxsize=256)
def list_plans(names: tuple[str, ...], dims: int, rows: int | None) -> tuple[Plan, ...]:
    """Every plan for these axes, plain ones first. Calls are always rows along the dim `rows`."""
    found: list[Plan] = []
    choices: list[list[tuple[str, int]]] = []
    for name in names:
        if name == CALLS:
            choices.append([("whole", 0)] if rows is None else [("cut", rows)])
        else:
            cuts = [("cut", dim) for dim in range(dims)]
            choices.append([("whole", 0), *cuts, ("sum", 0), *(("zigzag", dim) for dim in range(min(dims, 2)))])
    acts = [plan for plan in itertools.product(*choices) if sum(act == "sum" for act, _ in plan) <= 1]
    rank = {"whole": 0, "cut": 0, "sum": 1, "zigzag": 2}
    for plan in sorted(acts, key=lambda plan: max(rank[act] for act, _ in plan)):
        split = [place for place, (act, _) in enumerate(plan) if act in ("cut", "zigzag")]
        seen = set()
        for order in itertools.permutations(split):
            by_dim = tuple(sorted(order, key=lambda place: plan[place][1]))
            if by_dim not in seen:
                seen.add(by_dim)
                found.append(Plan(acts=plan, order=order))
    return tuple(found)


def has_shape(shapes: Mapping[Coordinate, tuple[int, ...]], plan: Plan, wanted: tuple[int, ...]) -> bool:
    """Whether parts of these shapes make up the wanted one. Along one sharded dim the last part may have padding."""
    if {len(shape) for shape in shapes.values()} != {len(wanted)}:
        return False
    left = dict(shapes)
    for axis, (act, _) in enumerate(plan.acts):
        if act == "sum":
            if any(len({left[place] for place in group}) > 1 for group in group_along(left, axis)):
                return False
            left = {place: shape for place, shape in left.items() if not place[axis]}
    last = dict.fromkeys(range(len(wanted)), 0)  # dim -> size of the last part, which padding must not reach
    for axis in plan.order:
        act, dim = plan.acts[axis]
        joined = {}
        for group in group_along(left, axis):
            parts = [left[place] for place in group]
            if (shape := _join_shapes(parts, act, dim)) is None:
                return False
            joined[group[0]], last[dim] = shape, last[dim] or parts[-1][dim]
        left = joined
    return all(_is_padded(shape, wanted, last) for shape in left.values())


def _join_shapes(parts: Sequence[tuple[int, ...]], act: str, dim: int) -> tuple[int, ...] | None:
    """The shape of these parts joined along a dim; None if other dims differ, or if they cannot be in zigzag."""
    if len({(*part[:dim], *part[dim + 1 :]) for part in parts}) > 1:
        return None
    sizes = [part[dim] for part in parts]
    if act == "zigzag" and (len(set(sizes)) > 1 or sizes[0] % 2 or len(parts) < 2):
        return None
    return (*parts[0][:dim], sum(sizes), *parts[0][dim + 1 :])


def _is_padded(shape: tuple[int, ...], wanted: tuple[int, ...], last: Mapping[int, int]) -> bool:
    """Whether a shape is the wanted one, or larger in one dim by less than the last part there."""
    padding = [has - wants for has, wants in zip(shape, wanted, strict=True)]
    if min(padding, default=0) < 0 or sum(map(bool, padding)) > 1:
        return False
    return not any(more and more >= last[dim] for dim, more in enumerate(padding))


def join_parts(parts: dict[Coordinate, Tensor], plan: Plan) -> dict[Coordinate, Tensor]:
    """The parts with all cuts undone."""
    for axis in plan.order:
        act, dim = plan.acts[axis]
        parts = {group[0]: _undo_cut([parts[place] for place in group], act, dim) for group in group_along(parts, axis)}
    return parts


def _undo_cut(parts: Sequence[Tensor], act: str, dim: int) -> Tensor:
    if act == "cut":
        return torch.cat(list(parts), dim)
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([*(first for first, _ in halves), *(last for _, last in reversed(halves))], dim)


def group_along(places: Mapping[Coordinate, object], axis: int) -> list[list[Coordinate]]:
    """The places in groups that differ on this axis alone, each in its order."""
    groups: dict[Coordinate, list[Coordinate]] = {}
    for place in sorted(places):
        groups.setdefault((*place[:axis], 0, *place[axis + 1 :]), []).append(place)
    return list(groups.values())
