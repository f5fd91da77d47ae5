"""Which layers every virtual stage holds, with more or fewer of them on the first and the last rank.

The rule is Megatron-Core's (0.16.1, `transformer_block.py:get_num_layers_to_build`, `transformer_layer.py:
get_transformer_layer_offset`): ranks whose count is stated take it, the others share what is left evenly, and every
rank splits its layers evenly over its chunks.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from parallel.schedules.pipeline import Pipeline
from reference.errors import CaseError

__all__ = ["layers_of"]


def layers_of(
    pipeline: Pipeline, layers: int, first_layers: int | None = None, last_layers: int | None = None
) -> tuple[range, ...]:
    """The layers of each virtual stage, in the order of the virtual stages; together all of them once.

    `first_layers` and `last_layers` are those of the first and the last rank, all chunks together. Raises CaseError
    when the layers cannot be shared in this way.
    """
    stated = {"first_layers": first_layers, "last_layers": last_layers}
    for key, value in stated.items():
        _check_stated(pipeline, key, value, layers)
    pp, chunks = pipeline.ranks, pipeline.chunks
    left = layers - sum(filter(None, stated.values()))
    sharing = pp - sum(value is not None for value in stated.values())
    each = _share(layers, left, sharing, chunks, stated)
    counts = [each] * pp
    if first_layers is not None:
        counts[0] = first_layers
    if last_layers is not None:
        counts[-1] = last_layers
    sizes = [counts[pipeline.rank(stage)] // chunks for stage in range(pipeline.virtual_stages)]
    return tuple(range(start, end) for start, end in pairwise(accumulate(sizes, initial=0)))


def _check_stated(pipeline: Pipeline, key: str, value: int | None, layers: int) -> None:
    if value is None:
        return
    if pipeline.v_shaped:
        rule = f"schedule={pipeline.schedule} has the first and the last layer on one rank, so all ranks hold as many"
        raise CaseError(key, value, rule, "leave it out")
    if pipeline.ranks < 2:
        raise CaseError(key, value, "needs pp of at least 2", "leave it out")
    if value < 1 or value % pipeline.chunks:
        rule = f"must be a positive multiple of chunks={pipeline.chunks}"
        raise CaseError(key, value, rule, str(pipeline.chunks * max(1, value // pipeline.chunks)))
    if value >= layers:
        raise CaseError(key, value, f"leaves none of layers={layers} to the other ranks", str(pipeline.chunks))


def _share(layers: int, left: int, sharing: int, chunks: int, stated: dict[str, int | None]) -> int:
    """Layers of each rank whose count is not stated."""
    given = "".join(f" {key}={value}" for key, value in stated.items() if value is not None)
    taken = layers - left
    if not sharing:
        if left:
            raise CaseError("layers", layers, f"must be the sum of{given}", str(taken))
        return 0
    unit = sharing * chunks
    if left < unit or left % unit:
        rule = f"what{given} leaves" if given else "must be a multiple of pp*chunks"
        rule += f", {left}, must be a positive multiple of {unit}" if given else f"={unit}"
        raise CaseError("layers", layers, rule, str(taken + unit * max(1, left // unit)))
    return left // unit * chunks
