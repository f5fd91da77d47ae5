"""Which module of a subject corresponds to which of its truth, by the paths of both."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from shardproof.harness.mesh_axes import pipelines, stage_count
from shardproof.harness.outcome.merging import merge_outcomes
from shardproof.harness.protocols import Axes
from shardproof.harness.recording.capturing.module_calls import TensorCopy


def same_modules(mine: Sequence[str], theirs: Sequence[str]) -> dict[str, str]:
    """Paths of the truth -> paths of the ranks. Equal paths are paired first, then paths of which each has the longest
    common end with the other.
    """
    pairs = {path: path for path in theirs if path in set(mine)}
    left, right = [p for p in theirs if p not in pairs], [p for p in mine if p not in pairs]
    for path in left:
        best = _best_match(path, right)
        if best and _best_match(best, left) == path:
            pairs[path] = best
    return pairs


def _best_match(path: str, others: Sequence[str]) -> str:
    """The only path with the longest common end, "" if there are several or none."""
    ends = {other: _common_end(path, other) for other in others}
    most = max(ends.values(), default=0)
    best = [other for other, length in ends.items() if length == most]
    return best[0] if most and len(best) == 1 else ""


def _common_end(one: str, other: str) -> int:
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(one.count("."), other.count(".")) + 1)


def as_plain_tensors(tensors: Sequence[TensorCopy]) -> list[Tensor]:
    """The tensors of a program on one rank; empty if one of them could not be read."""
    return [one.blocks[0].local for one in tensors] if all(len(one.blocks) == 1 for one in tensors) else []


def as_declared(by_rank: Mapping[int, Sequence[TensorCopy]]) -> dict[int, list[Tensor]] | None:
    """Every rank's tensors, each DTensor as the full one; None if ranks do not hold what their DTensors declare."""
    parts: dict[int, list[Tensor]] = {}
    for rank, calls in by_rank.items():
        parts[rank] = []
        for number, one in enumerate(calls):
            if not one.mesh:
                parts[rank].append(one.blocks[0].local)
                continue
            others = [by_rank[other][number] for other in one.mesh if other in by_rank and number < len(by_rank[other])]
            merged = merge_outcomes([{"it": other.blocks} for other in others])
            if merged.flaws:
                return None
            parts[rank].append(merged.tensors["it"])
    return parts


def stages_of_ranks(parts: Mapping[int, list[Tensor]], axes: Axes) -> list[dict[int, list[Tensor]]]:
    """The ranks of each stage of a pipeline with their tensors; empty if there is one stage."""
    lists, count = pipelines(axes), stage_count(axes)
    places = [{ranks[stage] for ranks in lists if len(ranks) == count} for stage in range(count)] if count > 1 else []
    return [{rank: calls for rank, calls in parts.items() if rank in ranks} for ranks in places]
