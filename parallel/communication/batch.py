"""How a micro-batch reaches the ranks of one data rank.

    delivery=tensors  the tp group's first rank reads, then one broadcast a tensor, in a group of one too
    delivery=flat     the first rank reads, then two broadcasts: the sizes, int64 [5 * keys] (up to four dims a key, a 0
                      ends them), and all keys end to end as one int64 tensor
    delivery=local    every rank reads its own; no call

A pipeline stage is sent keys in this order (Megatron-Core get_batch_on_this_tp_rank, around.md 12.1):

    stage                       keys                                                bytes, T = rows * length
    the only one                tokens labels loss_mask attention_mask positions    28T and the mask
    the first                   tokens attention_mask positions                     16T and the mask
    the last                    labels loss_mask attention_mask                     12T and the mask
    any other stage             none                                                0
    with prediction layers      as the only one

A stage that is sent no positions counts them itself, and one that is sent no mask uses causal attention. A mask is rows
* length**2 booleans. Prediction layers embed tokens, so their stage is sent all keys. Rows are sent whole: a context
rank slices what arrived.

Under `flat` all keys share the dtype int64: the loss mask travels as its float32 bits, the attention mask as 0 and 1.
An attention mask is true where a token must not be seen. Packed rows get theirs from `cu_seqlens`, locally. Source:
Megatron-Core `get_batch_on_this_tp_rank` and `broadcast_data` (modes.md 4.4).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardproof.parallel.communication.collectives import broadcast
from shardproof.parallel.communication.expectation import CallPlace, CallRow, Places
from shardproof.parallel.communication.layout import Axis, Mesh
from shardproof.parallel.communication.schedules import Stage, stages
from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch, micro_batch

Form = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""
SIZES_PER_KEY = 5
"""Numbers that describe one key's shape in `flat`: up to four dims and a closing 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A micro-batch as it lies on this rank; `attention_mask` is None for plain causal attention.

    `draw` is its step and its number on the data rank. `ahead` are copies for prediction layers, whose tokens, labels,
    mask and positions are those 1, 2, .. places ahead. Tokens, labels and mask that a stage is not sent are empty.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    attention_mask: Tensor | None = None
    draw: tuple[int, int] = (0, 0)
    ahead: "tuple[Delivered, ...]" = ()


def deliver(
    case: Case, mesh: Mesh, step: int, micro: int, device: torch.device, stage: Stage | None = None
) -> Delivered:
    """The micro-batch of this rank's data rank: all of it with delivery=local, else what this stage is sent."""
    reads = case.delivery == "local" or mesh.axis("tp").rank == 0
    batch = micro_batch(case, step, micro, mesh.axis("dp").rank) if reads else None
    if case.delivery == "local":
        assert batch is not None  # every rank reads
        delivered = _local(batch, device)
    else:
        forms, keys = forms_sent(case, stage), None if batch is None else _keys(case, batch, device)
        sent = None if keys is None else {key: keys[key].to(device) for key in forms}
        arrived = (_by_tensor if case.delivery == "tensors" else _flat)(forms, sent, mesh.axis("tp"), device)
        nothing = torch.empty((0, 0), dtype=torch.int64, device=device)
        counted = torch.arange(case.seq, device=device).expand(case.batch, case.seq)
        missing = {"tokens": nothing, "labels": nothing, "loss_mask": nothing, "positions": counted}
        held: dict[str, Any] = {**missing, **arrived}
        delivered = Delivered(**held)
    return replace(delivered, draw=(step, micro))


def hidden_pairs(length: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Bool [1, 1, S, S], true where a token (row) must not see another (column): a later one, or another sentence's."""
    index = torch.arange(length, device=device)
    hidden = index[:, None] < index[None, :]
    if cu_seqlens is not None:
        sentence = torch.bucketize(index, cu_seqlens.to(device), right=True)
        hidden = hidden | (sentence[:, None] != sentence[None, :])
    return hidden[None, None]


def _local(batch: Batch, device: torch.device) -> Delivered:
    packed = batch.cu_seqlens is not None
    return Delivered(
        tokens=batch.tokens.to(device),
        labels=batch.labels.to(device),
        loss_mask=batch.loss_mask.to(device),
        positions=batch.positions.to(device),
        attention_mask=hidden_pairs(batch.tokens.shape[1], batch.cu_seqlens, device) if packed else None,
    )


def forms_sent(case: Case, stage: Stage | None = None) -> dict[str, Form]:
    """Dtype and shape of every key that a stage is sent, in the order of sending; None stands for the only stage."""
    first, last = (True, True) if stage is None else (stage.first, stage.last)
    return sent_to_stage(
        case.batch, case.seq, first=first, last=last, mask=case.attention_mask, prediction=last and case.embeds_behind
    )


def sent_to_stage(
    rows: int, length: int, *, first: bool, last: bool, mask: bool, prediction: bool = False
) -> dict[str, Form]:
    """Key -> its dtype and shape, of `rows` sequences of `length` tokens, in the order of sending.

    A single stage is both `first` and `last`. With `prediction` the stage has prediction layers, with `mask` the data
    have attention masks.
    """
    begins, ends = first or prediction, last or prediction
    forms: dict[str, tuple[bool, Form]] = {
        "tokens": (begins, ("int64", (rows, length))),
        "labels": (ends, ("int64", (rows, length))),
        "loss_mask": (ends, ("float32", (rows, length))),
        "attention_mask": (mask and (begins or ends), ("bool", (rows, 1, length, length))),
        "positions": (begins, ("int64", (rows, length))),
    }
    return {key: form for key, (sent, form) in forms.items() if sent}


def _keys(case: Case, batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """All tensors that the first rank may send."""
    keys = {"tokens": batch.tokens, "labels": batch.labels, "loss_mask": batch.loss_mask}
    if case.attention_mask:
        rows, length = batch.tokens.shape
        keys["attention_mask"] = hidden_pairs(length, None, device).expand(rows, 1, length, length)
    return keys | {"positions": batch.positions}


def _by_tensor(
    forms: Mapping[str, Form], sent: Mapping[str, Tensor] | None, axis: Axis, device: torch.device
) -> dict[str, Tensor]:
    """Broadcast each key by itself."""
    arrived = {}
    for key, (dtype, shape) in forms.items():
        # Zeros, not uninitialised memory: what does not arrive is then wrong the same way in every run.
        tensor = torch.zeros(shape, dtype=getattr(torch, dtype), device=device) if sent is None else sent[key]
        arrived[key] = broadcast(tensor, axis)
    return arrived


def _flat(
    forms: Mapping[str, Form], sent: Mapping[str, Tensor] | None, axis: Axis, device: torch.device
) -> dict[str, Tensor]:
    """Sizes, then everything: receivers learn the shapes from the first call alone."""
    names = list(forms)
    if not names:
        return {}
    sizes = torch.zeros(SIZES_PER_KEY * len(names), dtype=torch.int64, device=device)
    if sent is not None:
        for place, key in enumerate(names):
            shape = torch.tensor(sent[key].shape, dtype=torch.int64, device=device)
            sizes[place * SIZES_PER_KEY :][: len(shape)] = shape
    shapes = _read_shapes(broadcast(sizes, axis), [shape for _, shape in forms.values()])
    lengths = [torch.Size(shape).numel() for shape in shapes]
    if sent is None:
        flat = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
    else:
        flat = torch.cat([_as_int64(sent[key]) for key in names])
    parts = broadcast(flat, axis).split(lengths)
    return {
        key: _from_int64(part, getattr(torch, forms[key][0])).view(shape)
        for key, part, shape in zip(names, parts, shapes, strict=True)
    }


def _read_shapes(sizes: Tensor, known: Sequence[Sequence[int]]) -> list[list[int]]:
    """The shapes of all keys, read from what arrived; on the meta device nothing arrives, and the known ones hold."""
    if sizes.is_meta:
        return [list(shape) for shape in known]
    return [row[: row.index(0)] for row in sizes.view(-1, SIZES_PER_KEY).tolist()]


def _as_int64(x: Tensor) -> Tensor:
    """All elements as int64, float32 by its bits."""
    flat = x.contiguous().view(-1)
    return (flat.view(torch.int32) if flat.dtype == torch.float32 else flat).to(torch.int64)


def _from_int64(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_as_int64`."""
    return flat.to(torch.int32).view(torch.float32) if dtype == torch.float32 else flat.to(dtype)


def _keys_sent(case: Case) -> Iterator[CallPlace]:
    """Every key of every stage."""
    for stage in stages(case):
        for key in forms_sent(case, stage):
            yield CallPlace(at=stage.at, values={"key": key})


def _stages_sent(case: Case) -> Iterator[CallPlace]:
    """Every stage that is sent anything, with the number of its keys and of all their elements."""
    for stage in stages(case):
        if forms := forms_sent(case, stage):
            elements = sum(math.prod(shape) for _, shape in forms.values())
            yield CallPlace(at=stage.at, values={"keys": len(forms), "elements": elements})


def _broadcast_row(elements: str, why: str, when: str, *, where: Places = _keys_sent, dtype: str = "int64") -> CallRow:
    return CallRow(where, "data", "broadcast", elements, why, dtype=dtype, when=when, alone=True)


DELIVERY = (
    _broadcast_row(
        "tokens", "tokens, labels, positions", 'delivery == "tensors" and key in ("tokens", "labels", "positions")'
    ),
    _broadcast_row("tokens", "the loss mask", 'delivery == "tensors" and key == "loss_mask"', dtype="float32"),
    _broadcast_row(
        "batch * seq**2", "the attention mask", 'delivery == "tensors" and key == "attention_mask"', dtype="bool"
    ),
    _broadcast_row(f"{SIZES_PER_KEY} * keys", "shapes of all tensors", 'delivery == "flat"', where=_stages_sent),
    _broadcast_row("elements", "all tensors end to end", 'delivery == "flat"', where=_stages_sent),
)
"""The broadcasts of `deliver`."""
