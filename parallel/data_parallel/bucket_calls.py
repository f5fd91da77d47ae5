"""The calls of buckets and of parameters in shards, which take the place of one sum of all gradients.

    zero=0|1     a bucket of a stage (`bucket=`); with zero=1 reduced into shards, gathered after the optimizer's step
    zero=2|3     a unit of a stage, gathered for every use (`parallel.data_parallel.fsdp`)

With `bucket=` a bucket's call belongs to the module whose gradient completes it, the last in the order of backward.
With wgrad=deferred a bucket with the weight of a linear is summed after backward.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from shardproof.parallel.communication.expectation import MICRO_BATCHES, ONCE_A_STEP, CallPlace, CallRow, Places
from shardproof.parallel.communication.mesh import axis_size
from shardproof.parallel.data_parallel.buckets import Bucket, stage_buckets, taken_over
from shardproof.parallel.data_parallel.calls import (
    REPLICAS,
    Placements,
    elements_at,
    ranks_at,
    shard_axis,
    sum_row,
    trained,
)
from shardproof.parallel.data_parallel.fsdp import units_of
from shardproof.parallel.layers.roles import column_linears
from shardproof.parallel.model.strategy import Strategy
from shardproof.parallel.schedules.pipeline import Kind, order
from shardproof.parallel.schedules.stages import Stage, in_backward, lies_in, modules_again, pipeline_of, stages
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import shapes


def bucket_rows(strategy: Strategy, case: Case) -> tuple[CallRow, ...]:
    """The calls of the buckets or units of a case that shares gradients otherwise than in one sum."""
    places = trained(strategy, case)
    return tuple(_unit_rows(case, places, strategy) if case.zero >= 2 else _bucket_rows(case, places, strategy))


def _bucket_rows(case: Case, places: Placements, strategy: Strategy) -> Iterator[CallRow]:
    """Sums of buckets over the ranks with other tokens, and what shares them gathered."""
    op = "reduce_scatter" if case.zero else "all_reduce"
    for axis in (case.data_axis, *strategy.apart):
        buckets = partial(_buckets, places, axis)
        yield sum_row(buckets, axis, "of a bucket", "bucket", op, when="not inside")
        yield sum_row(buckets, axis, "of a bucket", "bucket", op, phase="backward", when="inside", hidden="hides")
        why = "updated parameters of a bucket"
        yield CallRow(
            _unnamed(buckets), "step", "all_gather", "bucket", why, axis=axis, times=ONCE_A_STEP, when="zero == 1"
        )


def _unnamed(where: Places) -> Places:
    """Places without their module."""
    return lambda case: (replace(place, module="") for place in where(case))


def _buckets(places: Placements, axis: str, case: Case) -> Iterator[CallPlace]:
    """The buckets of every stage, of the parameters that have copies over an axis."""
    own = {name: place for name, place in places.items() if case.data_axis_of(name) == axis}
    for stage in stages(case):
        at = ranks_at(case, **stage.at)
        sizes = {name: elements_at(place, at) for name, place in own.items() if stage.holds(name)}
        for bucket in stage_buckets(case, stage, sizes, axis_size(case, axis)):
            module, hides = _completing(case, stage, bucket)
            values = {"bucket": bucket.size, "inside": bool(module), "hides": hides}
            yield CallPlace(module=module, at=stage.at, values=values)


def _completing(case: Case, stage: Stage, bucket: Bucket) -> tuple[str, bool]:
    """The module whose gradient completes a bucket, "" behind backward: for the only bucket, and for one with a
    deferred gradient. And whether its sum is hidden: unless it starts behind the last product, that of the first layer
    of the rank's first chunk.
    """
    if not case.bucket or (case.wgrad == "deferred" and any(taken_over(case, slot.name) for slot in bucket.slots)):
        return "", False
    order = [*reversed(dict.fromkeys(name.rpartition(".")[0] for name in shapes(case)))]  # in which backward completes
    if stage.copies_table:  # its gradient comes from the head, and from what embeds behind the decoder
        order.insert(order.index("final_norm"), order.pop())
    latest = max(order.index(slot.name.rpartition(".")[0]) for slot in bucket.slots)
    last_product = order.index(next(name for name in column_linears(case) if stage.holds(name)))
    return order[latest], case.overlap and (latest < last_product or stage.chunk > 0)


def _unit_rows(case: Case, places: Placements, strategy: Strategy) -> Iterator[CallRow]:
    """Gathers and sums of parameters in shards; a gather belongs to the unit that starts it."""
    times = ONCE_A_STEP if case.no_sync else MICRO_BATCHES
    for axis in (shard_axis(case), *strategy.apart):
        sharded = {name: place for name, place in places.items() if shard_axis(case, name) == axis}
        forward, backward = partial(_units, sharded, phase=Kind.F), partial(_units, sharded, phase=Kind.B)
        words: dict[str, Any] = {"op": "all_gather", "elements": "unit", "axis": axis, "again": "", "hidden": "ahead"}
        why = "whole parameters of a unit"
        gather: Callable[..., CallRow] = partial(CallRow, **words, why=why, times="steps * gathers")
        yield gather(forward, "forward", when="gathers")
        yield gather(backward, "backward", when="gathers and not recomputed")
        yield gather(backward, "recompute", when="gathers and recomputed")
        own = partial(_units, sharded)
        yield sum_row(own, axis, "of a unit, into shards", "unit", "reduce_scatter", phase="backward", times=times)
        if case.shard:
            yield sum_row(_unnamed(own), REPLICAS, "of the shards of a unit", "shard")


def _units(places: Placements, case: Case, phase: Kind | None = None) -> Iterator[CallPlace]:
    """The units of every stage: where they are gathered for forwards or backwards, or at their own modules. A unit that
    is started ahead begins in the one that is used before it.
    """
    again = modules_again(case)
    for stage in stages(case):
        at, layers = ranks_at(case, **stage.at), [*stage.layers]
        units = units_of(case, filter(stage.holds, places))
        forward = [*([""] if "" in units else []), *(f"layers.{layer}" for layer in layers)]
        sequence = forward if phase is Kind.F else [f"layers.{layer}" for layer in in_backward(case, layers)]
        for module, names in units.items():
            shard = sum(elements_at(places[name], at) for name in names)
            values = {"unit": shard * axis_size(case, shard_axis(case, names[0])), "shard": shard}
            if phase is None:
                yield CallPlace(module=module, at=stage.at, values=values)
                continue
            place = sequence.index(module) if module in sequence else 0
            starts = sequence[place - 1] if case.prefetch and module and place else module
            values |= {
                "gathers": _gathers(case, stage, phase, drops=case.zero == 3 and bool(module)),
                "ahead": case.overlap and starts not in ("", module),
                "recomputed": lies_in(starts, again),
            }
            yield CallPlace(module=starts, at=stage.at, values=values)


def _gathers(case: Case, stage: Stage, phase: Kind, *, drops: bool) -> int:
    """How often a unit of this stage is gathered in a step, for forwards or for backwards; `drops`: it is not kept
    behind a forward. In a pipeline it stays from a backward to the next forward.
    """
    kept, left, found = False, 0, 0
    for action in order(pipeline_of(case), stage.rank):
        if action.stage != stage.index:
            continue
        found += not kept and (action.kind is Kind.F) == (phase is Kind.F)
        left += action.kind is not Kind.F
        kept = not drops if action.kind is Kind.F else stage.count > 1 and left < case.micro
    return found
