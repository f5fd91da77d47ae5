"""The strategy of a case: that of its mode, changed by every feature.

Modes have one line each here, and their words in `reference.language.modes`. Features have none: what a file of
`reference.features` declares is implemented by the module of the same name, `parallel.NAME`, or `parallel.NAME.scheme`
where that is a folder. It has `applied(strategy, case)`, which gives the strategy back for a case without its words,
and may have `AFTER`, the features that are applied before it. A feature without such a module changes no strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from types import ModuleType

from parallel.checkpoints.saving import SAVING
from parallel.communication.expectation import CallRow
from parallel.data_parallel.calls import step_rows
from parallel.layers.metric import metric_rows
from parallel.model.strategy import Strategy
from parallel.schemes.autotp import AUTOTP
from parallel.schemes.fsp import FSP
from parallel.schemes.isp import ISP
from parallel.schemes.msp import MSP
from parallel.schemes.mtp import MTP
from parallel.schemes.tp import TP
from parallel.schemes.tp_sp import TP_SP
from reference.case import Case
from reference.features import FEATURES

MODES: dict[str, Strategy] = {mode.name: mode for mode in (TP, TP_SP, MTP, MSP, FSP, ISP, AUTOTP)}
"""Value of `mode=` -> the strategy that the other schemes build on."""
HERE = Path(__file__).parent
Applied = Callable[[Strategy, Case], Strategy]


def _modules() -> Iterator[tuple[str, ModuleType]]:
    """The module of every feature that has one."""
    for name in FEATURES:
        if (HERE / f"{name}.py").exists():
            yield name, import_module(f"parallel.{name}")
        elif (HERE / name / "scheme.py").exists():
            yield name, import_module(f"parallel.{name}.scheme")


def _features() -> dict[str, Applied]:
    modules = dict(_modules())
    order = TopologicalSorter({name: getattr(module, "AFTER", ()) for name, module in modules.items()})
    return {name: modules[name].applied for name in order.static_order() if name in modules}


APPLIED: dict[str, Applied] = _features()
"""Feature -> what it changes of a strategy, in the order in which they are applied."""


def strategy_of(case: Case) -> Strategy:
    """What mode and features of this case decide together."""
    return _composed(MODES[case.mode], case)


@lru_cache(maxsize=16)
def _composed(strategy: Strategy, case: Case) -> Strategy:
    """Apply the features of a case, once: every tensor needs them."""
    for applied in APPLIED.values():
        strategy = applied(strategy, case)
    return strategy


def rows_of(case: Case) -> tuple[CallRow, ...]:
    """The closed form of a case: the calls of its micro-batches, of a step, of its metric and of a checkpoint."""
    strategy = strategy_of(case)
    return (*strategy.rows, *step_rows(strategy, case), *metric_rows(strategy.activation(case, "head")), SAVING)
