"""What-ifs of the dense model, for diagnoses: what it computes of data or weights that are read otherwise.

An outcome that equals a what-if shows which rule was not kept. Keys are "<what if>/<name>"; several readings of one
what-if differ behind a dot, "fused_cut.qkv/...". All arithmetic is in float64.
Letters: K kv groups of G query heads, D head dim, p parts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from reference.case import Case
from reference.data.batches import Batch, micro_batch
from reference.data.packing import IGNORED
from reference.model.given import takes_given
from reference.model.parameters import full, shapes
from reference.training.activations import observe
from reference.training.steps import Feed, train
from reference.what_ifs.attention import exchanged
from reference.what_ifs.edges import edges
from reference.what_ifs.slices import other_labels
from reference.what_ifs.tables import embedded, losses, own_labels, tied_uses

_NEXT_TO_NOTHING = 1e-7
"""A learning rate by this much smaller leaves the weights of every step as good as the first ones."""

_Weights = dict[str, Tensor]


@takes_given
def alternatives(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The outcome and activations if data or weights were read otherwise, of the first step.

    `batch_repeated` and `never_updated` show in the second one; weights that are read otherwise in activations alone.
    """
    found: dict[str, Tensor] = {}
    weights = weights_of(case, device)
    for word, feed in _feeds(case).items():
        outcome = train(case.but(steps=1), weights, feed=feed) | observe(case, weights, feed=feed)
        found |= {f"{word}/{name}": tensor for name, tensor in outcome.items() if not name.startswith("param/")}
    if case.steps > 1:
        again = train(case.but(steps=2), weights, feed=_first_step)
        still = train(case.but(steps=2, lr=case.lr * _NEXT_TO_NOTHING), weights)
        for word, outcome in (("batch_repeated", again), ("never_updated", still)):
            found |= {f"{word}/{name}": outcome[name] for name in ("logits/1", "loss/1") if name in outcome}
    for word, changed in _readings(case, weights).items():
        found |= {f"{word}/{name}": tensor for name, tensor in observe(case, changed).items()}
    found |= exchanged(case, weights) | own_labels(case, weights, device)
    found |= edges(case, weights, device)
    return found | embedded(case, weights, device) | tied_uses(case, weights) | losses(case, weights, device)


def weights_of(case: Case, device: torch.device) -> _Weights:
    """The full weights before the first step."""
    return {name: full(case, name).to(device, torch.float64) for name in shapes(case)}


_Change = Callable[[Case, Batch], Batch | None]


def _feeds(case: Case) -> dict[str, Feed]:
    """What-if -> the data read that way, for those that make a difference in this case."""
    batch = micro_batch(case, 0, 0, 0)
    found = {word: _reading(change) for word, change in _CHANGES.items() if change(case, batch) is not None}
    found["padding_learned.drawn"] = _padding_drawn
    found["labels_shifted_twice.cut"] = _reading(_labels_shifted)
    found["labels_shifted_twice.rolled"] = _reading(_labels_rolled)
    if case.dp > 1:
        found["data_rank_repeated"] = _first_data_rank
    if case.micro > 1:
        found["micro_repeated"] = _first_micro
    return found | other_labels(case)


def _reading(change: _Change) -> Feed:
    def feed(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        batch = micro_batch(case, step, micro, dp_rank, device=device)
        return change(case, batch) or batch

    return feed


def _first_step(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
    return _at(step, micro * case.dp + dp_rank, micro_batch(case, 0, micro, dp_rank, device=device))


def _first_data_rank(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
    return _at(step, micro * case.dp + dp_rank, micro_batch(case, step, micro, 0, device=device))


def _first_micro(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
    return _at(step, micro * case.dp + dp_rank, micro_batch(case, step, 0, dp_rank, device=device))


def _at(step: int, number: int, batch: Batch) -> Batch:
    """These data in another place, with the masks of dropout that belong there."""
    return dataclasses.replace(batch, step=step, number=number)


def _padding_drawn(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
    return micro_batch(case, step, micro, dp_rank, device=device, padding=0)


def _mask_ignored(case: Case, batch: Batch) -> Batch:
    return dataclasses.replace(batch, loss_mask=torch.ones_like(batch.loss_mask))


def _padding_learned(case: Case, batch: Batch) -> Batch:
    return dataclasses.replace(batch, labels=batch.labels.masked_fill(batch.labels == IGNORED, 0))


def _labels_unshifted(case: Case, batch: Batch) -> Batch:
    return dataclasses.replace(batch, labels=batch.tokens.masked_fill(batch.labels == IGNORED, IGNORED))


def _labels_rolled(case: Case, batch: Batch) -> Batch:
    return dataclasses.replace(batch, labels=batch.labels.roll(-1, 1))


def _labels_shifted(case: Case, batch: Batch) -> Batch:
    end = torch.full_like(batch.labels[:, :1], IGNORED)
    return dataclasses.replace(batch, labels=torch.cat((batch.labels[:, 1:], end), 1))


def _borders_ignored(case: Case, batch: Batch) -> Batch | None:
    return None if batch.cu_seqlens is None else dataclasses.replace(batch, cu_seqlens=None)


def _positions_missing(case: Case, batch: Batch) -> Batch:
    """Every token at place 0: a rotation by no angle, a table whose first row alone is read."""
    return dataclasses.replace(batch, positions=torch.zeros_like(batch.positions))


def _positions_restart(case: Case, batch: Batch) -> Batch | None:
    length = batch.positions.shape[1]
    if case.tp == 1 or length % case.tp:
        return None
    return dataclasses.replace(batch, positions=batch.positions[:, : length // case.tp].repeat(1, case.tp))


_CHANGES: Mapping[str, _Change] = {
    "mask_ignored": _mask_ignored,
    "padding_learned": _padding_learned,
    "labels_unshifted": _labels_unshifted,
    "borders_ignored": _borders_ignored,
    "positions_missing": _positions_missing,
    "positions_restart": _positions_restart,
}
"""What-if -> the micro-batch read that way; None where it makes no difference."""


def _readings(case: Case, weights: _Weights) -> dict[str, _Weights]:
    """What-if -> the weights whose fused rows are taken for another arrangement."""
    found = {}
    if case.layers > 1:
        found["stale.layer"] = {name: weights.get(_layer_before(name), own) for name, own in weights.items()}
    if not case.fuse_qkv:
        found["kv_exchanged"] = _exchanged_names(weights, "wk", "wv")
    if not case.fuse_mlp and case.activation == "swiglu":
        found["gate_exchanged"] = _exchanged_names(weights, "w1", "w3")
    if case.fuse_qkv:
        found["kv_exchanged"] = _rows(weights, "wqkv", partial(_exchanged_kv, case))
        for part in {1, case.tp} if case.kv_heads > 1 and case.kv_heads % case.tp == 0 else {1}:
            found[f"fused_cut.qkv{part}"] = _rows(weights, "wqkv", partial(_as_blocks, case, part))
    if case.fuse_mlp:
        found["gate_exchanged"] = _rows(weights, "w13", lambda w: torch.cat(w.chunk(2)[::-1]))
        if case.tp > 1:
            found["fused_cut.w13"] = _rows(weights, "w13", partial(_as_one, case.tp))
    return found


def _layer_before(name: str) -> str:
    """Name of this parameter in the layer before; of the first layer, and outside of layers, itself."""
    return re.sub(r"^layers\.(\d+)", lambda found: f"layers.{max(0, int(found[1]) - 1)}", name)


def _exchanged_names(weights: _Weights, one: str, other: str) -> _Weights:
    """The weights with these two modules of every layer exchanged."""
    names = {one: other, other: one}
    return {n: weights[re.sub(rf"\.({one}|{other})\.", lambda found: f".{names[found[1]]}.", n)] for n in weights}


def _rows(weights: _Weights, leaf: str, change: Callable[[Tensor], Tensor]) -> _Weights:
    """The weights with the rows of every module of this name changed, of its bias too."""
    return {name: change(w) if f".{leaf}." in name else w for name, w in weights.items()}


def _grouped(case: Case, rows: Tensor) -> Tensor:
    """Rows of a fused projection as [K, G + 2, D, ...]: a group's queries, its key, its value."""
    grouped: Tensor = rows.unflatten(0, (case.kv_heads, case.heads // case.kv_heads + 2, -1))
    return grouped


def _exchanged_kv(case: Case, rows: Tensor) -> Tensor:
    order = [*range(case.heads // case.kv_heads), -1, -2]
    return _grouped(case, rows)[:, order].flatten(0, 2)


def _as_blocks(case: Case, parts: int, rows: Tensor) -> Tensor:
    """Rows that give, cut by groups, what each part gives when it is cut into all q, all k and all v."""
    group, groups = case.heads // case.kv_heads, case.kv_heads // parts
    taken = []
    for part in _grouped(case, rows).flatten(0, 1).chunk(parts):
        q, k, v = part.split([group * groups, groups, groups])
        taken.append(torch.cat([q.unflatten(0, (groups, group)), k[:, None], v[:, None]], 1))
    return torch.cat(taken).flatten(0, 2)


def _as_one(parts: int, rows: Tensor) -> Tensor:
    """Rows that give, cut into gate and up, what parts of the whole give that are each cut into gate and up."""
    pieces = rows.chunk(2 * parts)
    return torch.cat([*pieces[0::2], *pieces[1::2]])
