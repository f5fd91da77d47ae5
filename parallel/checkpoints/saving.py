"""A checkpoint of all ranks: saved by them together, and loaded into the ranks of any layout.

Every rank writes its part after the last step. Then all ranks learn whether one of them has failed, and if none has,
rank 0 commits. Of ranks that hold the same tensor only the first writes it; the copies are equal, or the check
`replicas` fails.

`load` reads into new tensors beside the old state. They are filled with NaN first, which shows elements that were not
read. The old state is replaced only when the checkpoint is whole and has exactly this model's tensors; an error leaves
it as it was. Loading needs no communication.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardproof.parallel.checkpoints.state import (
    MOMENTS,
    RANKS,
    SCALE,
    STEPS,
    CheckpointError,
    StateTensor,
    dtype_word,
    keys,
    optimizer_tensors,
    ranks_of,
    rng_keys,
    working_copies,
    writes,
)
from shardproof.parallel.communication.collectives import all_reduce
from shardproof.parallel.communication.expectation import CallRow
from shardproof.parallel.communication.layout import Box, whole_box
from shardproof.parallel.model.strategy import Rank
from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import is_foreign
from shardproof.reference.checkpoints.foreign import stored_tensors as reference_stored
from shardproof.reference.checkpoints.torch_format import read_tensors
from shardproof.reference.errors import CaseError
from shardproof.reference.model.parameters import shapes
from shardproof.reference.training.steps import holds_states

if TYPE_CHECKING:
    from shardproof.parallel.checkpoints.folder import Stored, Weights


_FAILED = "has a rank failed?"
SAVING = CallRow(
    "", "checkpoint", "all_reduce max", "1", _FAILED, axis="checkpoint", dtype="int64", times="1", when="save"
)


def save(rank: Rank, optimizer: torch.optim.Optimizer, folder: Path, *, steps: int) -> None:
    """Write the state after this number of steps, replacing an earlier checkpoint; every rank must call this.

    Raises CheckpointError on every rank when one of them cannot write, and on rank 0 when the parts do not tile every
    tensor.
    """
    from shardproof.parallel.checkpoints.folder import commit, write_part  # noqa: PLC0415  (DTensor)

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
    """The tensors of the checkpoint that the case has saved, read by torch's own loader: saved/<name> of an outcome."""
    names, last = {STEPS: "steps", SCALE: "loss_scale"}, case.steps - 1
    for name in shapes(case):
        names |= {f"model.{name}": f"param/{name}", f"optimizer.state.{name}.step": f"step_after/{last}/{name}"}
        for moment in MOMENTS if holds_states(case) else ():
            names[f"optimizer.state.{name}.{moment}"] = f"{moment}_after/{last}/{name}"
    saved = read_tensors(case.save, "save")
    return {f"saved/{name}": (whole_box(saved[key]),) for key, name in names.items() if key in saved}


def _boxes(rank: Rank, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, tuple[Box, ...]]:
    """Everything that this rank writes."""
    case, mine = rank.case, rank.mesh.rank
    first = lru_cache(partial(writes, case, mine))
    states = {name: optimizer.state.get(tensor, {}) for name, tensor in rank.updated.items()}
    found = {
        target.key: target.boxes(target.local.detach(), rank.mesh.coordinates)
        for target in optimizer_tensors(rank, states)
        if first(target.axes)
    }
    states_of = rank.dropout.streams.state_dict()
    own = {key: states_of[stream] for stream, key in rng_keys(rank).items()}
    if mine == 0:
        own |= {STEPS: torch.tensor(steps, device="cpu"), RANKS: ranks_of(case)}
        own |= {} if rank.step.loss_scale is None else {SCALE: rank.step.loss_scale.state}
    return found | {key: (whole_box(tensor),) for key, tensor in own.items()}


def load(rank: Rank, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Replace parameters, states of the optimizer and the loss scale; returns the steps that were run before.

    On the layout that saved the checkpoint, the states of the random number streams are replaced too. Raises
    CheckpointError, and changes nothing, for a checkpoint that is missing, torn, or of another model or training.
    """
    from shardproof.parallel.checkpoints.folder import Stored, Weights  # noqa: PLC0415  (DTensor)

    foreign = is_foreign(folder)
    stored = Weights(folder=folder, held=_weights(rank, folder)) if foreign else Stored.open(folder)
    tensors = stored.tensors
    has_states = any(key.startswith("optimizer.") for key in tensors)
    # The optimizer has no states if all steps were skipped, and in weights of another system.
    needs_states = rank.case.optimizer == "adamw" and (has_states or (rank.case.scaler == "none" and not foreign))
    shapes = {name: place.shape for name, place in rank.strategy.placements(rank.case).items()}
    wanted = keys(rank.case, shapes, states=needs_states)
    _check_keys(stored, {key: shape for key, shape in wanted.items() if not foreign or _is_foreign_key(key)})
    states = {name: _states_of(tensor) for name, tensor in rank.updated.items() if needs_states}
    found = [*optimizer_tensors(rank, states), *working_copies(rank)]
    dtype = next(iter(rank.updated.values())).dtype
    for target in found:
        expected = torch.float32 if target.key.endswith(".step") else dtype
        if tensors[target.key].properties.dtype != expected:
            what = f"{target.key} is {dtype_word(tensors[target.key].properties.dtype)}"
            raise CheckpointError(folder, what, f"{dtype_word(expected)}, as dtype= and master= have it")
    read, common = _read_states(rank, stored, found)
    same = RANKS in common and torch.equal(common[RANKS], ranks_of(rank.case))
    if lost := [key for key in rng_keys(rank).values() if same and key not in common]:
        raise CheckpointError(folder, f"{lost[0]} is missing, and it was saved on such ranks", "a whole checkpoint")
    with torch.no_grad():
        for target, tensor in zip(found, read, strict=True):
            target.local.copy_(tensor)
    for name, state in states.items():
        optimizer.state[rank.updated[name]] = state
    if rank.step.loss_scale is not None and SCALE in common:
        rank.step.loss_scale.restore(common[SCALE])
    if same:
        rank.dropout.streams.load_state_dict({stream: common[key] for stream, key in rng_keys(rank).items()})
    return int(common[STEPS])


def _weights(rank: Rank, folder: Path) -> dict[str, Tensor]:
    """Another system's parameters by key, in the dtype of what the optimizer steps."""
    dtype = next(iter(rank.updated.values())).dtype
    try:
        stored = reference_stored(rank.case)
    except CaseError as problem:
        raise CheckpointError(folder, problem.rule, problem.legal) from problem
    return {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in stored.items()}


def _is_foreign_key(key: str) -> bool:
    """Whether another system's checkpoint has this key: it has parameters, and the number of steps, 0."""
    return key.startswith("model.") or key == STEPS


def _read_states(
    rank: Rank, stored: "Stored | Weights", found: Sequence[StateTensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The tensors read for the targets, with zeros as padding, and by key the tensors that every rank reads whole.

    Raises CheckpointError when an element was not read or is NaN.
    """
    tensors = stored.tensors
    fresh = [torch.zeros(one.local.shape, dtype=tensors[one.key].properties.dtype, device="cpu") for one in found]
    boxes = [
        (target.key, box)
        for target, tensor in zip(found, fresh, strict=True)
        for box in target.boxes(tensor, rank.mesh.coordinates)
    ]
    names = [key for key in (STEPS, RANKS, SCALE, *rng_keys(rank).values()) if key in tensors]
    common = {key: torch.empty(tensors[key].size, dtype=tensors[key].properties.dtype, device="cpu") for key in names}
    boxes += [(key, whole_box(one)) for key, one in common.items()]
    for _, box in boxes:
        box.local.fill_(_poison(box.local.dtype))
    stored.read(boxes)
    for key, box in boxes:
        poisoned = box.local.isnan() if box.local.is_floating_point() else box.local == _poison(box.local.dtype)
        left = int(poisoned.sum())
        if left and not key.startswith("rng."):  # bytes may have any value
            what = f"{left} elements of {key} were not read, or are NaN there (from {box.offsets} on)"
            raise CheckpointError(stored.folder, what, "a finite number for every element")
    return fresh, common


def _poison(dtype: torch.dtype) -> float:
    """What a tensor is filled with until it is read: NaN, or the least integer of its dtype."""
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def _states_of(tensor: Tensor) -> dict[str, Tensor]:
    """New states of AdamW for a tensor; torch itself makes them only in the first step."""
    moments = {moment: torch.zeros_like(tensor, requires_grad=False) for moment in MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32, device="cpu"), **moments}


def _check_keys(stored: "Stored | Weights", expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the checkpoint has exactly these tensors, beside any states of random streams."""
    tensors = stored.tensors
    legal = "a checkpoint of the same model and training"
    if missing := [key for key in expected if key not in tensors]:
        what = f"{len(missing)} of {len(expected)} tensors are missing, the first is {missing[0]}"
        raise CheckpointError(stored.folder, what, legal)
    if others := [key for key in tensors if key not in expected and not key.startswith("rng.")]:
        what = f"{len(others)} tensors are not of this model or training, the first is {others[0]}"
        raise CheckpointError(stored.folder, what, legal)
    for key, shape in expected.items():
        if tuple(tensors[key].size) != shape:
            raise CheckpointError(stored.folder, f"{key} has the shape {tuple(tensors[key].size)}, not {shape}", legal)
