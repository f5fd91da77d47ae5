"""What-ifs of context slices: their tokens taken for other places of the row, or their labels shifted inside of them.

Context rank r of c holds the chunks r and 2c-1-r of 2c (zigzag) or chunk r of c (contiguous) of every row. A token has
a place in the row, one in its slice, and one in all slices end to end. A gather or an exchange leaves tokens in this
last order, that of the ranks. Sources: around.md 12.2, 14.2 and 19 (cp-contiguous-rope); torchtitan #792, #2780.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch
from shardproof.reference.data.packing import IGNORED
from shardproof.reference.model import layers
from shardproof.reference.training.steps import Feed
from shardproof.reference.what_ifs.data import first_step, read_with
from shardproof.reference.what_ifs.what_if import ACTIVATIONS, WhatIf, both, by_attention, by_places

_Attention = Callable[..., Tensor]


def masks(case: Case) -> dict[str, _Attention]:
    """Reading -> attention whose mask takes queries or keys of the slices for other places; {} without slices."""
    if not case.sliced:
        return {}
    row, own, gathered = _places(case)
    readings = {
        "mask_by_places_in_the_slice": (own, own),
        "mask_in_the_order_of_the_ranks": (gathered, gathered),
        "keys_in_the_order_of_the_ranks": (row, gathered),
        "queries_by_places_in_the_slice": (own, row),
        "queries_by_places_in_the_slice_keys_in_the_order_of_the_ranks": (own, gathered),
    }
    return {reading: partial(_masked, *places) for reading, places in readings.items()}


def other_positions(case: Case) -> dict[str, Feed]:
    """Reading -> data whose tokens have positions of other places of their row."""
    if not case.sliced:
        return {}
    _, own, gathered = _places(case)
    readings = {"in_the_slice": own, "in_the_order_of_the_ranks": gathered}
    if case.cp_slices != "zigzag":
        readings["of_zigzag_slices"] = torch.cat(_places_of_slices(case.but(cp_slices="zigzag")))

    def at(places: Tensor) -> Feed:
        return read_with(positions=lambda _case, batch: batch.positions[:, places.to(batch.positions.device)])

    return {f"positions_{reading}": at(places) for reading, places in readings.items()}


def other_labels(case: Case) -> dict[str, Feed]:
    """Reading -> data whose labels are the next tokens in a slice; its last one keeps its own, has none or the first.

    Tokens without a label stay so.
    """
    if not case.sliced:
        return {}
    slices = _places_of_slices(case)
    return {f"last_{last}": read_with(labels=partial(_shifted, slices, last)) for last in _LAST}


def _places_of_slices(case: Case) -> list[Tensor]:
    """The places in the row of every context rank's tokens, in the order in which it holds them."""
    return [torch.cat([torch.arange(run.start, run.stop) for run in runs]) for runs in case.slices]


def _places(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token of a row: its place there, in its slice, and in all slices end to end."""
    slices = _places_of_slices(case)
    back = torch.cat(slices).argsort()
    own = torch.cat([torch.arange(len(one)) for one in slices])
    return torch.arange(len(back)), own[back], back


def _masked(
    queries: Tensor, keys: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor
) -> Tensor:
    where = visible.device
    return layers.attention(q, k, v, visible[queries.to(where)[:, None], keys.to(where)], *factors)


_LAST: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kept": lambda tokens, labels: labels[:, -1:],
    "without_one": lambda tokens, labels: torch.full_like(labels[:, -1:], IGNORED),
    "the_first_token": lambda tokens, labels: tokens[:, :1],
}
"""Reading -> the label of a slice's last token from (tokens, labels [B, s]), [B, 1]."""


def _shifted(slices: list[Tensor], last: str, _case: Case, batch: Batch) -> Tensor:
    labels = batch.labels.clone()
    for own in (places.to(labels.device) for places in slices):
        tokens, mine = batch.tokens[:, own], batch.labels[:, own]
        following = torch.cat((tokens[:, 1:], _LAST[last](tokens, mine)), 1)
        labels[:, own] = following.where(mine != IGNORED, mine)
    return labels


WHAT_IFS = (
    WhatIf(
        "slice_places",
        "when tokens of a context rank's slice are taken for other places of the row",
        both(by_attention(masks), by_places(other_positions)),
        explains=ACTIVATIONS,
        names_readings=True,
    ),
    WhatIf(
        "slice_labels",
        "when labels are shifted inside of every context rank's slice",
        lambda dense: ((last, first_step(dense, feed)) for last, feed in other_labels(dense.case).items()),
        names_readings=True,
    ),
)
