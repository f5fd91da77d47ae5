"""The tensors that ranks held, as those that are put together: declared layouts undone, stages of a pipeline apart."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.mesh_axes import pipelines, stage_count
from harness.outcome.merging import merge
from harness.protocols import Axes
from harness.recording.capturing.module_calls import TensorCopy


def plainly(tensors: Sequence[TensorCopy]) -> list[Tensor]:
    """The tensors of a program on one rank; none when one of them could not be read."""
    return [one.blocks[0].local for one in tensors] if all(len(one.blocks) == 1 for one in tensors) else []


def as_declared(by_rank: Mapping[int, Sequence[TensorCopy]]) -> dict[int, list[Tensor]] | None:
    """Every rank's tensors, a DTensor as the full one of its mesh; None when ranks do not hold what they declare."""
    parts: dict[int, list[Tensor]] = {}
    for rank, calls in by_rank.items():
        parts[rank] = []
        for number, one in enumerate(calls):
            if not one.mesh:
                parts[rank].append(one.blocks[0].local)
                continue
            others = [by_rank[other][number] for other in one.mesh if other in by_rank and number < len(by_rank[other])]
            merged = merge([{"it": other.blocks} for other in others])
            if merged.flaws:
                return None
            parts[rank].append(merged.tensors["it"])
    return parts


def stages(parts: Mapping[int, list[Tensor]], axes: Axes) -> list[dict[int, list[Tensor]]]:
    """The ranks of each stage of a pipeline with their tensors; nothing where there is one stage."""
    lists, count = pipelines(axes), stage_count(axes)
    places = [{ranks[stage] for ranks in lists if len(ranks) == count} for stage in range(count)] if count > 1 else []
    return [{rank: calls for rank, calls in parts.items() if rank in ranks} for ranks in places]
