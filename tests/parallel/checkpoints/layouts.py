"""A model for the tests of checkpoints, and ranks that save and load it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardproof.parallel.checkpoints.saving import load, save
from shardproof.parallel.communication.layout import Mesh
from shardproof.parallel.model.strategy import Rank
from shardproof.parallel.subject import strategy_of, subject
from shardproof.parallel.training import set_up
from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import stored_tensors
from tests.parallel.ranks import CPU, on_ranks

MODEL = "layers=2 heads=12 kv_heads=6 hidden=48 ffn=42 vocab=389 seq=24 batch=2 lr=0.1"


def begun(case: Case) -> tuple[Rank, torch.optim.Optimizer]:
    """This rank of a case before its first step."""
    rank = set_up(case, strategy_of(case), Mesh.of(case), CPU)
    return rank, rank.step.optimizer(rank)


def relaid(case: Case, source: Path, target: Path) -> None:
    """Load a checkpoint into the ranks of this case, and save it again."""

    def program(_: int) -> None:
        rank, optimizer = begun(case.but(save=str(target)))
        save(rank, optimizer, target, steps=load(rank, optimizer, source))

    on_ranks(case.world_size, program)


def trained(case: Case) -> list[dict[str, Any]]:
    """The outcomes of all ranks."""
    return on_ranks(case.world_size, lambda _: subject(case, CPU))


def full_tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint by torch's own loader, without those that belong to the layout."""
    found = stored_tensors(Case.of(load=str(folder)))
    return {key: tensor for key, tensor in found.items() if key != "train.ranks"}
