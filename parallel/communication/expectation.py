"""Closed forms: the collective calls that every rank must issue, stated as rows and read by one interpreter.

A `CallRow` states calls of one kind: where they are issued, in which phase, the op, how many elements travel, and why.
Its formulas are Python over the words and numbers of a case (`reference.case.Case`) and the values of a `CallPlace`.
`terms` turns rows into terms by integers alone: nothing here is measured.

Payloads: all_reduce the tensor, all_gather the gathered output, reduce_scatter the full input, all_to_all one rank's
total send, broadcast the tensor (modes.md section 1). A group of one rank is bypassed by every collective but the
broadcasts of the data. Counts are those of a whole run: all steps and micro-batches.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from types import CodeType
from typing import Any

from shardproof.parallel.communication.layout import axis_size
from shardproof.parallel.communication.schedules import ends_of_units, is_inside, recomputed_modules, stages
from shardproof.reference.case import Case

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "bool": 1}
ACTIVATION = "slice_tokens * hidden"
"""The elements of one whole activation on a context rank."""
MICRO_BATCHES, ONCE_A_STEP = "steps * micro", "steps"
"""How often calls are issued: in every micro-batch, or once a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteTerm:
    """A number of equal calls (`calls`) over the whole run, with the fields of the ledger.

    Every rank issues them, or the ranks at these places of the mesh (`at`). If they are `hidden`, a matrix product is
    computed between the issue of each and its wait. `elements` is the formula of the payload, `why` the reason.
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
    elements: str = field(default="", compare=False)
    why: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlace:
    """The place of a call: its module ("" for none) and the coordinates of the ranks that issue it (empty: all ranks).

    `values` are further names that a row's formulas may use.
    """

    module: str = ""
    at: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


Places = Callable[[Case], Iterable[CallPlace]]


@dataclass(frozen=True, slots=True)
class CallRow:
    """Calls of one kind; the first five fields are positional, so that rows read as the lines of a table.

    where     the module that issues the calls ("" for none), or a function from a case to places: one call at each
    phase     the phase, or several: "forward backward"
    op        the ledger's op; a reduction is a sum unless another word follows: "all_reduce max"
    elements  formula: elements of the payload
    why       what the call is for
    axis      mesh axis
    dtype     a dtype; "" is the case's, "loss" that of the loss, "gradients" that in which gradients are summed
    times     formula: calls over the whole run
    when      formula: whether there are any calls
    hidden    formula: whether a matrix product is computed between the issue of each call and its wait
    again     which recomputation repeats the call: "layer" of whole layers, "core" also that of the core, "" none
    alone     whether it is issued in a group of one rank, too
    """

    where: str | Places
    phase: str
    op: str
    elements: str
    why: str
    _: KW_ONLY
    axis: str = "tp"
    dtype: str = ""
    times: str = MICRO_BATCHES
    when: str = "True"
    hidden: str = "False"
    again: str = "layer"
    alone: bool = False


def in_modules(named: Callable[[Case], Iterable[str]]) -> Places:
    """The places of modules by name, each on the first pipeline stage that holds it."""

    def places(case: Case) -> Iterator[CallPlace]:
        every = stages(case)
        for name in named(case):
            yield CallPlace(module=name, at=next(stage for stage in every if stage.holds(name)).at)

    return places


def _stages(case: Case) -> Iterator[CallPlace]:
    for stage in stages(case):
        yield CallPlace(at=stage.at, values={"first": stage.first, "last": stage.last})


STAGES: Places = _stages
"""A place for every pipeline stage, with the values `first` and `last`."""


def terms(case: Case, rows: Iterable[CallRow]) -> Iterator[CompleteTerm]:
    """The terms that rows state for a case."""
    repeated, sizes = _Repeated(case), _group_sizes(case)
    for row in rows:
        group_size = sizes[row.axis]
        if group_size == 1 and not row.alone:
            continue
        for place in _places(case, row.where):
            names = _Names(case, group_size, place.values)
            if not names[row.when]:
                continue
            for phase in row.phase.split():
                term = _term(row, phase, place, names)
                yield term
                if repeated(row, term):
                    yield replace(term, phase="recompute")


def _places(case: Case, where: str | Places) -> Iterable[CallPlace]:
    if callable(where):
        return where(case)
    return in_modules(lambda _: [where])(case) if where else [CallPlace()]


def _term(row: CallRow, phase: str, place: CallPlace, names: "_Names") -> CompleteTerm:
    case, (op, _, reduce_op) = names.case, row.op.partition(" ")
    dtype = {"": case.dtype, "loss": loss_dtype(case), "gradients": gradient_dtype(case)}.get(row.dtype, row.dtype)
    return CompleteTerm(
        phase=phase,
        region=place.module,
        op=op,
        reduce_op=reduce_op or ("sum" if op in ("all_reduce", "reduce_scatter") else ""),
        axis=row.axis,
        group_size=names.ranks,
        dtype=dtype,
        payload_bytes=names[row.elements] * ITEM_BYTES[dtype],
        calls=names[row.times],
        hidden=bool(names[row.hidden]),
        at=place.at,
        elements=row.elements,
        why=row.why,
    )


class _Names:
    """Values of names in formulas: of the place, else `ranks` (the axis's size) or `max`, else of the case."""

    def __init__(self, case: Case, ranks: int, values: Mapping[str, Any]) -> None:
        self.case, self.ranks, self._values = case, ranks, {"max": max, "ranks": ranks, **values}

    def __getitem__(self, formula: str) -> Any:
        code, names = _compile(formula)
        return eval(code, {"__builtins__": {}}, {name: self._value(name) for name in names})

    def _value(self, name: str) -> Any:
        return self._values[name] if name in self._values else getattr(self.case, name)


@functools.cache
def _compile(formula: str) -> tuple[CodeType, tuple[str, ...]]:
    code = compile(formula, "<formula of a row>", "eval")
    return code, code.co_names


class _Repeated:
    """The forward calls that backward repeats (`recompute`): those of recomputed layers.

    With `early_stop` the end of a unit is not repeated, unless a dropout or a feature behind it needs it in backward.
    """

    def __init__(self, case: Case) -> None:
        layers = recomputed_modules(case)
        self._again = {"": (), "layer": layers, "core": tuple(case.blocks) if case.core_again else layers}
        followed = case.dropout or case.layer_shapes
        ends = ends_of_units(case) if case.early_stop and not followed else frozenset[int]()
        self._left_out = {f"layers.{layer}.mlp.w2" for layer in ends}

    def __call__(self, row: CallRow, term: CompleteTerm) -> bool:
        inside = is_inside(term.region, self._again[row.again])
        return term.phase == "forward" and inside and term.region not in self._left_out


def _group_sizes(case: Case) -> dict[str, int]:
    """The number of ranks along every axis of the case, and of two further groups: the ends of a pipeline, and the
    ranks that save a checkpoint.
    """
    sizes = {axis: axis_size(case, axis) for axis in case.axis_sizes}
    return {**sizes, "embedding": 2, "checkpoint": case.world_size}


def loss_dtype(case: Case) -> str:
    """Dtype of the loss and of the collectives inside it."""
    return "float64" if case.dtype == "float64" else "float32"


def gradient_dtype(case: Case) -> str:
    """Dtype in which gradients are added up and summed over ranks."""
    return case.dtype if case.grad_dtype != "float32" else "float32"
