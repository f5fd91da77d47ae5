"""Every example that InternEvo's page "Data Load and Procedure" prints, with its literal numbers.

micro_bsz = 2, SEQ_LEN = 8, packed_length = 16, micro_num = 2, as on the page.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from reference.data.packing import (
    Data,
    build_pack,
    build_unpack,
    collate,
    load_accum_batch,
    packed_data_normalizer,
    split_data_sequence_parallel,
    unpack_data,
)

A = [2323, 442, 252, 341]
B = [233, 3442, 322, 31, 2514, 49731, 51]
C = [4326, 427, 465, 22, 314, 9725, 346, 1343]
PACKED_INPUT = [A, B, C, [24, 2562, 5, 25, 356]]
UNPACKED_INPUT = [
    A,
    B,
    C,
    [24, 2562, 5, 25, 356, 3145, 246, 25, 1451, 67, 73, 541, 265],
    [4524, 2465, 562, 67, 26, 265, 21, 256, 145, 1345],
    [34, 14],
]
PACKED_TOKENS = [
    [2323, 442, 252, 341, 233, 3442, 322, 31, 2514, 49731, 51, 4326, 427, 465, 22, 314],
    [9725, 346, 1343, 24, 2562, 5, 25, 356, 0, 0, 0, 0, 0, 0, 0, 0],
]
PACKED_LABELS = [
    [442, 252, 341, -100, 3442, 322, 31, 2514, 49731, 51, -100, 427, 465, 22, 314, 9725],
    [346, 1343, -100, 2562, 5, 25, 356, -100, -100, -100, -100, -100, -100, -100, -100, -100],
]
PACKED_CU_SEQLENS = [[0, 4, 11, 16], [0, 3, 8, 16]]
PACKED_INDEXES = [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]]
UNPACKED_TOKENS = [
    [2323, 442, 252, 341, 233, 3442, 322, 31, 2514, 49731, 51, 0, 0, 0, 0, 0],
    [4326, 427, 465, 22, 314, 9725, 346, 1343, 24, 2562, 5, 25, 356, 3145, 246, 25],
    [4524, 2465, 562, 67, 26, 265, 21, 256, 34, 14, 0, 0, 0, 0, 0, 0],
]
UNPACKED_LABELS = [
    [442, 252, 341, -100, 3442, 322, 31, 2514, 49731, 51, -100, -100, -100, -100, -100, -100],
    [427, 465, 22, 314, 9725, 346, 1343, -100, 2562, 5, 25, 356, 3145, 246, 25, -100],
    [2465, 562, 67, 26, 265, 21, 256, -100, 14, -100, -100, -100, -100, -100, -100, -100],
]


def sentences(rows: list[list[int]]) -> list[Tensor]:
    return [torch.tensor(row) for row in rows]


def numbers(rows: list[Tensor]) -> list[list[int]]:
    return [row.tolist() for row in rows]


def packed() -> tuple[Data, Tensor]:
    return collate(build_pack(sentences(PACKED_INPUT), packed_length=16, seq_len=8))


def unpacked(rows: list[list[int]]) -> tuple[Data, Tensor]:
    batch = collate(build_unpack(sentences(rows), micro_bsz=2, seq_len=8))
    return load_accum_batch(*batch, micro=0, process=partial(unpack_data, micro_bsz=2, seq_len=8))


def test_build_pack_gives_the_printed_packs_and_labels() -> None:
    packs = build_pack(sentences(PACKED_INPUT), packed_length=16, seq_len=8)
    assert numbers([pack.tokens for pack in packs]) == PACKED_TOKENS
    assert numbers([pack.labels for pack in packs]) == PACKED_LABELS


def test_the_code_of_internevo_drops_the_second_printed_pack() -> None:
    packs = build_pack(sentences(PACKED_INPUT), packed_length=16, seq_len=8, tail="drop")
    assert numbers([pack.tokens for pack in packs]) == PACKED_TOKENS[:1]
    assert numbers([pack.labels for pack in packs]) == PACKED_LABELS[:1]
    assert numbers([pack.cu_seqlens for pack in packs]) == PACKED_CU_SEQLENS[:1]


def test_build_unpack_gives_the_printed_packs_and_labels() -> None:
    packs = build_unpack(sentences(UNPACKED_INPUT), micro_bsz=2, seq_len=8)
    assert numbers([pack.tokens for pack in packs]) == UNPACKED_TOKENS
    assert numbers([pack.labels for pack in packs]) == UNPACKED_LABELS


def test_the_printed_unpacked_rows_are_items_0_2_4_of_the_overlapping_code() -> None:
    packs = build_unpack(sentences(UNPACKED_INPUT), micro_bsz=2, seq_len=8, packs="overlap")
    assert len(packs) == 6
    assert numbers([packs[item].tokens for item in (0, 2, 4)]) == UNPACKED_TOKENS
    assert packs[1].tokens.tolist() == [*B, *C, 0]


def test_the_batch_of_a_step_has_the_printed_fields() -> None:
    data, label = packed()
    assert data.input_ids.tolist() == PACKED_TOKENS
    assert isinstance(data.cu_seqlens, tuple)
    assert numbers(list(data.cu_seqlens)) == PACKED_CU_SEQLENS
    assert data.indexes is not None
    assert data.indexes.tolist() == PACKED_INDEXES
    assert label.tolist() == PACKED_LABELS


def test_cu_seqlens_can_be_the_printed_tensor() -> None:
    packs = build_pack(sentences(PACKED_INPUT), packed_length=16, seq_len=8)
    data, _ = collate(packs, cu_seqlens="stack")
    assert isinstance(data.cu_seqlens, Tensor)
    assert data.cu_seqlens.tolist() == PACKED_CU_SEQLENS
    normalised, _ = load_accum_batch(data, torch.tensor(PACKED_LABELS), micro=1)
    assert isinstance(normalised.cu_seqlens, Tensor)
    assert normalised.cu_seqlens.tolist() == [0, 3, 8, 16]


def test_the_first_micro_batch_is_normalised_as_printed() -> None:
    data, label = load_accum_batch(*packed(), micro=0, process=packed_data_normalizer)
    assert data.input_ids.tolist() == PACKED_TOKENS[:1]
    assert isinstance(data.cu_seqlens, Tensor)
    assert data.cu_seqlens.tolist() == [0, 4, 11, 16]
    assert data.indexes is not None
    assert data.indexes.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]
    assert data.max_seqlen == 7
    assert label.tolist() == PACKED_LABELS[:1]


def test_the_second_micro_batch_counts_its_padding_as_a_sentence_of_8() -> None:
    data, label = load_accum_batch(*packed(), micro=1)
    assert data.max_seqlen == 8
    assert data.indexes is not None
    assert data.indexes.tolist() == PACKED_INDEXES[1]
    assert label.tolist() == PACKED_LABELS[1:]


@pytest.mark.parametrize(
    ("rank", "input_ids", "indexes", "labels"),
    [
        (
            0,
            [[2323, 442, 252, 341, 233, 3442, 322, 31]],
            [0, 1, 2, 3, 0, 1, 2, 3],
            [[442, 252, 341, -100, 3442, 322, 31, 2514]],
        ),
        (
            1,
            [[2514, 49731, 51, 4326, 427, 465, 22, 314]],
            [4, 5, 6, 0, 1, 2, 3, 4],
            [[49731, 51, -100, 427, 465, 22, 314, 9725]],
        ),
    ],
)
def test_two_sequence_ranks_split_the_packed_micro_batch_as_printed(
    rank: int, input_ids: list[list[int]], indexes: list[int], labels: list[list[int]]
) -> None:
    whole = load_accum_batch(*packed(), micro=0)
    data, label = split_data_sequence_parallel(*whole, rank=rank, size=2)
    assert data.input_ids.tolist() == input_ids
    assert data.indexes is not None
    assert data.indexes.tolist() == indexes
    assert label.tolist() == labels
    assert isinstance(data.cu_seqlens, Tensor)
    assert data.cu_seqlens.tolist() == [0, 4, 11, 16], "attention needs the borders of the whole sequence"


def test_newer_internevo_leaves_the_labels_whole() -> None:
    whole = load_accum_batch(*packed(), micro=0)
    _, label = split_data_sequence_parallel(*whole, rank=1, size=2, labels="whole")
    assert label.tolist() == PACKED_LABELS[:1]


def test_unpack_data_gives_the_printed_rows() -> None:
    data, label = unpacked([A, B])
    assert data.input_ids.tolist() == [[2323, 442, 252, 341, 0, 0, 0, 0], [233, 3442, 322, 31, 2514, 49731, 51, 0]]
    assert label.tolist() == [
        [442, 252, 341, -100, -100, -100, -100, -100],
        [3442, 322, 31, 2514, 49731, 51, -100, -100],
    ]
    assert data.cu_seqlens is None
    assert data.max_seqlen == 8


def test_every_unpacked_row_keeps_its_own_indexes() -> None:
    data, _ = unpacked([A, B])
    assert data.indexes is not None
    assert data.indexes.tolist() == [[0, 1, 2, 3, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 0]]


def test_internevo_keeps_the_indexes_of_row_0_or_removes_them() -> None:
    batch = collate(build_unpack(sentences([A, B]), micro_bsz=2, seq_len=8))
    first, _ = unpack_data(*batch, micro_bsz=2, seq_len=8, indexes="first")
    dropped, _ = unpack_data(*batch, micro_bsz=2, seq_len=8, indexes="drop")
    assert first.indexes is not None
    assert first.indexes.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert dropped.indexes is None


@pytest.mark.parametrize(
    ("rank", "input_ids", "labels"),
    [
        (0, [[2323, 442, 252, 341], [233, 3442, 322, 31]], [[442, 252, 341, -100], [3442, 322, 31, 2514]]),
        (1, [[0, 0, 0, 0], [2514, 49731, 51, 0]], [[-100, -100, -100, -100], [49731, 51, -100, -100]]),
    ],
)
def test_two_sequence_ranks_split_the_unpacked_rows_as_printed(
    rank: int, input_ids: list[list[int]], labels: list[list[int]]
) -> None:
    data, label = split_data_sequence_parallel(*unpacked([A, B]), rank=rank, size=2)
    assert data.input_ids.tolist() == input_ids
    assert label.tolist() == labels
