"""The strategy of a case: that of its mode, changed by every feature.

Mode and features are found by name, and imported for the first case that has them. A mode of `reference.language.core`
is the file of `parallel.schemes` with its name, or else one of the table of `parallel.schemes.tensor`. The strategy
there is called like it: `TP_SP` for mode=tp-sp. A file of `reference.features` is implemented by the module of its
name, `parallel.NAME`, or `parallel.NAME.scheme` where that is a folder. The module has `apply(strategy, case)`, and
may have `AFTER`, the features that are applied before it. A feature without such a module changes no strategy, and
neither does one that a case has no word of.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from shardproof.parallel.checkpoints.saving import SAVING
from shardproof.parallel.communication.expectation import CallRow
from shardproof.parallel.data_parallel.calls import bucket_rows, step_rows
from shardproof.parallel.layers.loss import metric_rows
from shardproof.parallel.model.strategy import Strategy
from shardproof.reference.case import Case
from shardproof.reference.features import FEATURES, module_in
from shardproof.reference.language.words import not_default

SCHEMES: dict[str, Strategy] = {}
"""Value of `mode=` -> the strategy that the other schemes build on, of the modes that were used so far."""
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
    """The statement's own function: in a copy with a planted bug it imports of the copy."""
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
    """Strategy that mode and features of this case decide together."""
    return _compose(scheme_of(case.mode), case)


@lru_cache(maxsize=16)
def _compose(strategy: Strategy, case: Case) -> Strategy:
    """Apply the features of a case, once: every tensor needs them."""
    for apply in _features(case):
        strategy = apply(strategy, case)
    return strategy


def rows_of(case: Case) -> tuple[CallRow, ...]:
    """The closed form of a case: the calls of its micro-batches, of a step, of its metric and of a checkpoint."""
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
