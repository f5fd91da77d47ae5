"""The calls once a step: sums of gradients, loss, norm and loss scale.

The gradient of a parameter is summed over an axis if its ranks hold copies of the parameter and see different data:

    the data axis      always; with `shard=` it consists of the axes shard and replica
    the weight axis    where the gradient is partial
    the embedding axis for a tied token table, of which both ends of a pipeline have a copy

The words of data parallelism decide which gradients are summed in one call:

    no word      all gradients of a rank
    zero=0|1     those of a bucket of a stage (`bucket=`); with zero=1 they are reduced into shards, and the updated
                 parameters are gathered after the optimizer's step
    zero=2|3     those of a unit of a stage, whose parameters are gathered for every use (`parallel.data_parallel.fsdp`)

Beside a case's closed form, `megatron_beside` states what Megatron-LM itself estimates and calls.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from shardproof.parallel.communication.expectation import (
    MICRO_BATCHES,
    ONCE_A_STEP,
    CallPlace,
    CallRow,
    CompleteTerm,
    Places,
    gradient_dtype,
)
from shardproof.parallel.communication.layout import Coordinates, Cut, Placement, axis_size, coordinates, local_shape
from shardproof.parallel.communication.schedules import (
    TABLE,
    Kind,
    Stage,
    backward_order,
    is_inside,
    order,
    pipeline_of,
    recomputed_modules,
    stages,
    stages_by_rank,
)
from shardproof.parallel.data_parallel.buckets import Bucket, accumulates_in_buffer, stage_buckets
from shardproof.parallel.data_parallel.fsdp import REPLICAS, shard_axis, units_of
from shardproof.parallel.layers.roles import column_linears
from shardproof.parallel.model.strategy import Strategy
from shardproof.reference.case import Case
from shardproof.reference.language.core import MODES
from shardproof.reference.model.parameters import shapes

Placements = Mapping[str, Placement]


def summed_over(strategy: Strategy, case: Case, name: str, place: Placement) -> tuple[str, ...]:
    """The axes over which the gradient of a parameter with this placement is summed."""
    other_data = [shard_axis(case, name), *([REPLICAS] if case.shard else [])]
    other_data += [strategy.weight_axis] if strategy.partial(case, name) else []
    other_data += ["embedding"] if name == TABLE and case.table_is_copied else []
    return tuple(axis for axis in other_data if axis not in place.axes)


def step_rows(strategy: Strategy, case: Case) -> tuple[CallRow, ...]:
    """The calls that a step of this strategy makes once, after the last backward."""
    places = trained_placements(strategy, case)
    loss_axes, scaled = (case.token_axis, *case.pipeline_axes), 'scaler != "none"'
    # From placements, since the step itself reads Strategy.norm_axes: so an error in those is found.
    dense = (place.axes for name, place in places.items() if case.data_axis_of(name) not in strategy.expert_data_axes)
    split = (strategy.weight_axis, *sorted(set().union(*dense)), *([shard_axis(case)] if case.zero else []))
    shared = [*dict.fromkeys(split), *(axis for axes in strategy.expert_data_axes.values() for axis in axes)]
    at_once = {strategy.weight_axis: "of partial gradients", "embedding": "of both copies of a tied table"}
    if not case.shares_gradients:
        at_once = {**dict.fromkeys((case.data_axis, *strategy.expert_data_axes), "of all gradients"), **at_once}
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


def trained_placements(strategy: Strategy, case: Case) -> Placements:
    """The placements of the parameters that a rank keeps between steps; with zero=2|3 they are cut into rows over data
    ranks.
    """
    places = strategy.placements(case)
    if case.zero < 2:
        return places
    rows = {name: Cut(axis=shard_axis(case, name), dim=0, order="chunks") for name in places}
    return {name: replace(place, cuts=(*place.cuts, rows[name])) for name, place in places.items()}


def ranks_at(case: Case, **at: int) -> Coordinates:
    """The coordinates of the rank at these places of the mesh; on every other axis it is the first rank."""
    first = coordinates(case, 0)
    return {**first, **{axis: (own, first[axis][1]) for axis, own in at.items()}}


def elements_at(place: Placement, at: Coordinates) -> int:
    """Elements of a rank's local tensor, padding included."""
    return math.prod(local_shape(place, at))


def _by_rank(strategy: Strategy, places: Placements, axis: str, case: Case) -> Iterator[CallPlace]:
    """The gradients that are summed over an axis in one call, for every rank of a pipeline.

    A rank sums the gradients of all its chunks together. Over the weight axis they are summed one by one if the
    strategy does not coalesce them.
    """
    names = [name for name, place in places.items() if axis in summed_over(strategy, case, name, place)]
    together = strategy.coalesced or axis != strategy.weight_axis
    every = range(case.tp if MODES[case.mode].uneven else 1)
    for own in stages_by_rank(case):
        mine = [name for name in names if any(stage.holds(name) for stage in own)]
        ranks = [ranks_at(case, tp=tp, **own[0].at) for tp in every]
        for group in [mine] if together and mine else [[name] for name in mine]:
            sizes = [sum(elements_at(places[name], at) for name in group) for at in ranks]
            for tp, size in enumerate(sizes if len(set(sizes)) > 1 else sizes[:1]):
                at = {**own[0].at, "tp": tp} if len(set(sizes)) > 1 else own[0].at
                yield CallPlace(at=at, values={"gradients": size})


def bucket_rows(strategy: Strategy, case: Case) -> tuple[CallRow, ...]:
    """The calls of a case that sums its gradients in buckets or units."""
    places = trained_placements(strategy, case)
    return tuple(_unit_rows(case, places, strategy) if case.zero >= 2 else _bucket_rows(case, places, strategy))


def _bucket_rows(case: Case, places: Placements, strategy: Strategy) -> Iterator[CallRow]:
    """Sums of buckets over the data ranks; with zero=1 the updated parameters are gathered too."""
    op = "reduce_scatter" if case.zero else "all_reduce"
    for axis in (case.data_axis, *strategy.expert_data_axes):
        buckets = partial(_buckets, places, axis)
        yield sum_row(buckets, axis, "of a bucket", "bucket", op, when="not inside")
        yield sum_row(buckets, axis, "of a bucket", "bucket", op, phase="backward", when="inside", hidden="hides")
        why = "updated parameters of a bucket"
        yield CallRow(
            _without_module(buckets),
            "step",
            "all_gather",
            "bucket",
            why,
            axis=axis,
            times=ONCE_A_STEP,
            when="zero == 1",
        )


def _without_module(where: Places) -> Places:
    """Places without their module."""
    return lambda case: (replace(place, module="") for place in where(case))


def _buckets(places: Placements, axis: str, case: Case) -> Iterator[CallPlace]:
    """The buckets of every stage, made of the parameters that have copies over this axis."""
    own = {name: place for name, place in places.items() if case.data_axis_of(name) == axis}
    for stage in stages(case):
        at = ranks_at(case, **stage.at)
        sizes = {name: elements_at(place, at) for name, place in own.items() if stage.holds(name)}
        for bucket in stage_buckets(case, stage, sizes, axis_size(case, axis)):
            module, hides = _completing_module(case, stage, bucket)
            values = {"bucket": bucket.size, "inside": bool(module), "hides": hides}
            yield CallPlace(module=module, at=stage.at, values=values)


def _completing_module(case: Case, stage: Stage, bucket: Bucket) -> tuple[str, bool]:
    """The module whose gradient completes a bucket, "" if the bucket is summed after backward; and whether products of
    the backward hide the sum.
    """
    # Without `bucket=` the only bucket is summed after backward, and so is one with a deferred gradient of a linear.
    if not case.bucket or (
        case.wgrad == "deferred" and any(accumulates_in_buffer(case, slot.name) for slot in bucket.slots)
    ):
        return "", False
    order = [*reversed(dict.fromkeys(name.rpartition(".")[0] for name in shapes(case)))]  # as backward completes them
    if stage.copies_table:  # the head completes its gradient, and then what embeds behind the decoder
        order.insert(order.index("final_norm"), order.pop())
    latest = max(order.index(slot.name.rpartition(".")[0]) for slot in bucket.slots)
    # The last product that can hide a sum is that of the first layer in the rank's first chunk.
    last_product = order.index(next(name for name in column_linears(case) if stage.holds(name)))
    return order[latest], case.overlap and (latest < last_product or stage.chunk > 0)


def _unit_rows(case: Case, places: Placements, strategy: Strategy) -> Iterator[CallRow]:
    """The gathers of units' parameters, each counted in the unit that starts it, and the sums of their gradients."""
    times = ONCE_A_STEP if case.no_sync else MICRO_BATCHES
    for axis in (shard_axis(case), *strategy.expert_data_axes):
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
            yield sum_row(_without_module(own), REPLICAS, "of the shards of a unit", "shard")


def _units(places: Placements, case: Case, phase: Kind | None = None) -> Iterator[CallPlace]:
    """The units of every stage: with a phase at the modules where their gathers start, without one at their own.

    With `prefetch=` the gather of a unit starts in the unit that is used before it.
    """
    again = recomputed_modules(case)
    for stage in stages(case):
        at, layers = ranks_at(case, **stage.at), [*stage.layers]
        units = units_of(case, filter(stage.holds, places))
        forward = [*([""] if "" in units else []), *(f"layers.{layer}" for layer in layers)]
        sequence = forward if phase is Kind.F else [f"layers.{layer}" for layer in backward_order(case, layers)]
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
                "recomputed": is_inside(starts, again),
            }
            yield CallPlace(module=starts, at=stage.at, values=values)


def _gathers(case: Case, stage: Stage, phase: Kind, *, drops: bool) -> int:
    """How often a unit of this stage is gathered in a step, for forwards or for backwards.

    `drops`: its parameters are freed after a forward. In a pipeline they stay from a backward to the next forward.
    """
    kept, left, found = False, 0, 0
    for action in order(pipeline_of(case), stage.rank):
        if action.stage != stage.index:
            continue
        found += not kept and (action.kind is Kind.F) == (phase is Kind.F)
        left += action.kind is not Kind.F
        kept = not drops if action.kind is Kind.F else stage.count > 1 and left < case.micro
    return found


Line = tuple[str, str]
_MB = 2**20
_STATES, _SPLIT_STATES = (18.0, 0.0), (6.0, 12.0)
"""Bytes of each parameter that every data rank keeps, and bytes that data ranks share out: zero=0, then others."""


def megatron_beside(case: Case, places: Mapping[str, Placement]) -> Iterator[Line]:
    """(what, how much) of a case of tp or tp-sp by Megatron-LM: its estimate of memory, and its step's calls."""
    padding = {"embedding.tokens.weight", "head.weight"}
    whole = sum(
        math.prod((case.padded_vocab, *shape[1:]) if name in padding else shape) for name, shape in shapes(case).items()
    )
    yield "parameters of a rank", f"{local_elements(case, places):,}"
    yield "parameters of the model", f"{whole:,}"
    if len(case.blocks) == case.layers and not case.replaced_branches(0):  # the estimate knows no other layers
        yield "weights and optimizer of a rank by Megatron-LM's own estimate", f"{estimated_mb(case):,.2f} MB"
    for what, op, elements, dtype, group in step_calls(case, local_elements(case, places)):
        width = 2 if dtype in ("float16", "bfloat16") else 8 if dtype == "float64" else 4
        yield f"Megatron's step: {what}", f"{op} of {elements * width:,} B {dtype} over {group}"


def local_elements(case: Case, places: Mapping[str, Placement]) -> int:
    """Elements of all parameters on rank 0, padding included."""
    return sum(math.prod(local_shape(place, coordinates(case, 0))) for place in places.values())


def ledger_lines(case: Case, terms: Iterable[CompleteTerm]) -> Iterator[Line]:
    """(phase, calls and payload of a rank) of a closed form: in every micro-batch, and once a step."""
    counted: dict[tuple[str, str], list[int]] = {}
    for term in terms:
        often, per = (case.micro, "micro-batch") if term.calls % (case.steps * case.micro) == 0 else (1, "step")
        if term.phase in ("grad_sync", "step"):
            often, per = 1, "step"
        calls = term.calls // (case.steps * often)
        line = counted.setdefault((f"our ledger, a {per}: {term.phase}", term.op), [0, 0])
        line[0], line[1] = line[0] + calls, line[1] + calls * term.payload_bytes
    for (what, op), (calls, size) in counted.items():
        yield what, f"{calls} {op} of {size:,} B together"


def estimated_mb(case: Case) -> float:
    """Megatron-LM's theoretical memory of weights and optimizer on a rank, in units of 2**20 bytes.

    Source: `theoretical_memory_usage.py`, which counts neither biases nor positions.
    """
    hidden, gated = case.hidden, 1.5 if case.activation == "swiglu" else 1.0
    layer = 2 * hidden**2 * (1 + case.kv_heads / case.heads) + 2 * hidden * case.ffn * gated + 4 * hidden
    tables = hidden * case.padded_vocab * (1 if case.tied else 2)
    kept, shared = _SPLIT_STATES if case.zero else _STATES
    return (case.layers * layer + 2 * hidden + tables) / case.tp * (kept + shared / case.dp) / _MB


def step_calls(case: Case, elements: int) -> Iterator[tuple[str, str, int, str, str]]:
    """(what, op, elements, dtype, group) of each call that Megatron's step issues once and ours does not.

    None of them changes a number: sums over groups of one rank, a look for infinite gradients in float16, and calls by
    which all ranks of the model agree on whether the update took place and on the norm that is logged. Sources:
    Megatron-Core 0.14 `finalize_model_grads`, `MixedPrecisionOptimizer`, `training.train_step` (modes.md 5, measured).
    """
    model, data = f"{case.tp} ranks of tp", "a group of one"
    if axis_size(case, case.token_axis) == 1:
        yield "gradients", "all_reduce", elements, gradient_dtype(case), data
        yield "loss and number of tokens", "all_reduce", 2, "float32", data
    if case.dtype == "float16" and case.scaler == "none":
        yield "infinite gradients", "all_reduce", 1, "float32", model
    yield "whether all updated", "all_reduce", 1, "int32", model
    yield "the norm that is logged", "all_reduce", 1, "float32", model
    yield "whether a step is run again", "all_reduce", 1, "float32", f"all {case.world_size} ranks"
