"""Our subject, found by its name as any other: `shardproof.parallel.subject:subject`; and the strategy of a case.

subject(case, device)                    outcome of this rank; torch.distributed is initialised
subject.modes                            the modes it claims
subject.refuses(case)                    why a case is not supported, "" when it is
subject.expected(case)                   the closed form, terms of one rank over the whole run
subject.beside(case)                     counts and calls of the system itself beside that, as (what, how much)
subject.pipeline(case)                   what the stages of its pipeline do in a step, and when
subject.activations(case, rank, module, local)
                                         a module's output (or the gradient in it) as boxes of `act/<module>`
subject.harmless(case, fault)            why this fault of a collective changes nothing, "" when it does

The strategy of a case is that of its mode, changed by every feature. Mode and features are found by name, and imported
for the first case that has them. A mode of `reference.language.core` is the file of `parallel.schemes` with its name,
or else it is in `parallel.schemes.tensor`. Its strategy has the mode's name in capitals: `TP_SP` for mode=tp-sp. A file
of `reference.features` is implemented by the module of its name, `parallel.NAME`, or `parallel.NAME.scheme` where that
is a folder. The module has `apply(strategy, case)`, and may have `AFTER`, the features that are applied before it. A
feature without such a module changes no strategy, and neither does a feature whose words have their default values.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardproof.bugs.anchors import change_sources
from shardproof.bugs.planting import plant_subject
from shardproof.parallel.checkpoints.saving import SAVING
from shardproof.parallel.communication.expectation import CallRow, CompleteTerm, terms
from shardproof.parallel.communication.layout import Box, Mesh, coordinates, pieces, rows
from shardproof.parallel.communication.schedules import stages_at
from shardproof.parallel.data_parallel.calls import bucket_rows, ledger_lines, megatron_beside, step_rows
from shardproof.parallel.layers.loss import metric_rows
from shardproof.parallel.model.strategy import Strategy, Value
from shardproof.parallel.pipeline import CasePipeline
from shardproof.parallel.training import train
from shardproof.reference.case import Case
from shardproof.reference.case.variants import VARIANTS
from shardproof.reference.features import FEATURES, module_in
from shardproof.reference.language.core import MODES
from shardproof.reference.language.words import declared_words, not_default

SCHEMES: dict[str, Strategy] = {}
"""Value of `mode=` -> its strategy before features change it; filled with the modes that were used so far."""
HERE = Path(__file__).parent
Applied = Callable[[Strategy, Case], Strategy]


def scheme_of(mode: str) -> Strategy:
    """The strategy of a mode."""
    if mode not in SCHEMES:
        name = mode.replace("-", "_")
        file = name if (HERE / "schemes" / f"{name}.py").exists() else "tensor"
        SCHEMES[mode] = getattr(_module(f"schemes.{file}"), name.upper())
    return SCHEMES[mode]


def _module(name: str) -> Any:
    return module_in(__package__, name, _import_here)


def _import_here(name: str) -> Any:
    """Import a module from here: in a copy of this package with a planted bug, the copy's own module."""
    return __import__(name, fromlist=["*"])


def _features(case: Case) -> Iterator[Applied]:
    """Changes of a strategy by the features of a case, in the order in which they are applied."""
    modules = {}
    for name, words in FEATURES.items():
        if any(not_default(words, case)):
            if (HERE / f"{name}.py").exists():
                modules[name] = _module(name)
            elif (HERE / name / "scheme.py").exists():
                modules[name] = _module(f"{name}.scheme")
    order = TopologicalSorter({name: getattr(module, "AFTER", ()) for name, module in modules.items()})
    yield from (modules[name].apply for name in order.static_order() if name in modules)


def strategy_of(case: Case) -> Strategy:
    """The strategy that a case's mode and features decide together."""
    return _compose(scheme_of(case.mode), case)


@lru_cache(maxsize=16)
def _compose(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the features of a case applied. It is cached, since every tensor needs it."""
    for apply in _features(case):
        strategy = apply(strategy, case)
    return strategy


def rows_of(case: Case) -> tuple[CallRow, ...]:
    """The closed form of a case: calls of its micro-batches and buckets, of a step, its metric and a checkpoint."""
    strategy = strategy_of(case)
    rows = strategy.rows
    if case.shares_gradients:
        rows += bucket_rows(strategy, case)
    rows += step_rows(strategy, case)
    if case.metric:
        rows += metric_rows(strategy.activation(case, "head"))
    if case.save:
        rows += (SAVING,)
    return rows


if TYPE_CHECKING:
    from shardproof.parallel.pipeline import CasePipeline

_SHIFTS = {("all_reduce", "max", "loss", 0), ("all_reduce", "max", "metric", 1)}
"""(op, reduce op, phase, number) of the maxima that are only subtracted. The metric's maximum number 0 is not among
them: it also decides which tokens are right.
"""

_PLANTING = threading.Lock()


def _with_variant(variant: str) -> Any:
    """The subject with a bug of `bugs/variants.txt`, planted in a second copy of this package.

    A process plants it once: ranks that are threads wait for the first of them.
    """
    with _PLANTING:
        return _plant(variant)


@cache
def _plant(variant: str) -> Any:
    return plant_subject(change_sources(variant, VARIANTS[variant].changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSubject:
    """The implementation under test, for every scheme."""

    only: tuple[str, ...] = ()
    """Only these modes; all of them if none is named."""

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that it claims."""
        return self.only or tuple(MODES)

    def __call__(self, case: Case, device: torch.device) -> dict[str, Value]:
        """Run the case on this rank. Raises ValueError with the reason for a case that it refuses."""
        reason = self.refuses(case)
        if reason:
            raise ValueError(reason)
        if case.variant:
            wrong: dict[str, Value] = _with_variant(case.variant)(case.but(variant=""), device)
            return wrong
        return train(case, strategy_of(case), Mesh.of(case), device)

    def refuses(self, case: Case) -> str:
        """Why this case is not supported, "" when it is."""
        if case.mode not in self.modes:
            return f"mode={case.mode}: is not offered here; legal: {' '.join(self.modes)}"
        return ""

    def features(self, case: Case) -> tuple[str, ...]:
        """The mode of a case, and every feature with a word that is not at its default."""
        own = (
            name
            for name, feature in FEATURES.items()
            if any(getattr(case, word) != field.default for word, field in declared_words(feature).items())
        )
        return (f"mode={case.mode}", *(name.replace("_", " ") for name in own))

    def expected(self, case: Case) -> Iterable[CompleteTerm]:
        """The calls of all ranks over the whole run of a case it does not refuse, variants left aside."""
        return tuple(terms(case, rows_of(case)))

    def beside(self, case: Case) -> Iterable[tuple[str, str]]:
        """Counts and calls of Megatron itself beside this closed form.

        There are none for modes of other systems, nor for several pipeline stages, whose ranks differ.
        """
        if MODES[case.mode].system != "Megatron-Core" or case.pipeline_axes:
            return ()
        every = self.expected(case)
        return (*megatron_beside(case, strategy_of(case).placements(case)), *ledger_lines(case, every))

    def pipeline(self, case: Case) -> "CasePipeline":
        """The pipeline of a case with several stages."""
        return CasePipeline(case=case)

    def activations(self, case: Case, rank: int, module: str, local: Tensor) -> tuple[Box, ...] | None:
        """The boxes of `act/<module>` [dp*batch, seq, width] (packed [dp, batch*seq, width]) that `local` holds.

        `local` is the module's output in the observed micro-batch (by default 0 of step 0), or its gradient. None when
        the module's output has no counterpart in the dense model.
        """
        if case.variant:
            wrong: tuple[Box, ...] | None = _with_variant(case.variant).activations(
                case.but(variant=""), rank, module, local
            )
            return wrong
        strategy = strategy_of(case)
        place = strategy.activation(case, module)
        at = coordinates(case, rank)
        if place is None or not any(stage.holds(module) for stage in stages_at(case, at)):
            return None
        boxes = pieces(strategy.laid_out(local).flatten(2), place, at)
        first = at["dp"][0] * place.shape[0]
        return rows(boxes, first=first, total=case.dp * place.shape[0])

    def harmless(self, case: Case, fault: Any) -> str:
        """Why this `harness.faults.Fault` changes no result; "" where it may.

        `exp(x - m) / sum exp(x - m)` is the same for any m that all ranks of the vocabulary's axis subtract, as long as
        nothing overflows.
        """
        target = fault.target
        maximum = (target.op, target.reduce_op, target.phase, target.number) in _SHIFTS
        own = case.axes.get(target.axis, ())
        together = all(any(set(ranks) <= set(other) for other in fault.groups) for ranks in own)
        alike = fault.rank < 0 and (fault.kind in {"op", "stale"} or (fault.kind == "group" and together))
        return "softmax is the same for any shift that all ranks subtract alike" if maximum and alike else ""


subject = ParallelSubject()
