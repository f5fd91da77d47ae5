"""The mesh axes of the second launch: those that its tensors state, and those that follow from samples and parameters.

Ranks that read the same samples hold one copy of the model: parts of the same tensors (tp), or other parameters (pp).
Ranks that read other samples are data ranks (dp); those that read other parts of the same rows are slices (cp).
"""

from collections.abc import Iterable, Mapping, Sequence

from shardproof.harness.mesh_axes import AXES, SPELT
from shardproof.harness.parity.recorded import Launch
from shardproof.harness.parity.samples import Samples
from shardproof.harness.parity.stages import group_by, pipeline_stages
from shardproof.harness.protocols import Axes

Groups = tuple[tuple[int, ...], ...]


def axes_of(second: Launch, samples: Samples) -> Axes:
    """The axes of more than one rank: name -> the rank lists of its groups."""
    found = _infer_axes(second, samples)
    found |= {name: groups for name, groups in _stated_axes(second).items() if groups not in found.values()}
    order = [*AXES, *(name for name in found if name not in AXES)]
    return {name: found[name] for name in order if name in found and found[name] and len(found[name][0]) > 1}


def _infer_axes(second: Launch, samples: Samples) -> dict[str, Groups]:
    """The axes that follow from which rank holds which parameters and reads which samples."""
    stages = pipeline_stages(second)
    found: dict[str, Groups] = {"pp": tuple(zip(*stages, strict=True))} if stages else {}
    reading = {rank for ranks in samples.readers for rank in ranks}
    first = [rank for rank in (stages[0] if stages else [rank.rank for rank in second.ranks]) if rank in reading]

    def read_by(rank: int) -> object:
        rows = _rows_read(rank, samples)
        return rank if None in rows else rows  # a row that the first launch lacks is shared with no other rank

    def repeat(groups: Iterable[Sequence[int]]) -> Groups:
        return _repeat_in_stages(groups, stages, first)

    copies = group_by(first, read_by)
    if len({len(copy) for copy in copies}) != 1:
        return found
    if len(copies) > 1:
        found["dp"] = repeat(zip(*copies, strict=True))
    slices = [group_by(copy, samples.parts.__getitem__) for copy in copies]
    if 1 < len(slices[0]) < len(copies[0]):  # several ranks hold each slice of a sequence
        found["tp"] = repeat(group for of_copy in slices for group in of_copy)
        found["cp"] = repeat(group for of_copy in slices for group in zip(*of_copy, strict=True))
    elif len(copies[0]) > 1:
        found["cp" if len(slices[0]) > 1 else "tp"] = repeat(copies)
    return found


def _rows_read(rank: int, samples: Samples) -> tuple[object, ...]:
    """The rows that a rank reads, in its order; None for a row that the first launch lacks."""
    return tuple(row for (own, _), rows in sorted(samples.sources.items()) if own == rank for row in rows)


def _repeat_in_stages(
    groups: Iterable[Sequence[int]], stages: Sequence[tuple[int, ...]], first: Sequence[int]
) -> Groups:
    """Groups of ranks of the first stage, and the groups of ranks at the same places of every other stage."""
    if not stages:
        return tuple(map(tuple, groups))
    place = {rank: number for number, rank in enumerate(first)}
    of_first = list(groups)
    return tuple(tuple(stage[place[rank]] for rank in group) for stage in stages for group in of_first)


def _stated_axes(second: Launch) -> Mapping[str, Groups]:
    """The axes that recorded rows state (DTensor, Megatron), by the words of a case where these are known (SPELT)."""
    coordinates = {
        rank.rank: {name: at for row in rank.rows for name, size, at in row.axes if size > 1} for rank in second.ranks
    }
    found: dict[str, Groups] = {}
    for axis in dict.fromkeys(name for own in coordinates.values() for name in own):
        # The ranks of a group differ in their coordinate on this axis alone.
        groups: dict[object, list[tuple[int, int]]] = {}
        for rank, own in coordinates.items():
            if axis in own:
                others = tuple(sorted(at for at in own.items() if at[0] != axis))
                groups.setdefault(others, []).append((own[axis], rank))
        lists = tuple(tuple(rank for _, rank in sorted(group)) for group in groups.values())
        if len({len(group) for group in lists}) == 1:
            found[SPELT.get(axis, axis)] = lists
    return found
