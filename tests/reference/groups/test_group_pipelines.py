"""Stages, chunks, neighbours and embedding groups of a pipeline."""

from __future__ import annotations

from reference.groups import PipelineGroup
from tests.reference.groups.systems import megatron

SIXTEEN = megatron(world=16, tp=2, pp=4)
PLAIN = PipelineGroup(ranks=SIXTEEN.group("pp", 5))
CHUNKED = PipelineGroup(ranks=(0, 4, 8, 12), chunks=2)


def test_first_and_last_stages_of_two_machines() -> None:
    """Seed 002: 16 devices, tp2 pp4 dp2; ranks 0 to 3 are first stages, 12 to 15 last ones."""
    pipelines = {rank: PipelineGroup(ranks=SIXTEEN.group("pp", rank)) for rank in range(16)}
    assert [rank for rank, pipeline in pipelines.items() if pipeline.first_stage(rank)] == [0, 1, 2, 3]
    assert [rank for rank, pipeline in pipelines.items() if pipeline.last_stage(rank)] == [12, 13, 14, 15]


def test_a_chunk_is_first_or_last_only_at_the_ends_of_the_model() -> None:
    assert CHUNKED.first_stage(0) and CHUNKED.first_stage(0, 0) and not CHUNKED.first_stage(0, 1)
    assert CHUNKED.last_stage(12) and CHUNKED.last_stage(12, 1) and not CHUNKED.last_stage(12, 0)
    assert [CHUNKED.virtual_stage(8, chunk) for chunk in (0, 1)] == [2, 6]


def test_neighbours_wrap() -> None:
    assert PLAIN.ranks == (1, 5, 9, 13)
    assert [PLAIN.next_rank(rank) for rank in PLAIN.ranks] == [5, 9, 13, 1]
    assert [PLAIN.previous_rank(rank) for rank in PLAIN.ranks] == [13, 1, 5, 9]
    alone = PipelineGroup(ranks=(7,))
    assert (alone.next_rank(7), alone.previous_rank(7), alone.first_stage(7), alone.last_stage(7)) == (7, 7, True, True)


def test_the_layers_of_chunks() -> None:
    """The docstring of initialize_model_parallel: 16 layers, 4 ranks of 2 chunks, counted there from 1."""
    held = [[[*CHUNKED.layers(16, rank, chunk)] for chunk in (0, 1)] for rank in CHUNKED.ranks]
    assert held == [[[0, 1], [8, 9]], [[2, 3], [10, 11]], [[4, 5], [12, 13]], [[6, 7], [14, 15]]]


def test_uneven_first_and_last_stages() -> None:
    assert [len(PLAIN.layers(12, rank, first=1, last=3)) for rank in PLAIN.ranks] == [1, 4, 4, 3]
    held = [PLAIN.layers(13, rank, first=1) for rank in PLAIN.ranks]
    assert held == [range(1), range(1, 5), range(5, 9), range(9, 13)]
    chunks = [CHUNKED.layers(16, rank, chunk, first=2, last=6) for chunk in (0, 1) for rank in CHUNKED.ranks]
    assert [*map(len, chunks)] == [1, 2, 2, 3] * 2
    assert [layer for chunk in chunks for layer in chunk] == [*range(16)]


def test_embedding_groups() -> None:
    assert PLAIN.embedding_ranks() == (1, 13)
    assert PLAIN.embedding_ranks(tied=False) == (1,)
    assert PLAIN.embedding_ranks(tied=False, prediction=[PLAIN.prediction_stage()]) == (1, 13)
    assert PLAIN.embedding_ranks(prediction=[2]) == (1, 9, 13)
    assert PipelineGroup(ranks=(7,)).embedding_ranks() == (7,)
    assert PLAIN.position_embedding_ranks() == (1,)


def test_the_chunk_that_holds_the_embedding() -> None:
    both = {(rank, chunk): CHUNKED.holds_embedding(rank, chunk) for rank in CHUNKED.ranks for chunk in (0, 1)}
    assert [place for place, held in both.items() if held] == [(0, 0), (12, 1)]
    assert [rank for rank in CHUNKED.ranks if CHUNKED.holds_embedding(rank)] == [0, 12]
    predicted = {chunk: CHUNKED.holds_embedding(8, chunk, tied=False, prediction=[6]) for chunk in (0, 1)}
    assert predicted == {0: False, 1: True} and not CHUNKED.holds_embedding(12, tied=False, prediction=[6])
