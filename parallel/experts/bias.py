"""The bias with which experts are chosen: moved once a step, so that all get as many tokens, without a loss.

    once a step     | all_reduce int64 [layers of the rank, E] over tp_cp_dp: rows of all micro-batches

Rows are those that experts took, before any are filled up: padded ones are the same for all. They are integers, for
sums in the dtype of a model end at 256 (experts.md 21.2, X8). Every choice counts once, however often a layer is
computed. Source: arXiv:2408.15664; Megatron-Core 0.16.1 `_update_router_expert_bias`.
"""

from collections.abc import Iterator

import torch

from parallel.communication.collectives import all_reduce
from parallel.communication.expectation import ONCE_A_STEP, CallPlace, CallRow
from parallel.experts.block import blocks_of
from parallel.model.strategy import Rank
from parallel.schedules.stages import held_by_rank
from reference.case import Case


def _held(case: Case) -> Iterator[CallPlace]:
    for own in held_by_rank(case):
        layers = [block for block in case.layers_with_experts if any(stage.holds(block) for stage in own)]
        if layers:
            yield CallPlace(at=own[0].at, values={"layers_here": len(layers)})


BIASES = (
    CallRow(
        _held,
        "grad_sync",
        "all_reduce",
        "layers_here * experts",
        "rows of every expert in a step",
        axis="tp_cp_dp",
        dtype="int64",
        times=ONCE_A_STEP,
    ),
)
"""The rows of all ranks with other tokens."""


def move_biases(rank: Rank) -> None:
    """More for experts with fewer rows than the mean, less for those with more, the same step for all."""
    blocks = list(blocks_of(rank).values())
    if not blocks:
        return
    rows = torch.stack([torch.stack([one.sum((0, 1)) for one in block.chosen.values()]).sum(0) for block in blocks])
    for block, mine in zip(blocks, all_reduce(rows, rank.mesh.axis("tp_cp_dp")).double(), strict=True):
        block.router.bias += rank.case.bias_rate * (mine.mean() - mine).sign()
