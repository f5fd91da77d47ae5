"""What-ifs of the metric: its sums over the run when some micro-batches or steps are left out.

Names `metric/<name>` as in `reference.model.metric`.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch
from shardproof.reference.model import decoder, metric
from shardproof.reference.training.steps import train
from shardproof.reference.what_ifs.what_if import Dense, WhatIf

_READINGS: Mapping[str, tuple[slice, slice]] = {
    "last": (slice(None), slice(-1, None)),
    "first": (slice(None), slice(0, 1)),
    "last_step": (slice(-1, None), slice(None)),
    "first_step": (slice(0, 1), slice(None)),
    "newest": (slice(-1, None), slice(-1, None)),
    "oldest": (slice(0, 1), slice(0, 1)),
}
"""Reading -> which steps and which of their micro-batches are in the sums."""


def metrics(dense: Dense) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """The metric of some micro-batches alone; nothing without one, or when the states of all steps are too large."""
    case, weights = dense.case, dense.weights
    outcome = train(case, weights) if case.metric else {}
    if not case.metric or any(
        f"param_after/{step}/{name}" not in outcome for step in range(case.steps - 1) for name in weights
    ):
        return
    grid: list[list[list[metric.Totals]]] = []  # [steps][dp][micro]
    for step in range(case.steps):
        now = weights if step == 0 else {name: outcome[f"param_after/{step - 1}/{name}"] for name in weights}
        grid.append([[_of_one(case, now, step, m, rank) for m in range(case.micro)] for rank in range(case.dp)])
    for reading, (steps, micros) in _READINGS.items():
        rows = [[one for step in grid[steps] for one in step[rank][micros]] for rank in range(case.dp)]
        by_rank = [{name: torch.stack([one[name] for one in row]).sum(0) for name in row[0]} for row in rows]
        yield reading, metric.outcome(by_rank, exact=case.dtype == "float64")


def _of_one(case: Case, weights: Mapping[str, Tensor], step: int, micro: int, rank: int) -> metric.Totals:
    device = next(iter(weights.values())).device
    batch = micro_batch(case, step, micro, rank, device=device)
    return metric.totals(decoder.logits(case, weights, batch), batch.labels, batch.loss_mask)


_METRIC = frozenset({"metric"})
WHAT_IFS = (
    WhatIf("micro_missing", "of some micro-batches or steps alone", metrics, explains=_METRIC, names_readings=True),
)
