"""The closed forms of data parallelism: what replaces the one flat sum of gradients of a plain step.

Payloads of bucket b (B elements, padded with zero=1) and of unit u (U elements, every shard padded), e_g bytes of a
gradient and e_p of a parameter; `backward` where `bucket=` gives a size, else after it:

    zero=0   once a step    all_reduce B e_g                      of every bucket
    zero=1   once a step    reduce_scatter B e_g, then after the optimizer's step all_gather B e_p, of every bucket
    zero=2   a micro-batch  all_gather U e_p before a unit's forward, reduce_scatter U e_g after its backward
    zero=3   a micro-batch  the same, and all_gather U e_p of every layer before its backward (recompute=full: before
                            its second forward)
    no_sync  the reduce_scatter once a step, in the backward of the last micro-batch
    prefetch a layer's gathers belong to the unit that starts them: the one before in forward, behind in backward
    shard=   once a step    all_reduce U e_g / shard of every unit over the replicas
    pp=      a unit stays gathered from a backward to the next forward: with zero=2 one gather a step, with zero=3 one
             for each forward that follows a forward and each backward that follows a forward, in the schedule's order

With wgrad=deferred a bucket with the weight of a linear is summed after backward. A bucket's call belongs to the module
whose gradient completes it, the last in the order of backward. Squared norm: over the weight axis, then over the axis
of the shards and the pipeline; infinite gradients (`scaler=`) before it in the same way. Every stage of a
pipeline has buckets of its own; the sum of a tied token table over its first and last stage is of the whole table, in
the gradients' dtype, though each rank keeps its part of it alone (zero=1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from parallel.communication.expectation import (
    ITEM_BYTES,
    CompleteTerm,
    Terms,
    by_rank,
    loss_dtype,
    per_micro,
    per_step,
    placed,
)
from parallel.communication.layout import local_shape
from parallel.communication.mesh import axis_size, coordinates
from parallel.data_parallel.buckets import Bucket
from parallel.data_parallel.rows import Unit, padded_rows
from parallel.data_parallel.words import (
    REPLICAS,
    gradient_dtype,
    shard_axis,
    sharing_axes,
    stage_buckets,
    taken_over,
    unit_of,
)
from parallel.layers.roles import attention_linears, head_norms, mlp_linears
from parallel.model.strategy import Strategy
from parallel.schedules.orders import order
from parallel.schedules.pipeline import Kind
from parallel.schedules.recompute import computed_again, in_backward
from parallel.schedules.stages import TABLE, Stage, pipeline_of, stages
from reference.case import Case

__all__ = ["data_parallel_terms", "once_a_step"]

Shape = tuple[int, ...]


def once_a_step(strategy: Strategy) -> Mapping[str, Terms]:
    """The parts of the closed form of a step that data parallelism changes, by their names in `step_terms`."""

    def data(case: Case) -> Iterator[CompleteTerm]:
        item = ITEM_BYTES[_dtype(case)]
        if case.zero >= 2:
            for stage, unit in _all_units(strategy, case) if case.shard else ():
                size = item * unit.shard_elements
                yield from placed(per_step(case, "all_reduce", size, axis=REPLICAS, dtype=_dtype(case)), stage.at)
            return
        op = "reduce_scatter" if case.zero else "all_reduce"
        for stage, bucket in _buckets(strategy, case):
            for term in per_step(case, op, item * bucket.size, axis=case.data_axis, dtype=_dtype(case)):
                yield replace(_in_backward(case, stage, bucket, term), at=stage.at)

    def partials(case: Case) -> Iterator[CompleteTerm]:
        shards = axis_size(case, shard_axis(case)) if case.zero >= 2 else 1
        for at, places in by_rank(case, strategy.placements(case)):
            shared = [
                padded_rows(place.shape[0], shards) * math.prod(place.shape[1:])
                for name, place in places.items()
                if strategy.partial(case, name)
            ]
            for elements in [sum(shared)] if strategy.coalesced and shared else shared:
                size = ITEM_BYTES[_dtype(case)] * elements
                terms = per_step(case, "all_reduce", size, axis=strategy.weight_axis, dtype=_dtype(case))
                yield from placed(terms, at)

    def embedding(case: Case) -> Iterator[CompleteTerm]:
        for term in strategy.once["embedding"](case):
            elements = term.payload_bytes // ITEM_BYTES[term.dtype]
            if case.zero >= 2:
                elements = padded_rows(elements // case.hidden, axis_size(case, shard_axis(case))) * case.hidden
            yield replace(term, dtype=_dtype(case), payload_bytes=ITEM_BYTES[_dtype(case)] * elements)

    def norm(case: Case) -> Iterator[CompleteTerm]:
        dtype = loss_dtype(case)
        for axis in sharing_axes(case, strategy.weight_axis):
            yield from per_step(case, "all_reduce", ITEM_BYTES[dtype], axis=axis, dtype=dtype)

    def scaler(case: Case) -> Iterator[CompleteTerm]:
        for axis in sharing_axes(case, strategy.weight_axis) if case.scaler != "none" else ():
            for term in per_step(case, "all_reduce", ITEM_BYTES["float32"], axis=axis, dtype="float32"):
                yield replace(term, reduce_op="max")

    def afterwards(case: Case) -> Iterator[CompleteTerm]:
        for stage, bucket in _buckets(strategy, case) if case.zero == 1 else ():
            for term in per_step(case, "all_gather", ITEM_BYTES[case.dtype] * bucket.size, axis=case.data_axis):
                yield replace(term, phase="step", reduce_op="", at=stage.at)

    return {
        **strategy.once,
        "data": data,
        "partial": partials,
        **({"embedding": embedding} if "embedding" in strategy.once else {}),
        "scaler": scaler,
        "norm": norm,
        "afterwards": afterwards,
    }


def data_parallel_terms(strategy: Strategy, case: Case) -> Iterator[CompleteTerm]:
    """What data parallelism adds to every micro-batch."""
    if case.zero < 2:
        return
    for stage, shapes in _held(strategy, case):
        yield from placed(_rows_terms(case, stage, _units(case, shapes)), stage.at)


def _rows_terms(case: Case, stage: Stage, units: Mapping[str, Unit]) -> Iterator[CompleteTerm]:
    """Gathers and sums of the units of one stage."""
    axis, layers, again = shard_axis(case), [*stage.layers], computed_again(case)
    forward, backward = [*([-1] if "" in units else []), *layers], in_backward(case, layers)
    for module, unit in units.items():
        layer, size = int(module.rpartition(".")[2]) if module else -1, ITEM_BYTES[case.dtype] * unit.elements
        drops = case.zero == 3 and bool(module)
        passes = {"forward": forward, "backward": backward}
        for (phase, sequence), count in zip(passes.items(), _gathers(case, stage, drops=drops), strict=True):
            place = sequence.index(layer) if layer in sequence else 0
            starts = sequence[place - 1] if case.prefetch and module and place else layer
            ahead = case.overlap and starts not in (-1, layer)
            where = "recompute" if phase == "backward" and starts in again else phase
            region = f"layers.{starts}" if starts >= 0 else ""
            for term in per_micro(case, where, region, "all_gather", size, axis=axis, hidden=ahead) if count else ():
                yield replace(term, calls=count * case.steps)
        reduced = ITEM_BYTES[_dtype(case)] * unit.elements
        for term in per_micro(case, "backward", module, "reduce_scatter", reduced, axis=axis, dtype=_dtype(case)):
            yield replace(term, calls=case.steps) if case.no_sync else term


def _gathers(case: Case, stage: Stage, *, drops: bool) -> tuple[int, int]:
    """How often a unit of this stage is gathered in a step, for forwards and for backwards; `drops`: it is not kept
    behind a forward.
    """
    kept, left, forward, backward = False, 0, 0, 0
    for action in order(pipeline_of(case), stage.index % case.pp):
        if action.stage != stage.index:
            continue
        if action.kind is Kind.F:
            forward, kept = forward + (not kept), not drops
        else:
            backward, left = backward + (not kept), left + 1
            kept = case.pp > 1 and left < case.micro
    return forward, backward


def _dtype(case: Case) -> str:
    """Of gradients."""
    return str(gradient_dtype(case)).removeprefix("torch.")


def _held(strategy: Strategy, case: Case) -> Iterator[tuple[Stage, dict[str, Shape]]]:
    """Every stage with what a rank holds of its parameters, data ranks aside."""
    places, first = strategy.placements(case), coordinates(case, 0)
    for stage in stages(case):
        at = {**first, **{axis: (place, case.pp) for axis, place in stage.at.items()}}
        yield stage, {name: local_shape(place, at) for name, place in places.items() if stage.holds(name)}


def _buckets(strategy: Strategy, case: Case) -> Iterator[tuple[Stage, Bucket]]:
    for stage, shapes in _held(strategy, case):
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        for bucket in stage_buckets(case, stage, sizes, axis_size(case, case.data_axis)):
            yield stage, bucket


def _all_units(strategy: Strategy, case: Case) -> Iterator[tuple[Stage, Unit]]:
    for stage, shapes in _held(strategy, case):
        for unit in _units(case, shapes).values():
            yield stage, unit


def _in_backward(case: Case, stage: Stage, bucket: Bucket, term: CompleteTerm) -> CompleteTerm:
    """A bucket's sum where the gradient that completes it is computed: behind backward for the only bucket, and for one
    with a deferred gradient.

    It is hidden unless it starts behind the last product: that of the first layer of the rank's first chunk.
    """
    if not case.bucket or (case.wgrad == "deferred" and any(taken_over(case, slot.name) for slot in bucket.slots)):
        return term
    order = _backward_order(case)
    if stage.copies_table:  # its gradient comes from the head
        order = sorted(order, key=lambda module: f"{module}.weight" != TABLE)
    latest = max(order.index(slot.name.rpartition(".")[0]) for slot in bucket.slots)
    last_product = order.index(f"layers.{stage.layers[0]}.attention.{attention_linears(case)[0]}")
    hidden = case.overlap and (latest < last_product or stage.index >= stage.pp)
    return replace(term, phase="backward", region=order[latest], hidden=hidden)


def _units(case: Case, shapes: Mapping[str, Shape]) -> dict[str, Unit]:
    units: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        units.setdefault(unit_of(name), {})[name] = shape
    ranks = axis_size(case, shard_axis(case))
    return {module: Unit(shapes=of_unit, ranks=ranks) for module, of_unit in units.items()}


def _backward_order(case: Case) -> list[str]:
    """Modules in the order in which backward completes the gradients of their parameters."""
    attention = attention_linears(case)
    order = ["head", "final_norm"]
    for layer in reversed(range(case.layers)):
        leaves = [
            *(f"mlp.{name}" for name in reversed(mlp_linears(case))),
            "mlp_norm",
            f"attention.{attention[-1]}",
            *(f"attention.{name}" for name in reversed(head_norms(case))),
            *(f"attention.{name}" for name in reversed(attention[:-1])),
            "attention_norm",
        ]
        order += [f"layers.{layer}.{leaf}" for leaf in leaves]
    return [*order, "embedding.positions", "embedding.tokens"]
