"""Whether the local tensors of all ranks are the truth's tensor under some layout, if none is declared.

All layouts that the shapes allow are tried. Along every mesh axis the tensor may be replicated, sharded along a dim in
rank order (also unevenly), sharded in zigzag along the sequence (rank i of p holds the pieces i and 2p-1-i), or a
partial sum. Several axes may shard it, also along the same dim. The calls of several micro-batches are joined as rows,
like the parts of several ranks. Sequence and batch may be transposed, and heads or rows may be flattened. Partial sums
must differ between ranks, since equal ones are replicas with a wrong factor. A tensor whose elements are all equal
shows nothing.

Which layout the program means is unknown. So agreement is no verdict: a wrong tensor may agree under another layout.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardproof.harness.checking.measures.tolerance import measure
from shardproof.harness.diagnosing.placing.plans import (
    CALLS,
    Coordinate,
    Plan,
    group_along,
    has_shape,
    join_parts,
    list_plans,
)
from shardproof.harness.protocols import Axes

AGREES, DIFFERS, UNKNOWN = "agrees", "differs", "unknown"
"""`unknown`: no layout has these shapes, or the tensor shows nothing."""
_MOST_SHOWN = 6
_SAME = 1e-6
"""Partial sums whose relative difference is less than this are equal."""

Parts = dict[Coordinate, Tensor]
Factors = Mapping[tuple[int, int], float]
"""(rank, call) -> the factor by which the gradients of that call are too large."""
Basis = Mapping[str, Mapping[int, int]]
"""Axis -> rank -> its coordinate; no two ranks have the same coordinates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueTensor:
    """The truth's tensor in each call, the same tensor in control runs, and the rms of its kind of tensor."""

    calls: tuple[Tensor, ...]
    dtype: str
    controls: tuple[tuple[Tensor, ...], ...] = ()
    kind: float = 0.0

    def shows(self) -> bool:
        """Whether its elements are finite and not all equal."""
        numbers = [call for call in self.calls if call.numel()]
        one = numbers[0].flatten()[0] if numbers else None
        return one is not None and bool(torch.isfinite(one)) and any(bool((call != one).any()) for call in numbers)

    def call(self, number: int) -> "TrueTensor":
        """The tensor in one call."""
        controls = tuple((run[number],) for run in self.controls if len(run) == len(self.calls))
        return TrueTensor(calls=(self.calls[number],), dtype=self.dtype, controls=controls, kind=self.kind)

    def join_calls(self, dim: int) -> "TrueTensor | None":
        """All calls, concatenated along this dim; None if their shapes do not allow that."""
        if any(call.dim() <= dim for call in self.calls) or len({_shape_without(call, dim) for call in self.calls}) > 1:
            return None
        shapes = [call.shape for call in self.calls]
        controls = tuple((torch.cat(run, dim),) for run in self.controls if [one.shape for one in run] == shapes)
        return TrueTensor(calls=(torch.cat(self.calls, dim),), dtype=self.dtype, controls=controls, kind=self.kind)

    def plus(self, times: int, other: "TrueTensor") -> "TrueTensor | None":
        """This tensor plus `times` the other one; None if their shapes differ."""
        if [call.shape for call in self.calls] != [call.shape for call in other.calls]:
            return None
        runs = [
            tuple(mine + times * its for mine, its in zip(own, beside, strict=True))
            for own, beside in zip((self.calls, *self.controls), (other.calls, *other.controls), strict=False)
        ]
        return TrueTensor(calls=runs[0], controls=tuple(runs[1:]), dtype=self.dtype, kind=self.kind)

    def near(self, value: Tensor) -> bool:
        """Whether a tensor equals the tensor of the only call, within the limits of the checks."""
        (truth,) = self.calls
        controls = [run[0] for run in self.controls if run[0].shape == truth.shape]
        return measure("", value, truth, dtype=self.dtype, controls=controls, kind=self.kind).right


def _shape_without(tensor: Tensor, dim: int) -> tuple[int, ...]:
    """Its shape but for one dim."""
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The layout under which the ranks' tensors are the truth's, in words; `summed` is the axis of partial sums or "".

    `factors` are found on request (`scaled`). If the tensor differs, `shown` has (the ranks' tensor, the truth's) for
    each layout without partial sums.
    """

    state: str
    layout: str = ""
    summed: str = ""
    factors: Factors | None = None
    shown: tuple[tuple[Tensor, Tensor], ...] = ()


def fit_parts(
    parts: Mapping[int, Sequence[Tensor]],
    target: TrueTensor,
    axes: Axes,
    *,
    scaled: bool = False,
    factors: Factors | None = None,
) -> Fit:
    """Whether these tensors (rank -> one for each call) are the target under some layout.

    With `scaled` every rank and call may have a factor of its own. The tensors are divided by `factors` first.
    """
    if not target.shows() or not parts or len({len(calls) for calls in parts.values()}) != 1:
        return Fit(state=UNKNOWN)
    if factors:
        parts = {
            rank: [call / factors.get((rank, number), 1.0) for number, call in enumerate(calls)]
            for rank, calls in parts.items()
        }
    count, states, shown = len(next(iter(parts.values()))), [UNKNOWN], list[tuple[Tensor, Tensor]]()
    if count == len(target.calls) > 1 and not scaled:
        alone = [{rank: [calls[number]] for rank, calls in parts.items()} for number in range(count)]
        fits = [fit_parts(one, target.call(number), axes) for number, one in enumerate(alone)]
        if all(one.state == AGREES for one in fits):
            return fits[0]
        states += [one.state for one in fits]
        shown += next((one.shown for one in fits if one.state == DIFFERS), ())
    for basis in _list_bases(list(parts), axes):
        fitted = _in_basis(parts, target, basis, scaled)
        if fitted.state == AGREES:
            return fitted
        states.append(fitted.state)
        shown += fitted.shown
    return Fit(state=DIFFERS if DIFFERS in states else UNKNOWN, shown=tuple(shown[:_MOST_SHOWN]))


def _in_basis(given: Mapping[int, Sequence[Tensor]], target: TrueTensor, basis: Basis, scaled: bool) -> Fit:
    """The fit of the tensors, placed by the coordinates of their ranks on these axes."""
    names, state, shown = (*basis, CALLS), UNKNOWN, list[tuple[Tensor, Tensor]]()
    places = {
        (*(basis[axis][rank] for axis in basis), number): (rank, number)
        for rank, calls in given.items()
        for number in range(len(calls))
    }
    several = len(places) > len(given) or len(target.calls) > 1
    for rows in (0, 1) if several else (None,):
        whole = target if rows is None else target.join_calls(rows)
        if whole is None:
            continue
        wanted = tuple(whole.calls[0].shape)
        for view in _views_of_local(next(iter(given.values()))[0], target.calls[0]):
            try:
                parts = {place: view(given[rank][number]) for place, (rank, number) in places.items()}
            except (RuntimeError, IndexError):  # the shape of a part does not allow this view
                continue
            shapes = {place: tuple(part.shape) for place, part in parts.items()}
            for plan in list_plans(names, len(wanted), rows):
                if has_shape(shapes, plan, wanted):
                    state = DIFFERS
                    if (factors := _find_agreement(parts, plan, whole, scaled)) is not None:
                        return Fit(
                            state=AGREES,
                            layout=plan.words(names),
                            summed=plan.summed_axis(names),
                            factors={places[place]: factor for place, factor in factors.items()},
                        )
                    if not plan.summed_axis(names) and not scaled:
                        shown += _pair_with_truth(parts, plan, whole.calls[0])
    return Fit(state=state, shown=tuple(shown))


def _list_bases(ranks: Sequence[int], axes: Axes) -> Iterator[Basis]:
    """Every set of axes on which no two of these ranks have the same coordinates."""
    places: dict[str, dict[int, int]] = {}
    seen: list[list[list[int]]] = []
    for axis, lists in axes.items():
        groups = sorted(own for group in lists if (own := [rank for rank in group if rank in ranks]))
        same_size = len({len(group) for group in groups}) == 1 and len(groups[0]) > 1
        if same_size and sum(map(len, groups)) == len(ranks) and groups not in seen:
            seen.append(groups)
            places[axis] = {rank: place for group in groups for place, rank in enumerate(group)}
    bases = [
        names
        for size in range(len(places) + 1)
        for names in itertools.combinations(places, size)
        if math.prod(max(places[name].values()) + 1 for name in names) == len(ranks)
        and len({tuple(places[name][rank] for name in names) for rank in ranks}) == len(ranks)
    ]
    yield from ({name: places[name] for name in names} for names in bases)
    if not bases:
        yield {"all ranks": {rank: place for place, rank in enumerate(sorted(ranks))}}


def _views_of_local(local: Tensor, truth: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """The views of a local tensor that have as many dims as the truth."""
    dims = truth.dim()
    if local.dim() > dims > 0:
        yield lambda part: part.flatten(dims - 1)
    elif local.dim() == dims:
        yield lambda part: part
        if dims > 2:
            yield lambda part: part.transpose(0, 1)
    elif local.dim() == dims - 1 > 0:
        first, second = truth.shape[:2]
        yield lambda part: part.unflatten(0, (first, -1))
        yield lambda part: part.unflatten(0, (-1, second))
        yield lambda part: part.unflatten(0, (-1, first)).transpose(0, 1)
        yield lambda part: part.unflatten(0, (second, -1)).transpose(0, 1)


def _pair_with_truth(parts: Parts, plan: Plan, truth: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The tensor that these parts make up, and the truth; empty if replicas of it differ."""
    first, *others = join_parts(parts, plan).values()
    return [(first, truth)] if first.shape == truth.shape and all(torch.equal(first, other) for other in others) else []


def _find_agreement(parts: Parts, plan: Plan, target: TrueTensor, scaled: bool) -> dict[Coordinate, float] | None:
    """The factor of every part (1 unless `scaled`) when the parts make up the target; None when they do not."""
    axis = next((place for place, (act, _) in enumerate(plan.acts) if act == "sum"), None)
    left = dict(parts)
    if axis is not None:
        for group in group_along(left, axis):
            if _all_equal([left[place] for place in group]):
                return None
        sums = {group[0]: torch.stack([left[place] for place in group]).sum(0) for group in group_along(left, axis)}
        left = sums
    factors = dict.fromkeys(parts, 1.0)
    if scaled:
        own = _factors_of_parts(left, plan, target)
        if own is None:
            return None
        factors = {place: own[_owner_of_place(place, plan)] for place in parts}
        left = {place: part / own[_owner_of_place(place, plan)] for place, part in left.items()}
    truth = target.calls[0]
    for value in join_parts(left, plan).values():
        if not target.near(value[tuple(slice(size) for size in truth.shape)]):
            return None
    return factors


def _owner_of_place(place: Coordinate, plan: Plan) -> Coordinate:
    """The coordinates of a part, with 0 for every axis that does not shard."""
    return tuple(at if axis in plan.order else 0 for axis, at in enumerate(place))


def _factors_of_parts(found: Parts, plan: Plan, target: TrueTensor) -> dict[Coordinate, float] | None:
    """The factor by which each part is larger than the truth's, for the first of its replicas."""
    firsts = {place: part for place, part in found.items() if place == _owner_of_place(place, plan)}
    number = {place: index for index, place in enumerate(firsts)}
    ids = {place: torch.full_like(part, float(number[place]), dtype=torch.float64) for place, part in firsts.items()}
    truth = target.calls[0].double()
    region = tuple(slice(size) for size in truth.shape)
    (value,) = join_parts(firsts, plan).values()
    (who,) = join_parts(ids, plan).values()
    value, who = value[region].double(), who[region]
    factors = {}
    for place, index in number.items():
        mine = who == index
        size = float(truth[mine].square().sum())
        factors[place] = float((value[mine] * truth[mine]).sum()) / size if size else 1.0
    usable = all(math.isfinite(factor) and factor for factor in factors.values())
    return factors if usable else None


def _all_equal(parts: Sequence[Tensor]) -> bool:
    """Whether all parts are equal, so that they are no partial sums."""
    first = parts[0].double()
    size = float(first.abs().max()) if first.numel() else 0.0
    return all(bool(((part.double() - first).abs() <= _SAME * size).all()) for part in parts[1:])
