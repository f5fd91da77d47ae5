"""Closed forms: the collective calls that every rank must issue, as terms computed from a case by integers alone.

Payloads in bytes: all_reduce the tensor, all_gather the gathered output, reduce_scatter the full input, all_to_all one
rank's total send, broadcast the tensor (modes.md section 1). A group of one rank is bypassed by every collective but
the broadcasts of the data. Terms count a whole run: all steps and micro-batches. Nothing here is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from parallel.communication.batch import SIZES_PER_KEY, forms_sent
from parallel.communication.layout import Placement, local_shape
from parallel.communication.mesh import axis_size, coordinates
from parallel.schedules.recompute import computed_again, ends_of_units
from parallel.schedules.stages import Stage, held
from reference.case import Case
from reference.case.modes import MODES

__all__ = [
    "ITEM_BYTES",
    "CompleteTerm",
    "Terms",
    "activation_bytes",
    "activation_terms",
    "behind_weights",
    "by_rank",
    "delivery_terms",
    "local_elements",
    "logits_terms",
    "loss_dtype",
    "loss_terms",
    "per_micro",
    "per_step",
    "placed",
    "repeated",
    "saved_terms",
    "split_embedding_terms",
    "step_terms",
]

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "bool": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteTerm:
    """A term that states every field: `calls` equal calls over the whole run, on every rank or on those at these places
    of the mesh; fields as in the ledger.

    `hidden`: each travels while a product is computed, which lies between its issue and its wait.
    """

    phase: str
    region: str
    op: str
    reduce_op: str
    axis: str
    group_size: int
    dtype: str
    payload_bytes: int
    calls: int
    hidden: bool = False
    at: Mapping[str, int] = field(default_factory=dict, hash=False)


def per_micro(
    case: Case,
    phase: str,
    region: str,
    op: str,
    payload_bytes: int,
    *,
    axis: str = "tp",
    reduce_op: str = "",
    dtype: str = "",
    calls: int = 1,
    alone: bool = False,
    hidden: bool = False,
) -> Iterator[CompleteTerm]:
    """The term of `calls` calls in every micro-batch; none on an axis of one rank unless issued `alone` too.

    An all_reduce or reduce_scatter sums unless `reduce_op` says otherwise; `dtype` is the case's unless said.
    """
    group_size = axis_size(case, axis)
    if group_size > 1 or alone:
        yield CompleteTerm(
            phase=phase,
            region=region,
            op=op,
            reduce_op=reduce_op or ("sum" if op in ("all_reduce", "reduce_scatter") else ""),
            axis=axis,
            group_size=group_size,
            dtype=dtype or case.dtype,
            payload_bytes=payload_bytes,
            calls=calls * case.steps * case.micro,
            hidden=hidden,
        )


def per_step(case: Case, op: str, payload_bytes: int, *, axis: str, dtype: str = "") -> Iterator[CompleteTerm]:
    """The term of one call a step in phase grad_sync; none on an axis of one rank."""
    group_size = axis_size(case, axis)
    if group_size > 1:
        yield CompleteTerm(
            phase="grad_sync",
            region="",
            op=op,
            reduce_op="sum",
            axis=axis,
            group_size=group_size,
            dtype=dtype or case.dtype,
            payload_bytes=payload_bytes,
            calls=case.steps,
        )


def activation_bytes(case: Case) -> int:
    """A: one whole activation of a context rank, tokens x hidden."""
    return case.slice_tokens * case.hidden * ITEM_BYTES[case.dtype]


def activation_terms(case: Case, phase: str, region: str, *ops: str, hidden: bool = False) -> Iterator[CompleteTerm]:
    """In every micro-batch, one call of each op over tp, each with the payload of one whole activation."""
    for op in ops:
        yield from per_micro(case, phase, region, op, activation_bytes(case), hidden=hidden)


def behind_weights(case: Case) -> bool:
    """Does the gradient of a column linear's input travel while the gradient of its weight is computed?"""
    return case.overlap and case.wgrad != "deferred"


def repeated(case: Case, terms: Iterable[CompleteTerm], *, core: bool = False) -> Iterator[CompleteTerm]:
    """Forward calls, and those of them that are issued once more where backward computes a layer again; of a `core` of
    attention too where that alone is computed again. `early_stop` leaves out what ends a unit, unless
    dropout follows it, whose mask backward needs.
    """
    again, ends = computed_again(case), ends_of_units(case) if case.early_stop and not case.dropout else ()
    everywhere = core and case.recompute == "selective"
    for term in terms:
        yield term
        _, layer, leaf = [*term.region.split(".", 2), "", ""][:3]
        ending = leaf == "mlp.w2" and int(layer) in ends
        if term.phase == "forward" and layer and (everywhere or int(layer) in again) and not ending:
            yield replace(term, phase="recompute")


def saved_terms(case: Case) -> Iterator[CompleteTerm]:
    """The gather of every unit's input as it is computed again (distribute_saved): one whole activation, issued by the
    module whose backward is the first to need something of the unit: the last linear, or the dropout behind it.
    """
    for layer in sorted(ends_of_units(case)) if case.distribute_saved else ():
        first = f"layers.{layer}" if case.dropout else f"layers.{layer}.mlp.w2"
        yield from activation_terms(case, "recompute", first, "all_gather")


def loss_dtype(case: Case) -> str:
    """Dtype of the loss and of the collectives inside it."""
    return "float64" if case.dtype == "float64" else "float32"


def delivery_terms(case: Case, stage: Stage | None = None) -> Iterator[CompleteTerm]:
    """Data to the ranks: broadcasts over tp, issued in a group of one too (see `parallel.communication.batch`).

    All of it, or what this pipeline stage is sent.
    """
    tokens, keys = case.tokens, forms_sent(case, stage)
    whole = [key for key in keys if key in ("tokens", "labels", "positions")]
    mask = case.batch * case.seq**2 if "attention_mask" in keys else 0
    if case.delivery == "tensors" and keys:
        yield from per_micro(case, "data", "", "broadcast", 8 * tokens, dtype="int64", calls=len(whole), alone=True)
        if "loss_mask" in keys:
            yield from per_micro(case, "data", "", "broadcast", 4 * tokens, dtype="float32", alone=True)
        if mask:
            yield from per_micro(case, "data", "", "broadcast", mask, dtype="bool", alone=True)
    elif case.delivery == "flat" and keys:
        elements = tokens * (len(keys) - bool(mask)) + mask
        yield from per_micro(case, "data", "", "broadcast", 8 * SIZES_PER_KEY * len(keys), dtype="int64", alone=True)
        yield from per_micro(case, "data", "", "broadcast", 8 * elements, dtype="int64", alone=True)


def loss_terms(case: Case, *, axis: str = "tp") -> Iterator[CompleteTerm]:
    """Vocabulary-parallel cross entropy: MAX, then one SUM a term or one SUM of all (see `parallel.layers.loss`)."""
    dtype = loss_dtype(case)
    one = case.slice_tokens * ITEM_BYTES[dtype]
    terms = 3 if case.label_smoothing else 2
    yield from per_micro(case, "loss", "", "all_reduce", one, axis=axis, reduce_op="max", dtype=dtype)
    if case.cross_entropy == "fused":
        yield from per_micro(case, "loss", "", "all_reduce", terms * one, axis=axis, dtype=dtype)
    else:
        yield from per_micro(case, "loss", "", "all_reduce", one, axis=axis, dtype=dtype, calls=terms)


def logits_terms(case: Case) -> Iterator[CompleteTerm]:
    """What follows a head that splits the vocabulary over tp: the gather of its logits, or a loss of their parts."""
    if case.head == "gather":
        logits = case.slice_tokens * case.padded_vocab * ITEM_BYTES[case.dtype]
        yield from per_micro(case, "forward", "head", "all_gather", logits)
    else:
        yield from loss_terms(case)


def split_embedding_terms(case: Case) -> Iterator[CompleteTerm]:
    """An embedding whose table is split over tp and whose hidden states are split along the sequence."""
    if case.embedding == "hidden":
        forward = "all_gather"
    else:
        forward = "all_reduce" if case.positions == "learned" else "reduce_scatter"
    yield from activation_terms(case, "forward", "embedding", forward)
    yield from activation_terms(case, "backward", "embedding", "all_gather")


Terms = Callable[[Case], Iterator[CompleteTerm]]
"""A part of a closed form."""


def step_terms(
    placements: Callable[[Case], Mapping[str, Placement]],
    partial: Callable[[Case, str], bool],
    *,
    weight_axis: str = "tp",
    data_axes: tuple[str, ...] = ("dp",),
    loss_axes: tuple[str, ...] = ("dp",),
    coalesced: bool = True,
) -> dict[str, Terms]:
    """What happens once a step, part by part, so that a scheme can replace one of them; each rank of a pipeline for the
    parameters of its stages:

    data      all gradients over the data axes, in one call; of as many elements as the rank holds
    partial   the partial ones over the weight axis, in one call when `coalesced`, else in one each
    scalars   loss and number of tokens over the loss axes
    norm      the squared norm over the weight axis
    """

    def data(case: Case) -> Iterator[CompleteTerm]:
        for at, places in by_rank(case, placements(case)):
            for share, elements in _local_sizes(case, places):
                for axis in data_axes:
                    size = ITEM_BYTES[case.dtype] * elements
                    yield from placed(per_step(case, "all_reduce", size, axis=axis), {**at, **share})

    def partials(case: Case) -> Iterator[CompleteTerm]:
        for at, places in by_rank(case, placements(case)):
            shared = [math.prod(place.shape) for name, place in places.items() if partial(case, name)]
            for elements in [sum(shared)] if coalesced and shared else shared:
                size = ITEM_BYTES[case.dtype] * elements
                yield from placed(per_step(case, "all_reduce", size, axis=weight_axis), at)

    def scalars(case: Case) -> Iterator[CompleteTerm]:
        for axis in loss_axes:
            yield from per_step(case, "all_reduce", 2 * ITEM_BYTES["float64"], axis=axis, dtype="float64")

    def norm(case: Case) -> Iterator[CompleteTerm]:
        dtype = loss_dtype(case)
        yield from per_step(case, "all_reduce", ITEM_BYTES[dtype], axis=weight_axis, dtype=dtype)

    return {"data": data, "partial": partials, "scalars": scalars, "norm": norm}


def placed(terms: Iterable[CompleteTerm], at: Mapping[str, int]) -> Iterator[CompleteTerm]:
    """The terms on the ranks at these places of the mesh alone."""
    for term in terms:
        yield replace(term, at={**term.at, **at})


def by_rank(case: Case, places: Mapping[str, Placement]) -> Iterator[tuple[Mapping[str, int], dict[str, Placement]]]:
    """The parameters of every rank of a pipeline, all of its chunks, with the place of that rank; all of them once
    without a pipeline.
    """
    for rank in range(case.pp):
        own = held(case, rank)
        yield own[0].at, {name: place for name, place in places.items() if any(stage.holds(name) for stage in own)}


def local_elements(case: Case, places: Mapping[str, Placement], tp_rank: int = 0) -> int:
    """Elements of all parameters on one rank, padding included."""
    at = {**coordinates(case, 0), "tp": (tp_rank, case.tp)}
    return sum(math.prod(local_shape(place, at)) for place in places.values())


def _local_sizes(case: Case, places: Mapping[str, Placement]) -> Iterator[tuple[Mapping[str, int], int]]:
    """Elements of all parameters on a rank: once where every rank holds as many, else with the rank's place."""
    uneven = MODES[case.mode].uneven and case.dp > 1
    sizes = [local_elements(case, places, rank) for rank in range(case.tp if uneven else 1)]
    if len(set(sizes)) == 1:
        yield {}, sizes[0]
    else:
        yield from (({"tp": rank}, size) for rank, size in enumerate(sizes))
