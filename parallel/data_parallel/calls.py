"""The calls once a step: sums of gradients, loss, norm and loss scale.

The gradient of a parameter is summed over exactly the axes that neither cut it nor share its data (`summed_over`). Its
placement names the axes that cut it. The data of its copies differ over the data axis always, and over the weight axis
where it is partial. For a tied token table they differ over the two ends of a pipeline too. The words of data
parallelism decide which gradients travel in one call:

    no word      all gradients of a rank in one call
    any word     what a bucket or a unit holds (`parallel.data_parallel.bucket_calls`)
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardproof.parallel.communication import expectation
from shardproof.parallel.communication.expectation import ONCE_A_STEP, CallPlace, CallRow, Places
from shardproof.parallel.communication.layout import Coordinates, Cut, Placement, local_shape
from shardproof.parallel.communication.mesh import coordinates
from shardproof.parallel.model.strategy import Strategy
from shardproof.parallel.schedules.stages import TABLE, held_by_rank
from shardproof.reference.case import Case
from shardproof.reference.language.core import MODES
from shardproof.reference.model.parameters import dtype_of

Placements = Mapping[str, Placement]
REPLICAS = "replica"
"""The mesh axis over which shards are replicated."""


def shard_axis(case: Case, name: str = "") -> str:
    """The data axis of a parameter (of dense ones without a name); with `shard=` the ranks of one copy alone."""
    return "shard" if case.shard else case.data_axis_of(name)


def summed_over(strategy: Strategy, case: Case, name: str, place: Placement) -> tuple[str, ...]:
    """The axes over which the gradient of a parameter with this placement is summed, by the rule above."""
    other_data = [shard_axis(case, name), *([REPLICAS] if case.shard else [])]
    other_data += [strategy.weight_axis] if strategy.partial(case, name) else []
    other_data += ["embedding"] if name == TABLE and case.table_is_copied else []
    return tuple(axis for axis in other_data if axis not in place.axes)


def step_rows(strategy: Strategy, case: Case) -> tuple[CallRow, ...]:
    """The calls of a step of the strategy of a case, beside those of its modules."""
    places = trained(strategy, case)
    loss_axes, scaled = (case.token_axis, *case.pipeline_axes), 'scaler != "none"'
    # From placements and not from Strategy.norm_axes, which the step reads: a wrong one differs from the closed form.
    dense = (place.axes for name, place in places.items() if case.data_axis_of(name) not in strategy.apart)
    split = (strategy.weight_axis, *sorted(set().union(*dense)), *([shard_axis(case)] if case.zero else []))
    shared = [*dict.fromkeys(split), *(axis for axes in strategy.apart.values() for axis in axes)]
    at_once = {strategy.weight_axis: "of partial gradients", "embedding": "of both copies of a tied table"}
    if not case.shares_gradients:
        at_once = {**dict.fromkeys((case.data_axis, *strategy.apart), "of all gradients"), **at_once}
    return (
        *(sum_row(partial(_by_rank, strategy, places, axis), axis, why) for axis, why in at_once.items()),
        *(_once("all_reduce", "2", "loss and number of tokens", axis, "float64") for axis in loss_axes),
        *(_once("all_reduce max", "1", "infinite gradients", axis, "float32", when=scaled) for axis in shared),
        *(_once("all_reduce", "1", "squared norm of the gradients", axis, "loss") for axis in shared),
    )


def _once(op: str, elements: str, why: str, axis: str, dtype: str, *, when: str = "True") -> CallRow:
    return CallRow("", "grad_sync", op, elements, why, axis=axis, dtype=dtype, times=ONCE_A_STEP, when=when)


def sum_row(
    where: Places, axis: str, why: str, elements: str = "gradients", op: str = "all_reduce", **more: Any
) -> CallRow:
    """A sum of gradients over an axis, once a step unless `more` has another number."""
    words = {"phase": "grad_sync", "axis": axis, "dtype": "gradients", "times": ONCE_A_STEP, **more}
    return CallRow(where, op=op, elements=elements, why=f"sum {why}", **words)


def trained(strategy: Strategy, case: Case) -> Placements:
    """How the parameters lie that a rank keeps: with zero=2|3 cut by rows over the ranks that share them."""
    places = strategy.placements(case)
    if case.zero < 2:
        return places
    rows = {name: Cut(axis=shard_axis(case, name), dim=0, order="chunks") for name in places}
    return {name: replace(place, cuts=(*place.cuts, rows[name])) for name, place in places.items()}


def ranks_at(case: Case, **at: int) -> Coordinates:
    """The coordinates of a rank at these places of the mesh, the first one on other axes."""
    first = coordinates(case, 0)
    return {**first, **{axis: (own, first[axis][1]) for axis, own in at.items()}}


def elements_at(place: Placement, at: Coordinates) -> int:
    """Elements of the local tensor of the rank there, padding included."""
    return math.prod(local_shape(place, at))


def _by_rank(strategy: Strategy, places: Placements, axis: str, case: Case) -> Iterator[CallPlace]:
    """The gradients that are summed over an axis, on every rank of a pipeline for the parameters of all its chunks.

    They travel together, but over the weight axis one by one where they are not coalesced.
    """
    names = [name for name, place in places.items() if axis in summed_over(strategy, case, name, place)]
    together = strategy.coalesced or axis != strategy.weight_axis
    every = range(case.tp if MODES[case.mode].uneven else 1)
    for own in held_by_rank(case):
        mine = [name for name in names if any(stage.holds(name) for stage in own)]
        ranks = [ranks_at(case, tp=tp, **own[0].at) for tp in every]
        for group in [mine] if together and mine else [[name] for name in mine]:
            sizes = [sum(elements_at(places[name], at) for name in group) for at in ranks]
            for tp, size in enumerate(sizes if len(set(sizes)) > 1 else sizes[:1]):
                at = {**own[0].at, "tp": tp} if len(set(sizes)) > 1 else own[0].at
                yield CallPlace(at=at, values={"gradients": size})


def gradient_dtype(case: Case) -> torch.dtype:
    """The dtype in which gradients are added up and summed over ranks."""
    dtype: torch.dtype = getattr(torch, expectation.gradient_dtype(case))
    return dtype


def trained_dtype(case: Case) -> torch.dtype:
    """The dtype of what the optimizer steps."""
    return torch.float32 if case.master == "float32" else dtype_of(case)
