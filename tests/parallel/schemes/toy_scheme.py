"""A scheme in one file: InternEvo's mtp, and once a step a heartbeat, one number summed over tp."""

import dataclasses

import torch

from shardproof.parallel.communication.collectives import all_reduce
from shardproof.parallel.communication.expectation import ONCE_A_STEP, CallRow
from shardproof.parallel.model.strategy import Rank, Step
from shardproof.parallel.schemes.tensor import MTP
from shardproof.reference.case import Case


def _heartbeat(rank: Rank) -> None:
    all_reduce(torch.ones((), dtype=torch.float64, device=rank.device), rank.mesh.axis("tp"))


def _step(_case: Case, step: Step) -> Step:
    return dataclasses.replace(step, reductions={**step.reductions, "heartbeat": _heartbeat})


HEARTBEAT = CallRow("", "grad_sync", "all_reduce", "1", "a heartbeat", dtype="float64", times=ONCE_A_STEP)
TOY = dataclasses.replace(MTP, name="toy", step=_step, rows=(*MTP.rows, HEARTBEAT))
