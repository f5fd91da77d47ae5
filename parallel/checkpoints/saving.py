"""A checkpoint of all ranks, saved by them together.

After the last step, once every rank has written, all ranks learn whether one has failed (`SAVING`). Rank 0 commits when
no rank has failed. Replicas are equal by then, or a check of the run fails; the first rank of each group of them
writes.
"""

from functools import lru_cache, partial
from pathlib import Path

import torch

from shardproof.parallel.checkpoints.state import (
    MOMENTS,
    RANKS,
    SCALE,
    STEPS,
    CheckpointError,
    ranks_of,
    rng_keys,
    trained,
    writes,
)
from shardproof.parallel.communication.collectives import all_reduce
from shardproof.parallel.communication.expectation import CallRow
from shardproof.parallel.communication.layout import Box, whole
from shardproof.parallel.model.strategy import Rank
from shardproof.reference.case import Case
from shardproof.reference.checkpoints.whole import tensors
from shardproof.reference.model.parameters import shapes
from shardproof.reference.training.states import kept

_FAILED = "has a rank failed?"
SAVING = CallRow(
    "", "checkpoint", "all_reduce max", "1", _FAILED, axis="checkpoint", dtype="int64", times="1", when="save"
)


def save(rank: Rank, optimizer: torch.optim.Optimizer, folder: Path, *, steps: int) -> None:
    """Write the state after this number of steps in place of a former checkpoint; every rank must call this.

    Raises CheckpointError on every rank when one of them cannot write, or when their parts do not tile every tensor.
    """
    from shardproof.parallel.checkpoints.folder import commit, write_part  # noqa: PLC0415  (takes a second to import)

    problem = ""
    try:
        write_part(folder, rank.mesh.rank, _boxes(rank, optimizer, steps))
    except (OSError, CheckpointError) as error:
        problem = str(error)
    failed = torch.tensor([int(bool(problem))], device=rank.device)
    if rank.case.world_size > 1:
        failed = all_reduce(failed, rank.mesh.axis("checkpoint"), op="max")
    if failed.item():
        what = f"cannot be written ({problem or 'another rank has failed'})"
        raise CheckpointError(folder, what, "a folder that every rank can write to")
    if rank.mesh.rank == 0:
        commit(folder, rank.case.world_size)


def read_again(case: Case) -> dict[str, tuple[Box, ...]]:
    """Boxes of the checkpoint that the case has saved, as saved/<name> of an outcome, by torch's own loader."""
    names, last = {STEPS: "steps", SCALE: "loss_scale"}, case.steps - 1
    for name in shapes(case):
        names |= {f"model.{name}": f"param/{name}", f"optimizer.state.{name}.step": f"step_after/{last}/{name}"}
        for moment in MOMENTS if kept(case) else ():
            names[f"optimizer.state.{name}.{moment}"] = f"{moment}_after/{last}/{name}"
    saved = tensors(case.save, "save")
    return {f"saved/{name}": (whole(saved[key]),) for key, name in names.items() if key in saved}


def _boxes(rank: Rank, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, tuple[Box, ...]]:
    """Everything that this rank writes."""
    case, mine = rank.case, rank.mesh.rank
    first = lru_cache(partial(writes, case, mine))
    states = {name: optimizer.state.get(tensor, {}) for name, tensor in rank.updated.items()}
    found = {
        target.key: target.boxes(target.local.detach(), rank.mesh.coordinates)
        for target in trained(rank, states)
        if first(target.axes)
    }
    states_of = rank.dropout.streams.state_dict()
    own = {key: states_of[stream] for stream, key in rng_keys(rank).items()}
    if mine == 0:
        own |= {STEPS: torch.tensor(steps, device="cpu"), RANKS: ranks_of(case)}
        own |= {} if rank.step.loss_scale is None else {SCALE: rank.step.loss_scale.state}
    return found | {key: (whole(tensor),) for key, tensor in own.items()}
