"""What-ifs of the ends of the model: rows of the embedding, the two uses of a tied table, the loss over the vocabulary.

Keys as in `reference.what_ifs.inputs`. Letters: B rows, S tokens, H hidden, V vocabulary, p parts of a padded table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from reference.case import Case
from reference.data.batches import Batch, micro_batch
from reference.losses.cross_entropy import IGNORED, counted
from reference.model import decoder
from reference.training.activations import observe
from reference.training.steps import train

_Weights = dict[str, Tensor]


def _parts(case: Case) -> list[int]:
    """Into how many parts a mesh axis may split a table."""
    return sorted({case.tp, case.wp} - {1})


def embedded(case: Case, weights: _Weights, device: torch.device) -> dict[str, Tensor]:
    """The embedding's output when rows of its table are looked up, or gathered, otherwise."""
    found = {}
    batches = [micro_batch(case, 0, 0, data_rank, device=device) for data_rank in range(case.dp)]
    table = weights["embedding.tokens.weight"]
    table = torch.cat([table, table.new_zeros(case.padded_vocab - len(table), table.shape[1])])
    for parts in _parts(case):
        rows = len(table) // parts
        for word, looked_up in (("foreign_rows", _foreign), ("rows_late", _late)):
            if case.embedding == "vocab" and len(table) % parts == 0:
                found[f"{word}.{parts}/act/embedding"] = _laid(case, weights, batches, looked_up, table, rows)
        if case.hidden % parts == 0:
            found[f"flat_dim.{parts}/act/embedding"] = _laid(case, weights, batches, _flat, table, parts)
    return found


_LookUp = Callable[[Tensor, Tensor, int], Tensor]
"""Ids [B, S], table [V, H] and a count -> rows [B, S, H]."""


def _laid(case: Case, weights: _Weights, batches: list[Batch], looked_up: _LookUp, table: Tensor, count: int) -> Tensor:
    """Rows of all data ranks with their positions."""
    found = []
    for batch in batches:
        x_BSH = looked_up(batch.tokens, table, count)
        learned = case.positions == "learned"
        found.append(x_BSH + weights["embedding.positions.weight"][batch.positions] if learned else x_BSH)
    return torch.cat(found)


def _foreign(ids: Tensor, table: Tensor, rows: int) -> Tensor:
    """Every part adds its first row for ids that lie in another one."""
    firsts = table[::rows]
    return table[ids] + firsts.sum(0) - firsts[ids // rows]


def _late(ids: Tensor, table: Tensor, rows: int) -> Tensor:
    """Every part but the first begins one id early, and so gives the next row."""
    following = torch.cat([table[1:], torch.zeros_like(table[:1])])
    own, next_own = ids < rows, (ids >= rows - 1) & (ids < len(table) - 1)
    return table[ids] * own[..., None] + following[ids] * next_own[..., None]


def _flat(ids: Tensor, table: Tensor, parts: int) -> Tensor:
    """Columns gathered one part behind the other in memory."""
    return torch.stack(table[ids].chunk(parts, -1)).reshape(*ids.shape, -1)


def tied_uses(case: Case, weights: _Weights) -> dict[str, Tensor]:
    """The gradient of a tied table when one of its two uses does not count once."""
    if not case.tied:
        return {}
    apart = train(
        case.but(tied=False, steps=1, variant=""), weights | {"head.weight": weights["embedding.tokens.weight"]}
    )
    looked_up, head = apart["grad/embedding.tokens.weight"], apart["grad/head.weight"]
    readings = {
        "tied_part.head": looked_up,
        "tied_part.embedding": head,
        "tied_twice.head": looked_up + 2 * head,
        "tied_twice.embedding": 2 * looked_up + head,
    }
    return {f"{reading}/grad/embedding.tokens.weight": gradient for reading, gradient in readings.items()}


def own_labels(case: Case, weights: _Weights, device: torch.device) -> dict[str, Tensor]:
    """The logits' gradient when a part of the vocabulary gets one for its own labels alone."""
    if not _parts(case):
        return {}
    slope = observe(case, weights)["act_grad/head"]
    labels = torch.cat([micro_batch(case, 0, 0, data_rank, device=device).labels for data_rank in range(case.dp)])
    found = {}
    for parts in _parts(case):
        columns = case.padded_vocab // parts
        place = torch.arange(case.vocab, device=device) // columns
        mine = labels.where(labels != IGNORED, -columns)[..., None] // columns == place
        found[f"own_labels.{parts}/act_grad/head"] = slope * mine
    return found


def losses(case: Case, weights: _Weights, device: torch.device) -> dict[str, Tensor]:
    """The loss of the first step under other rules of which tokens and classes count, and how many tokens then do."""
    total: dict[str, Tensor] = {}
    tokens: dict[str, Tensor] = {}
    for data_rank in range(case.dp):
        for micro in range(case.micro):
            batch = micro_batch(case, 0, micro, data_rank, device=device)
            logits = decoder.logits(case, weights, batch)
            for word, loss, counts in _losses(case, logits, batch):
                total[word] = total.get(word, 0) + (loss * counts).sum()
                tokens[word] = tokens.get(word, 0) + counts.sum()
    found = {f"{word}/loss/0": total[word] / tokens[word] for word in total}
    return found | {"ignored_learned/tokens/0": tokens["ignored_learned"]}


def _losses(case: Case, logits_BSV: Tensor, batch: Batch) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What-if, loss and weight of every token [B, S]."""
    smoothing, vocab, mask = case.label_smoothing, case.vocab, batch.loss_mask.double()
    right = counted(batch.labels, mask)
    yield "local_count.rows", _cross_entropy(logits_BSV, batch.labels, smoothing, vocab), right / _of_row(right)
    yield "ignored_learned", _cross_entropy(logits_BSV, batch.labels, smoothing, vocab), mask
    if case.padded_vocab > vocab:
        padding = logits_BSV.new_zeros(*logits_BSV.shape[:-1], case.padded_vocab - vocab)
        yield "padding_counted", _cross_entropy(logits_BSV, batch.labels, smoothing, vocab, padding), right
    if smoothing:
        yield "smoothing_missing", _cross_entropy(logits_BSV, batch.labels, 0.0, vocab), right
        share = smoothing * (vocab - 1) / vocab
        yield "smoothing_over_all.label", _cross_entropy(logits_BSV, batch.labels, share, vocab), right
        yield "smoothing_over_all.count", _cross_entropy(logits_BSV, batch.labels, smoothing, vocab + 1), right
        if case.padded_vocab > vocab:
            padded = _cross_entropy(logits_BSV, batch.labels, smoothing, case.padded_vocab)
            yield "smoothing_over_all.padding", padded, right
        for parts in _parts(case):
            loss = _cross_entropy(logits_BSV, batch.labels, smoothing, case.padded_vocab // parts)
            yield f"smoothing_by_part.{parts}", loss, right


def _of_row(counts_BS: Tensor) -> Tensor:
    """Tokens that count in every row, as divisor."""
    return counts_BS.sum(-1, keepdim=True).clamp(min=1)


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
