"""Which count of targets the losses of data ranks and micro-batches are divided by, told by gradients.

A loss is a mean over targets, of which some are ignored. The gradient of what the last module returned is zero where a
target is ignored, and is divided by the count of the others: of the whole step where that is right, of a data rank or
a micro-batch alone where each has a mean of its own. Loss and gradients are then means of means, wrong wherever counts
differ, and right by no common factor.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardproof.harness.parity.modules import Compared, rows_of_output, sources_of, tensors_of_rank
from shardproof.harness.parity.samples import Source
from shardproof.harness.verdicts.facts import Fact, state_fact

_KIND = "output_grad"
_CLOSE = 1e-3
"""Factors are alike within this share: counts that are less than a thousand are told apart."""
_LEFT = 1e-2
"""A gradient is a multiple of another one when it leaves less than this share of itself."""


def find_own_counts(both: Compared) -> Fact | None:
    """What each loss is divided by where it is its own count of targets, not that of the step; None for any other."""
    found = _factors(both)
    factors = torch.tensor([factor for factor, _ in found.values()], dtype=torch.float64)
    counts = torch.tensor([count for _, count in found.values()], dtype=torch.float64)
    if len(found) < 2 or _are_alike(factors):
        return None
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for (rank, _), own in found.items():
        by_rank.setdefault(rank, []).append(own)
    if max(map(len, by_rank.values())) > 1 and _are_alike(factors * counts):
        return state_fact("micro_batch_tokens")
    sums = [(own[0][0] * sum(count for _, count in own), [factor for factor, _ in own]) for own in by_rank.values()]
    inside = all(_are_alike(torch.tensor(factors)) for _, factors in sums)
    return state_fact("own_tokens") if inside and _are_alike(torch.tensor([total for total, _ in sums])) else None


def count_targets(both: Compared, losses: int) -> dict[int, list[int]]:
    """By data rank, how many targets count in each of its micro-batches; empty where that is unknown of some losses."""
    found: dict[int, list[int]] = {}
    for (rank, _), (_, count) in sorted(_factors(both).items()):
        found.setdefault(rank, []).append(count)
    return found if sum(map(len, found.values())) == losses else {}


def _factors(both: Compared) -> Mapping[tuple[int, int], tuple[float, int]]:
    """(data rank, micro-batch) -> its gradient in units of the first launch's, and the targets that count in it.

    The gradient is of the first output, from the loss on, that all of them have; empty where it is no multiple.
    """
    paths = dict.fromkeys(row.name for _, row in both.first.rows(_KIND, 0) if row.name)
    ranks = {rank: tensors_of_rank(both, _KIND, rank) for rank in range(both.second.world_size)}
    with_samples = {rank: own for rank, own in ranks.items() if sources_of(both, rank)}
    for path in paths:
        mine = [rank.tensor(row) for rank, row in both.first.rows(_KIND, 0) if row.name == path]
        holding = {rank: own[path] for rank, own in with_samples.items() if path in own}
        whole = len(mine) == len(both.samples.rows)
        if not holding or not whole or any(len(own) != len(sources_of(both, rank)) for rank, own in holding.items()):
            continue
        parts = [rows_of_output(own, rows) for own, rows in zip(mine, both.samples.rows, strict=True)]
        found = {}
        for rank, own in holding.items():
            for call, (output, places) in enumerate(zip(own, sources_of(both, rank), strict=True)):
                rows = rows_of_output(output, len(places))
                found[rank, call] = _factor(rows, [_find_row(parts, place) for place in places])
        return {key: one for key, one in found.items() if one} if all(found.values()) else {}
    return {}


def _find_row(parts: Sequence[Sequence[Tensor] | None], place: Source | None) -> Tensor | None:
    """The gradient of a row of the first launch, by micro-batch and row."""
    rows = parts[place[0]] if place is not None else None
    return rows[place[1]] if rows is not None and place is not None else None


def _factor(rows: Sequence[Tensor] | None, true: Sequence[Tensor | None]) -> tuple[float, int] | None:
    known = [row for row in true if row is not None]
    if not rows or len(known) != len(rows) or any(a.shape != b.shape for a, b in zip(rows, known, strict=True)):
        return None
    mine, theirs = torch.stack(list(known)).double(), torch.stack(list(rows)).double()
    square, counted = float(mine.square().sum()), int(mine.flatten(0, -2).any(-1).sum())
    factor = float((theirs * mine).sum()) / square if square else 0.0
    return (
        (factor, counted) if factor and float((theirs - factor * mine).norm()) <= _LEFT * float(theirs.norm()) else None
    )


def _are_alike(values: Tensor) -> bool:
    return bool((values - values.mean()).abs().max() <= _CLOSE * values.abs().max())
