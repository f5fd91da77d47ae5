"""The ranks on which a tensor is wrong, in words: by the coordinates on the mesh that only they have."""

import itertools
from collections.abc import Collection, Sequence

from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.records import Evidence, RecordedRun
from shardproof.harness.diagnosing.causes.places import blocks_of, ranks_apart
from shardproof.harness.errors import ranks_text
from shardproof.harness.mesh_axes import place_of_rank, split_axes


def ranks_in_words(evidence: Evidence, name: str) -> str:
    """The ranks on which a name is wrong, by their coordinates; "" if all are, or if no two axes distinguish them.

    A gradient or parameter may be wrong on every rank that holds it. Then all names of its kind decide.
    """
    bad, good = ranks_apart(evidence.run, evidence.truth, [name])
    if not good and kind_of(name) in ("grad", "param", "param_after"):
        alike = [other for other in evidence.truth.tensors if kind_of(other) == kind_of(name)]
        bad, good = ranks_apart(evidence.run, evidence.truth, alike)
    if bad and not good and (empty := _empty_ranks(evidence.run, name)):
        place = f"wrong on rank{'s' * (len(bad) > 1)} {ranks_text(sorted(bad))}"
        return f"{place}; {_describe_holders(empty)} no element of it"
    if not bad or not good:
        return ""
    axes = {axis: evidence.claims.axes[axis] for axis in split_axes(evidence.run.case) if axis in evidence.claims.axes}
    for count in (1, 2):
        for some in itertools.combinations(axes, count):
            places = {rank: tuple(place_of_rank(axes, axis, rank) for axis in some) for rank in (*bad, *good)}
            mine, others = {places[rank] for rank in bad}, {places[rank] for rank in good}
            if not mine & others and (count == 1 or len(mine) == 1):
                return f"wrong on {_in_words(some, mine)} alone, right on {_in_words(some, others)}"
    return ""


def _empty_ranks(run: RecordedRun, name: str) -> list[int]:
    """The ranks that returned an empty part of this name."""
    return [rank for rank, blocks in blocks_of(run, name).items() if not any(block.local.numel() for block in blocks)]


def _describe_holders(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {ranks_text(ranks)} hold"


def _in_words(axes: Sequence[str], places: Collection[tuple[int, ...]]) -> str:
    """Coordinates in words: "cp rank 1", "cp ranks 0 1", "tp rank 0 of dp rank 1"; several on two axes are "others"."""
    if len(axes) > 1 and len(places) > 1:
        return "others"
    if len(axes) > 1:
        return " of ".join(f"{axis} rank {place}" for axis, place in zip(axes, *places, strict=True))
    found = sorted(place for (place,) in places)
    return f"{axes[0]} rank{'s' * (len(found) > 1)} {ranks_text(found)}"
