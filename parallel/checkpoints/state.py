"""What a checkpoint holds: its keys, and the tensors of a rank that are saved and loaded, with where they lie.

Nothing here loads torch's checkpoints: they take half as long to import as torch, and few cases save or load.

The content of a folder has keys: tensors in full, whatever layout wrote them.

    model.<name>                        a parameter; where the optimizer steps a float32 copy (master=float32), the copy
    optimizer.state.<name>.exp_avg      adamw: the mean of its gradients; exp_avg_sq: of their squares
    optimizer.state.<name>.step         adamw: steps that were taken, float32 [], as torch counts them
    train.steps                         int64 []: optimizer steps that were run, skipped ones among them
    train.loss_scale                    with a scaler: float64 [3], scale, growth and hysteresis
    train.ranks                         int64 [4]: tp, cp, dp, pp of the ranks that wrote it
    rng.tp0.cp0.dp0.pp0.<stream>        uint8: the state of that stream of the rank at these places of the mesh

Padding of a vocabulary and of buckets is never stored. A state of a stream belongs to a rank of one layout. At another
layout it is not carried over, and the stream begins at its seed (around.md 17.2). Numbers of the field have no state.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardproof.parallel.communication.layout import Box, Coordinates, Placement, coordinates, pieces
from shardproof.parallel.model.strategy import Rank
from shardproof.reference.case import Case

STEPS, SCALE, RANKS = "train.steps", "train.loss_scale", "train.ranks"
MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read, or loaded here: the message names the folder, what is wrong and what
    is legal.
    """

    def __init__(self, folder: object, what: str, legal: str) -> None:
        super().__init__(f"checkpoint {folder}: {what}; legal: {legal}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A rank's part of the full tensor of a key, and where it lies. Ranks at the same places of `axes` hold the same
    part.
    """

    key: str
    local: Tensor
    place: Placement
    axes: tuple[str, ...]

    def boxes(self, local: Tensor, at: Coordinates) -> tuple[Box, ...]:
        """The boxes of the full tensor that lie in `local`, a tensor of this layout; they share its memory."""
        return pieces(local, self.place, at)


def optimizer_tensors(rank: Rank, states: Mapping[str, Mapping[str, Tensor]]) -> Iterator[StateTensor]:
    """The saved tensors that the optimizer of a rank steps, and those of its states, by the parameters' names."""
    for name, tensor in rank.updated.items():
        place, state = rank.updated_places[name], states.get(name, {})
        yield StateTensor(key=f"model.{name}", local=tensor, place=place, axes=place.axes)
        for moment in MOMENTS:
            if moment in state:
                key = f"optimizer.state.{name}.{moment}"
                yield StateTensor(key=key, local=state[moment], place=place, axes=place.axes)
        if "step" in state:
            key, whole = f"optimizer.state.{name}.step", Placement(shape=())
            yield StateTensor(key=key, local=state["step"], place=whole, axes=rank.case.pipeline_axes)


def working_copies(rank: Rank) -> Iterator[StateTensor]:
    """The parameters with which a rank computes, if the optimizer steps copies of them."""
    places = rank.strategy.placements(rank.case)
    for name, parameter in itertools.chain.from_iterable(chunk.named_parameters() for _, chunk in rank.chunks):
        if parameter is not rank.updated[name]:
            yield StateTensor(key=f"model.{name}", local=parameter, place=places[name], axes=places[name].axes)


def keys(case: Case, shapes: Mapping[str, tuple[int, ...]], *, states: bool) -> dict[str, tuple[int, ...]]:
    """Every key of a run with parameters of these shapes, with the shape of its full tensor; keys of random streams are
    left out.
    """
    found = {f"model.{name}": shape for name, shape in shapes.items()}
    if states:
        for name, shape in shapes.items():
            found |= {f"optimizer.state.{name}.{moment}": shape for moment in MOMENTS}
            found[f"optimizer.state.{name}.step"] = ()
    return found | {STEPS: (), RANKS: (len(case.mesh),)} | ({} if case.scaler == "none" else {SCALE: (3,)})


def rng_keys(rank: Rank) -> dict[str, str]:
    """Stream of a rank -> the key of its state."""
    at = rank.mesh.coordinates
    place = ".".join(f"{axis}{at[axis][0]}" for axis in rank.case.mesh)
    return {stream: f"rng.{place}.{stream}" for stream in rank.dropout.streams.state_dict()}


def dtype_word(dtype: torch.dtype) -> str:
    """The dtype as the case language writes it: float32."""
    return str(dtype).removeprefix("torch.")


def ranks_of(case: Case) -> Tensor:
    """The tensor `train.ranks`."""
    return torch.tensor([*case.mesh.values()], device="cpu")


def writes(case: Case, rank: int, axes: Sequence[str]) -> bool:
    """Whether this rank writes what ranks at the same places of these axes hold: only the first of them does."""
    mine = [coordinates(case, rank)[axis] for axis in axes]
    return all([coordinates(case, other)[axis] for axis in axes] != mine for other in range(rank))
