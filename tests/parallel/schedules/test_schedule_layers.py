"""Layers over virtual stages: all of them once, even where nothing is stated, Llama's and chunked layouts by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedules.pipeline import Pipeline
from reference.errors import CaseError
from tests.parallel.schedules.layers import layers_of
from tests.parallel.schedules.shapes import larger


@given(pipeline=larger(), data=st.data())
def test_every_layer_is_on_one_stage_and_stated_ranks_hold_what_is_stated(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    pp, chunks = pipeline.ranks, pipeline.chunks
    each = st.none() if pipeline.v_shaped else st.none() | st.integers(1, 3)
    first, last = data.draw(each, "first"), data.draw(each, "last")
    even, sharing = data.draw(st.integers(1, 3), "each"), pp - (first is not None) - (last is not None)
    layers = chunks * (even * sharing + (first or 0) + (last or 0))
    stages = layers_of(pipeline, layers, first and first * chunks, last and last * chunks)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    sizes = [[len(stages[pipeline.stage(rank, chunk)]) for chunk in range(chunks)] for rank in range(pp)]
    assert sizes[0] == [first or even] * chunks
    assert sizes[-1] == [last or even] * chunks
    assert all(size == [even] * chunks for size in sizes[1:-1])


def test_llama3_405b_has_seven_layers_at_either_end_and_eight_between() -> None:
    stages = layers_of(Pipeline(schedule="1f1b", ranks=16, micro=32), 126, first_layers=7, last_layers=7)
    assert [len(stage) for stage in stages] == [7, *[8] * 14, 7]
    assert stages[1] == range(7, 15)


def test_chunks_of_an_uneven_pipeline_follow_megatron() -> None:
    """Offset of a chunk: chunk * (first + middle + last) / chunks, plus the ranks before it."""
    stages = layers_of(Pipeline(schedule="interleaved", ranks=4, micro=8, chunks=2), 20, first_layers=2, last_layers=6)
    assert stages[:4] == (range(1), range(1, 4), range(4, 7), range(7, 10))
    assert stages[4:] == (range(10, 11), range(11, 14), range(14, 17), range(17, 20))


@pytest.mark.parametrize(
    ("pipeline", "words", "message"),
    [
        ({}, {"layers": 10}, "layers=10: must be a multiple of pp*chunks=4; legal: 8"),
        (
            {},
            {"layers": 12, "first_layers": 2},
            "layers=12: what first_layers=2 leaves, 10, must be a positive multiple of 3; legal: 11",
        ),
        (
            {},
            {"layers": 12, "first_layers": 12},
            "first_layers=12: leaves none of layers=12 to the other ranks; legal: 1",
        ),
        ({}, {"layers": 12, "last_layers": 0}, "last_layers=0: must be a positive multiple of chunks=1; legal: 1"),
        (
            {"ranks": 1},
            {"layers": 12, "first_layers": 4},
            "first_layers=4: needs pp of at least 2; legal: leave it out",
        ),
        (
            {"ranks": 2},
            {"layers": 12, "first_layers": 4, "last_layers": 4},
            "layers=12: must be the sum of first_layers=4 last_layers=4; legal: 8",
        ),
        (
            {"schedule": "interleaved", "chunks": 2},
            {"layers": 12, "first_layers": 3},
            "first_layers=3: must be a positive multiple of chunks=2; legal: 2",
        ),
        (
            {"schedule": "zbv", "chunks": 2},
            {"layers": 16, "last_layers": 2},
            "last_layers=2: schedule=zbv has the first and the last layer on one rank, so all ranks hold as many; "
            "legal: leave it out",
        ),
    ],
)
def test_layers_that_cannot_be_shared_are_refused(
    pipeline: dict[str, Any], words: dict[str, int], message: str
) -> None:
    with pytest.raises(CaseError) as refused:
        layers_of(Pipeline(**dict[str, Any](schedule="1f1b", ranks=4, micro=8) | pipeline), **words)
    assert str(refused.value) == message
