"""What-ifs of the data: the first step when masks, labels, borders or positions are read otherwise, or data repeat."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch, micro_batch
from shardproof.reference.data.packing import IGNORED
from shardproof.reference.training.activations import observe
from shardproof.reference.training.steps import Feed, train
from shardproof.reference.what_ifs.what_if import ACTIVATIONS, Dense, Experiment, WhatIf, both, by_places

_NEXT_TO_NOTHING = 1e-7
"""A learning rate by this much smaller leaves the weights of every step as good as the first ones."""


def by_data(**feeds: Feed) -> Experiment:
    """The first step's outcome and activations with data read so; the feed `_` is the only reading."""
    return lambda dense: ((reading.strip("_"), first_step(dense, feed)) for reading, feed in feeds.items())


def first_step(dense: Dense, feed: Feed) -> dict[str, Tensor]:
    """The outcome of the first step and its activations, without parameters after it."""
    outcome = train(dense.case.but(steps=1), dense.weights, feed=feed) | observe(dense.case, dense.weights, feed=feed)
    return {name: tensor for name, tensor in outcome.items() if not name.startswith("param/")}


def _where(applies: Callable[[Case], bool], experiment: Experiment) -> Experiment:
    """The experiment where it makes a difference in a case."""
    return lambda dense: experiment(dense) if applies(dense.case) else ()


def read_with(**fields: Callable[[Case, Batch], Tensor | None]) -> Feed:
    """Data of which these fields are others: each a function of the case and what is read."""

    def feed(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        batch = micro_batch(case, step, micro, dp_rank, device=device)
        changed: dict[str, Any] = {field: change(case, batch) for field, change in fields.items()}
        return dataclasses.replace(batch, **changed)

    return feed


def _first(what: str) -> Feed:
    """The data of the first "step", "micro" or "dp_rank" everywhere, with the masks of dropout of each place."""

    def feed(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        place = {"step": step, "micro": micro, "dp_rank": dp_rank, what: 0}
        return dataclasses.replace(
            micro_batch(case, **place, device=device), step=step, number=micro * case.dp + dp_rank
        )

    return feed


def _padding_drawn(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
    return micro_batch(case, step, micro, dp_rank, device=device, padding=0)


def _labels_shifted(_case: Case, batch: Batch) -> Tensor:
    return torch.cat((batch.labels[:, 1:], torch.full_like(batch.labels[:, :1], IGNORED)), 1)


def _positions_restart(case: Case, batch: Batch) -> Tensor:
    return batch.positions[:, : batch.positions.shape[1] // case.tp].repeat(1, case.tp)


def _restarts(case: Case) -> bool:
    return case.tp > 1 and micro_batch(case, 0, 0, 0).positions.shape[1] % case.tp == 0


def _learned_positions_missing(dense: Dense) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    if dense.case.positions == "learned":
        table = "embedding.positions.weight"
        weights = dense.weights | {table: torch.zeros_like(dense.weights[table])}
        yield "table", observe(dense.case, weights, gradients=False)


def _shifted_positions(case: Case) -> dict[str, Feed]:
    """Every token at a place later by a fixed shift, the last ones at the last place."""

    def shifted(by: int) -> Feed:
        return read_with(positions=lambda case, batch: (batch.positions + by).clamp(0, case.seq - 1))

    return {str(by): shifted(by) for by in (1, 2, -1)} if case.positions == "learned" else {}


def _second_step(dense: Dense, feed: Feed, lr: float) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """The second step's logits and loss."""
    case = dense.case
    if case.steps > 1:
        outcome = train(case.but(steps=2, lr=lr), dense.weights, feed=feed)
        yield "", {name: outcome[name] for name in ("logits/1", "loss/1") if name in outcome}


WHAT_IFS = (
    WhatIf(
        "mask_ignored",
        "without the loss mask: tokens count that are masked",
        by_data(_=read_with(loss_mask=lambda _case, batch: torch.ones_like(batch.loss_mask))),
    ),
    WhatIf(
        "padding_learned",
        "when tokens that are not to be learned get the label 0",
        by_data(
            _=read_with(labels=lambda _case, batch: batch.labels.masked_fill(batch.labels == IGNORED, 0)),
            drawn=_padding_drawn,
        ),
    ),
    WhatIf(
        "labels_unshifted",
        "when every token is its own label: labels are not shifted by one",
        by_data(_=read_with(labels=lambda _case, batch: batch.tokens.masked_fill(batch.labels == IGNORED, IGNORED))),
    ),
    WhatIf(
        "labels_shifted_twice",
        "when labels are shifted once more",
        by_data(
            cut=read_with(labels=_labels_shifted),
            rolled=read_with(labels=lambda _case, batch: batch.labels.roll(-1, 1)),
        ),
    ),
    WhatIf(
        "batch_repeated",
        "when every step reads the data of the first",
        lambda dense: _second_step(dense, _first("step"), dense.case.lr),
    ),
    WhatIf(
        "data_rank_repeated",
        "when every data rank reads the data of the first",
        _where(lambda case: case.dp > 1, by_data(_=_first("dp_rank"))),
    ),
    WhatIf(
        "micro_repeated",
        "when every micro-batch is the first one",
        _where(lambda case: case.micro > 1, by_data(_=_first("micro"))),
    ),
    WhatIf(
        "borders_ignored",
        "when packed sentences have no borders: tokens see other sentences",
        _where(
            lambda case: micro_batch(case, 0, 0, 0).cu_seqlens is not None,
            by_data(_=read_with(cu_seqlens=lambda _case, _batch: None)),
        ),
    ),
    WhatIf(
        "positions_missing",
        "when every token stands at place 0: positions are not applied",
        # a rotation by no angle, a table whose first row alone is read; or no table
        both(
            by_data(_=read_with(positions=lambda _case, batch: torch.zeros_like(batch.positions))),
            _learned_positions_missing,
        ),
    ),
    WhatIf(
        "positions_restart",
        "when positions begin anew in every rank's part of a sequence",
        _where(_restarts, by_data(_=read_with(positions=_positions_restart))),
    ),
    WhatIf(
        "positions_shifted",
        "when positions are some places too large or too small",
        by_places(_shifted_positions),
        explains=ACTIVATIONS,
        names_readings=True,
    ),
    WhatIf(
        "never_updated",
        "with the weights of the first step in every step: what steps is not what computes",
        lambda dense: _second_step(dense, micro_batch, dense.case.lr * _NEXT_TO_NOTHING),
    ),
)
