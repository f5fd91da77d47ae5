"""The axes of the second launch's mesh: as its tensors state them, else as its samples and parameters show them.

Ranks that read the same samples hold the same model together: parts of its tensors (tp), or other parameters (pp).
Ranks that read other samples are data ranks (dp); those that read other parts of the same rows are slices (cp).
"""

from collections.abc import Mapping, Sequence

from shardproof.harness.mesh_axes import AXES, SPELT
from shardproof.harness.parity.recorded import Launch
from shardproof.harness.parity.samples import Samples
from shardproof.harness.protocols import Axes

Groups = tuple[tuple[int, ...], ...]


def axes_of(second: Launch, samples: Samples) -> Axes:
    """The axes of more than one rank: name -> the rank lists of its groups."""
    ranks = [rank.rank for rank in second.ranks]
    stages = _stages(second)
    readers = [tuple(ranks) for ranks in samples.readers]
    places = {rank: _sources(rank, samples) for one in readers for rank in one}
    found: dict[str, Groups] = {}
    if len(stages) > 1:
        found["pp"] = tuple(zip(*stages, strict=True)) if len({len(stage) for stage in stages}) == 1 else ()
    first = [rank for rank in (stages[0] if stages else ranks) if rank in places]
    data: dict[object, list[int]] = {}
    for rank in first:
        data.setdefault(places[rank] if None not in places[rank] else rank, []).append(rank)
    sharing = [tuple(own) for own in data.values()]
    if len(sharing) > 1 and len({len(own) for own in sharing}) == 1:
        found["dp"] = _in_stages(tuple(zip(*sharing, strict=True)), stages, first)
    if sharing and len(sharing[0]) > 1 and len({len(own) for own in sharing}) == 1:
        sliced: dict[object, list[int]] = {}
        for rank in sharing[0]:
            sliced.setdefault(samples.parts[rank], []).append(rank)
        name = "cp" if len(sliced) == len(sharing[0]) else "tp"
        if 1 < len(sliced) < len(sharing[0]):  # slices of a sequence, each held by several ranks
            parts = [_split(own, samples) for own in sharing]
            found["tp"] = _in_stages(tuple(tuple(group) for one in parts for group in one), stages, first)
            found["cp"] = _in_stages(
                tuple(tuple(pair) for one in parts for pair in zip(*one, strict=True)), stages, first
            )
        else:
            found[name] = _in_stages(tuple(sharing), stages, first)
    found |= {name: groups for name, groups in _stated_axes(second).items() if groups not in found.values()}
    order = [*AXES, *(name for name in found if name not in AXES)]
    return {name: found[name] for name in order if name in found and found[name] and len(found[name][0]) > 1}


def _sources(rank: int, samples: Samples) -> tuple[object, ...]:
    """The rows that a rank reads, in its order."""
    return tuple(row for (own, _), rows in sorted(samples.sources.items()) if own == rank for row in rows)


def _split(ranks: Sequence[int], samples: Samples) -> list[list[int]]:
    parts: dict[object, list[int]] = {}
    for rank in ranks:
        parts.setdefault(samples.parts[rank], []).append(rank)
    return list(parts.values())


def _stages(second: Launch) -> list[tuple[int, ...]]:
    """The ranks of every stage: those that have the same names of parameters, where not all have the same."""
    names: dict[frozenset[tuple[str, bytes]], list[int]] = {}
    for rank in second.ranks:
        held = frozenset((row.name, b"") for row in rank.rows if row.kind == "param")
        samples = any(row.kind == "sample" and "float" not in row.dtype for row in rank.rows)
        losses = any(row.kind == "loss" for row in rank.rows)
        key = held | {("", bytes([samples, losses]))}
        names.setdefault(key, []).append(rank.rank)
    sizes = {len(ranks) for ranks in names.values()}
    return [tuple(ranks) for ranks in names.values()] if len(names) > 1 and len(sizes) == 1 else []


def _in_stages(groups: Groups, stages: Sequence[tuple[int, ...]], first: Sequence[int]) -> Groups:
    """Groups of the first stage, repeated at the same places of the others."""
    if len(stages) < 2:
        return groups
    place = {rank: number for number, rank in enumerate(first)}
    every = [tuple(stage[place[rank]] for rank in group) for stage in stages for group in groups]
    return tuple(every)


def _stated_axes(second: Launch) -> Mapping[str, Groups]:
    """The axes that rows state, by the words of a case where a mesh's own word is known."""
    places: dict[str, dict[int, tuple[int, dict[str, int]]]] = {}
    for rank in second.ranks:
        known: dict[str, tuple[int, int]] = {}
        for row in rank.rows:
            known |= {name: (size, at) for name, size, at in row.axes if size > 1}
        own = {name: at for name, (_, at) in known.items()}
        for name, (_, at) in known.items():
            places.setdefault(name, {})[rank.rank] = (at, {other: p for other, p in own.items() if other != name})
    found: dict[str, Groups] = {}
    for name, of_rank in places.items():
        groups: dict[object, list[tuple[int, int]]] = {}
        for number, (at, others) in of_rank.items():
            groups.setdefault(tuple(sorted(others.items())), []).append((at, number))
        lists = tuple(tuple(rank for _, rank in sorted(group)) for group in groups.values())
        if len({len(group) for group in lists}) == 1:
            found[SPELT.get(name, name)] = lists
    return found
