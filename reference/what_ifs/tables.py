"""What-ifs of the ends of the model: rows of the embedding, the two uses of a tied table, the loss over the vocabulary.

Letters: B rows, S tokens, H hidden, V vocabulary, p parts of a padded table.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch
from shardproof.reference.losses.cross_entropy import IGNORED, counted
from shardproof.reference.training.activations import observe
from shardproof.reference.training.steps import train
from shardproof.reference.what_ifs.what_if import Dense, Experiment, WhatIf

_Readings = Iterator[tuple[str, Mapping[str, Tensor]]]


def parts_of(case: Case) -> list[int]:
    """Into how many parts a mesh axis may split a table."""
    return sorted({case.tp, case.wp} - {1})


_LookUp = Callable[..., Tensor]
"""Ids [B, S], table=[V, H] and count=rows or number of parts -> rows [B, S, H]."""


def with_positions(dense: Dense, look_up: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The embedding's output: rows of all data ranks with their positions."""
    found = []
    for batch in dense.first_batches:
        x_BSH = look_up(batch.tokens)
        learned = dense.case.positions == "learned"
        found.append(x_BSH + dense.weights["embedding.positions.weight"][batch.positions] if learned else x_BSH)
    return {"act/embedding": torch.cat(found)}


def _looked_up(look_up: _LookUp, *, by_rows: bool) -> Experiment:
    """The embedding's output when every part looks up rows otherwise, or when columns are gathered otherwise."""

    def experiment(dense: Dense) -> _Readings:
        case, table = dense.case, dense.weights["embedding.tokens.weight"]
        table = torch.cat([table, table.new_zeros(case.padded_vocab - len(table), table.shape[1])])
        for parts in parts_of(case):
            applies = case.embedding == "vocab" and len(table) % parts == 0 if by_rows else case.hidden % parts == 0
            count = len(table) // parts if by_rows else parts
            if applies:
                yield str(parts), with_positions(dense, partial(look_up, table=table, count=count))

    return experiment


def _foreign(ids: Tensor, /, table: Tensor, count: int) -> Tensor:
    """Every part adds its first row for ids that lie in another one."""
    firsts = table[::count]
    return table[ids] + firsts.sum(0) - firsts[ids // count]


def _late(ids: Tensor, /, table: Tensor, count: int) -> Tensor:
    """Every part but the first begins one id early, and so gives the next row."""
    following = torch.cat([table[1:], torch.zeros_like(table[:1])])
    own, next_own = ids < count, (ids >= count - 1) & (ids < len(table) - 1)
    return table[ids] * own[..., None] + following[ids] * next_own[..., None]


def _flat(ids: Tensor, /, table: Tensor, count: int) -> Tensor:
    """Columns gathered one part behind the other in memory."""
    return torch.stack(table[ids].chunk(count, -1)).reshape(*ids.shape, -1)


flat_columns = _looked_up(_flat, by_rows=False)
"""The embedding's output whose columns lie one part behind the other in memory."""


def _tied_uses(combined: Callable[[Tensor, Tensor], Mapping[str, Tensor]]) -> Experiment:
    """The gradient of a tied table of the gradients of its two uses: lookup and head."""

    def experiment(dense: Dense) -> _Readings:
        if dense.case.tied:
            name = "embedding.tokens.weight"
            untied = dense.case.but(tied=False, steps=1, variant="")
            apart = train(untied, dense.weights | {"head.weight": dense.weights[name]})
            for reading, gradient in combined(apart[f"grad/{name}"], apart["grad/head.weight"]).items():
                yield reading, {f"grad/{name}": gradient}

    return experiment


def _own_labels(dense: Dense) -> _Readings:
    """The logits' gradient when a part of the vocabulary gets one for its own labels alone."""
    case = dense.case
    labels = torch.cat([batch.labels for batch in dense.first_batches])
    for parts in parts_of(case):
        columns = case.padded_vocab // parts
        place = torch.arange(case.vocab, device=dense.device) // columns
        mine = labels.where(labels != IGNORED, -columns)[..., None] // columns == place
        yield str(parts), {"act_grad/head": observe(case, dense.weights)["act_grad/head"] * mine}


_Loss = Callable[[Case, Tensor, Batch], Mapping[str, tuple[Tensor, Tensor]]]
"""Case, logits [B, S, V] and batch -> reading -> loss and weight of every token [B, S]."""


def _loss(losses: _Loss, *, counts: bool = False) -> Experiment:
    """The loss of the first step under another rule of which tokens and classes count; `counts`: and their number."""

    def experiment(dense: Dense) -> _Readings:
        total: dict[str, Tensor] = {}
        tokens: dict[str, Tensor] = {}
        for logits, batch in zip(dense.logits, dense.batches, strict=True):
            for reading, (loss, weight) in losses(dense.case, logits, batch).items():
                total[reading] = total.get(reading, 0) + (loss * weight).sum()
                tokens[reading] = tokens.get(reading, 0) + weight.sum()
        for reading, summed in total.items():
            values = {"loss/0": summed / tokens[reading]}
            yield reading, values | ({"tokens/0": tokens[reading]} if counts else {})

    return experiment


def _counted(batch: Batch) -> Tensor:
    return counted(batch.labels, batch.loss_mask.double())


def _of_rows(case: Case, logits: Tensor, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
    right = _counted(batch)
    loss = _cross_entropy(logits, batch.labels, case.label_smoothing, case.vocab)
    return {"rows": (loss, right / right.sum(-1, keepdim=True).clamp(min=1))}


def _of_all(case: Case, logits: Tensor, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
    loss = _cross_entropy(logits, batch.labels, case.label_smoothing, case.vocab)
    return {"": (loss, batch.loss_mask.double())}


def _of_padding(case: Case, logits: Tensor, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
    if case.padded_vocab == case.vocab:
        return {}
    padding = logits.new_zeros(*logits.shape[:-1], case.padded_vocab - case.vocab)
    loss = _cross_entropy(logits, batch.labels, case.label_smoothing, case.vocab, padding)
    return {"": (loss, _counted(batch))}


def _unsmoothed(case: Case, logits: Tensor, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
    right = _counted(batch)
    return {"": (_cross_entropy(logits, batch.labels, 0.0, case.vocab), right)} if case.label_smoothing else {}


def _smoothed_over_all(case: Case, logits: Tensor, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
    smoothing, vocab, right = case.label_smoothing, case.vocab, _counted(batch)
    if not smoothing:
        return {}
    spreads = {"label": (smoothing * (vocab - 1) / vocab, vocab), "count": (smoothing, vocab + 1)}
    spreads |= {"padding": (smoothing, case.padded_vocab)} if case.padded_vocab > vocab else {}
    return {reading: (_cross_entropy(logits, batch.labels, *spread), right) for reading, spread in spreads.items()}


def _smoothed_by_part(case: Case, logits: Tensor, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
    smoothing, right = case.label_smoothing, _counted(batch)
    classes = {str(parts): case.padded_vocab // parts for parts in parts_of(case) if smoothing}
    return {part: (_cross_entropy(logits, batch.labels, smoothing, own), right) for part, own in classes.items()}


def _cross_entropy(
    logits_BSV: Tensor, labels_BS: Tensor, smoothing: float, classes: int, padding: Tensor | None = None
) -> Tensor:
    """The loss of every token whose smoothing is spread over this many classes; without a label nothing is subtracted.

    Written as programs with a split vocabulary do, from logits less their maximum.
    """
    every = logits_BSV if padding is None else torch.cat([logits_BSV, padding], -1)
    largest = every.amax(-1, keepdim=True)
    known, x_BSV = labels_BS != IGNORED, logits_BSV - largest
    hit_BS = x_BSV.gather(-1, labels_BS.where(known, 0)[..., None])[..., 0].where(known, 0)
    spread = smoothing / (classes - 1)
    return (every - largest).exp().sum(-1).log() - (1 - smoothing - spread) * hit_BS - spread * x_BSV.sum(-1)


WHAT_IFS = (
    WhatIf(
        "foreign_rows",
        "when every part of a split table adds a row for tokens that lie elsewhere: they are not masked",
        _looked_up(_foreign, by_rows=True),
    ),
    WhatIf(
        "rows_late",
        "when all parts of a split table but the first look up the next row: a range off by one",
        _looked_up(_late, by_rows=True),
    ),
    WhatIf(
        "tied_part",
        "when the tied weight gets the gradient of one of its two uses alone",
        _tied_uses(lambda lookup, head: {"head": lookup, "embedding": head}),
    ),
    WhatIf(
        "tied_twice",
        "when the gradient of one of the tied weight's two uses counts twice",
        _tied_uses(lambda lookup, head: {"head": lookup + 2 * head, "embedding": 2 * lookup + head}),
    ),
    WhatIf("own_labels", "when each part of the vocabulary gives a gradient for its own labels alone", _own_labels),
    WhatIf("local_count", "when every row has a mean of its own", _loss(_of_rows)),
    WhatIf("ignored_learned", "when tokens without a label count", _loss(_of_all, counts=True)),
    WhatIf("padding_counted", "when padded columns of the vocabulary take part in the softmax", _loss(_of_padding)),
    WhatIf("smoothing_missing", "without label smoothing", _loss(_unsmoothed)),
    WhatIf(
        "smoothing_over_all",
        "when label smoothing is spread over all classes, the label's own or padding among them",
        _loss(_smoothed_over_all),
        names_readings=True,
    ),
    WhatIf(
        "smoothing_by_part",
        "when label smoothing is spread over the classes of one part of the vocabulary",
        _loss(_smoothed_by_part),
    ),
)
