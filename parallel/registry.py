"""The schemes by name, one line each; the strategy of a case is the composition of those that it names.

What their words are and which of them go together stands in `reference.case.modes` and `reference.case.schemes`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from parallel.checkpoints.saving import SAVING
from parallel.communication.expectation import CallRow
from parallel.context.scheme import with_context
from parallel.data_parallel.calls import step_rows
from parallel.data_parallel.parity import with_parity
from parallel.data_parallel.scheme import with_data_parallelism
from parallel.layers.metric import metric_rows
from parallel.model.strategy import Strategy
from parallel.pipeline.scheme import with_pipeline
from parallel.schemes.autotp import AUTOTP
from parallel.schemes.fsp import FSP
from parallel.schemes.isp import ISP
from parallel.schemes.msp import MSP
from parallel.schemes.mtp import MTP
from parallel.schemes.tp import TP
from parallel.schemes.tp_sp import TP_SP
from reference.case import Case

__all__ = ["COMPOSED", "MODES", "rows_of", "strategy_of"]

MODES: dict[str, Strategy] = {mode.name: mode for mode in (TP, TP_SP, MTP, MSP, FSP, ISP, AUTOTP)}
"""Value of `mode=` -> the strategy that the other schemes build on."""
COMPOSED: dict[str, Callable[[Strategy, Case], Strategy]] = {
    "context parallelism": with_context,
    "pipeline parallelism": with_pipeline,
    "data parallelism": with_data_parallelism,
    "replica parity": with_parity,
}
"""Other schemes in the order in which they are applied; each leaves a case alone that has none of its words."""


def strategy_of(case: Case) -> Strategy:
    """What the schemes of this case decide together: its mode, then each of the others."""
    return _composed(MODES[case.mode], case)


@lru_cache(maxsize=16)
def _composed(strategy: Strategy, case: Case) -> Strategy:
    """Compose the schemes of a case, once: every tensor needs them."""
    for composed in COMPOSED.values():
        strategy = composed(strategy, case)
    return strategy


def rows_of(case: Case) -> tuple[CallRow, ...]:
    """The closed form of a case: the calls of its micro-batches, of a step, of its metric and of a checkpoint."""
    strategy = strategy_of(case)
    return (*strategy.rows, *step_rows(strategy, case), *metric_rows(strategy.activation(case, "head")), SAVING)
