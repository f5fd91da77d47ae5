"""Micro-batches as their tokens see them some places further on, and how many of these tokens count.

A token and the one `places` further on are of one document where their positions differ by as many. Positions restart
in every document of a packed row, and count on through a row that is one. Rows are moved whole, before context ranks
take their slices, so that no rank needs tokens of a neighbour.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from parallel.communication.batch import Delivered
from parallel.communication.collectives import all_reduce
from parallel.communication.expectation import ONCE_A_STEP, CallPlace, CallRow
from parallel.layers.loss import IGNORED, counted
from parallel.model.strategy import Rank
from parallel.schedules.stages import stages
from reference.case import Case
from reference.data.batches import micro_batch


def moved(batch: Delivered, places: int) -> Delivered:
    """Every token, label and position from `depth` places on in its document, and the mask of the label.

    Where the document has ended token and position are 0, the label is IGNORED and the mask 0.
    """
    inside = _ahead(batch.positions, places, filled=-1) == batch.positions + places

    def of(x_BS: Tensor, filled: int) -> Tensor:
        return _ahead(x_BS, places, filled).masked_fill(~inside, filled)

    return replace(
        batch,
        tokens=of(batch.tokens, 0),
        positions=of(batch.positions, 0),
        labels=of(batch.labels, IGNORED),
        loss_mask=of(batch.loss_mask, 0),
    )


def _ahead(x_BS: Tensor, places: int, filled: int) -> Tensor:
    return functional.pad(x_BS[:, places:], (0, places), value=filled)


def counts(rank: Rank, step: int) -> Tensor:
    """Tokens of a step that count, float64 [1 + depths], of the main loss and of every depth, on all data ranks.

    The ranks that read micro-batches read those of their data rank; the other ranks of tp receive them.
    """
    case, mesh = rank.case, rank.mesh
    total = torch.zeros(1 + case.prediction_depth, dtype=torch.float64, device=rank.device)
    reads = case.delivery == "local" or mesh.axis("tp").rank == 0
    for micro in range(case.micro) if reads else ():
        read = micro_batch(case, step, micro, mesh.axis("dp").rank, device=rank.device)
        whole = Delivered(tokens=read.tokens, labels=read.labels, loss_mask=read.loss_mask, positions=read.positions)
        every = (whole, *(moved(whole, depth + 1) for depth in range(case.prediction_depth)))
        total += torch.stack([counted(one.labels, one.loss_mask).sum() for one in every])
    if case.delivery != "local":
        total = all_reduce(total, mesh.axis("tp"))
    return all_reduce(total, mesh.axis("dp"))


def _last(case: Case) -> list[CallPlace]:
    return [CallPlace(at=stages(case)[-1].at)]


COUNTS = tuple(
    CallRow(
        _last,
        "data",
        "all_reduce",
        "1 + prediction_depth",
        "tokens of the step that count, of every depth",
        axis=axis,
        dtype="float64",
        times=ONCE_A_STEP,
        when=when,
    )
    for axis, when in (("tp", 'delivery != "local"'), ("dp", "True"))
)
"""The counts, before the first micro-batch of a step."""
