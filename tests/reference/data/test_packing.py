"""Laws of packing: every token once, right labels, borders that partition, positions that restart."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.data.packing import (
    IGNORED,
    Data,
    Pack,
    build_pack,
    build_unpack,
    collate,
    load_accum_batch,
    packed_data_normalizer,
    split_data_sequence_parallel,
    unpack_data,
)

Sentences = list[Tensor]
SIZES = st.integers(1, 9)


@st.composite
def datasets(draw: st.DrawFn, smallest: int = 0) -> Sentences:
    """Up to 8 sentences of up to 20 tokens, which all differ and are not 0, so that each has one place."""
    lengths = draw(st.lists(st.integers(smallest, 20), max_size=8))
    flat = torch.arange(1, sum(lengths) + 1)
    return [part.clone() for part in flat.split(lengths)] if lengths else []


def real_tokens(pack: Pack) -> list[int]:
    """The tokens of a pack without its padding: no sentence of these tests holds token 0."""
    return [token for token in pack.tokens.tolist() if token]


def successors(sentences: Sentences) -> dict[int, int]:
    """Token -> the next token of its sentence, -100 at its end, for tokens that all differ."""
    return {
        token: after
        for sentence in sentences
        for token, after in zip(sentence.tolist(), [*sentence.tolist()[1:], IGNORED], strict=False)
    }


def check_form(pack: Pack, packed_length: int) -> None:
    """Check laws of every pack: sizes, borders that partition it, positions that restart, padding not learned."""
    borders = pack.cu_seqlens.tolist()
    assert borders[0] == 0
    assert borders[-1] == packed_length == len(pack.tokens) == len(pack.labels)
    assert all(start < stop for start, stop in pairwise(borders))
    assert pack.indexes.tolist() == [place for start, stop in pairwise(borders) for place in range(stop - start)]
    count = len(real_tokens(pack))
    assert pack.tokens[count:].count_nonzero() == 0
    assert (pack.labels[count:] == IGNORED).all()
    assert count == packed_length or count in borders


@given(datasets(), SIZES, SIZES)
@settings(deadline=None)
def test_build_pack_neither_loses_nor_repeats_a_token(sentences: Sentences, packed_length: int, seq_len: int) -> None:
    packs = build_pack(sentences, packed_length=packed_length, seq_len=seq_len)
    assert [token for pack in packs for token in real_tokens(pack)] == [t for s in sentences for t in s.tolist()]


@given(datasets(), SIZES, SIZES)
@settings(deadline=None)
def test_build_pack_labels_are_next_tokens_inside_a_sentence(
    sentences: Sentences, packed_length: int, seq_len: int
) -> None:
    after = successors(sentences)
    for pack in build_pack(sentences, packed_length=packed_length, seq_len=seq_len):
        check_form(pack, packed_length)
        assert pack.labels.tolist() == [after.get(token, IGNORED) for token in pack.tokens.tolist()]


@given(datasets(), SIZES, SIZES)
@settings(deadline=None)
def test_dropping_the_tail_drops_only_the_short_pack(sentences: Sentences, packed_length: int, seq_len: int) -> None:
    padded = build_pack(sentences, packed_length=packed_length, seq_len=seq_len)
    dropped = build_pack(sentences, packed_length=packed_length, seq_len=seq_len, tail="drop")
    assert len(dropped) == sum(map(len, sentences)) // packed_length
    assert [pack.tokens.tolist() for pack in dropped] == [pack.tokens.tolist() for pack in padded[: len(dropped)]]
    assert all(len(real_tokens(pack)) == packed_length for pack in dropped)


@given(datasets(), SIZES, SIZES)
@settings(deadline=None)
def test_build_unpack_carries_every_token_into_some_row(sentences: Sentences, micro_bsz: int, seq_len: int) -> None:
    after = successors(sentences)
    packs = build_unpack(sentences, micro_bsz=micro_bsz, seq_len=seq_len, excess="carry")
    assert [token for pack in packs for token in real_tokens(pack)] == [t for s in sentences for t in s.tolist()]
    for pack in packs:
        check_form(pack, micro_bsz * seq_len)
        assert pack.labels.tolist() == [after.get(token, IGNORED) for token in pack.tokens.tolist()]


@given(datasets(), SIZES, SIZES)
@settings(deadline=None)
def test_build_unpack_discards_what_exceeds_a_row(sentences: Sentences, micro_bsz: int, seq_len: int) -> None:
    cut = [sentence[:seq_len] for sentence in sentences]
    discarding = build_unpack(sentences, micro_bsz=micro_bsz, seq_len=seq_len)
    carrying = build_unpack(cut, micro_bsz=micro_bsz, seq_len=seq_len, excess="carry")
    assert len(discarding) == len(carrying) == -(-sum(map(bool, map(len, sentences))) // micro_bsz)
    for one, other in zip(discarding, carrying, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.labels.tolist() == other.labels.tolist()


@given(datasets(smallest=1), SIZES, SIZES)
@settings(deadline=None)
def test_overlapping_packs_hold_each_sentence_up_to_micro_bsz_times(
    sentences: Sentences, micro_bsz: int, seq_len: int
) -> None:
    packs = build_unpack(sentences, micro_bsz=micro_bsz, seq_len=seq_len, packs="overlap")
    assert len(packs) == len(sentences)
    held = [token for pack in packs for token in real_tokens(pack)]
    for number, sentence in enumerate(sentences):
        assert all(held.count(token) == min(micro_bsz, number + 1) for token in sentence[:seq_len].tolist())


@given(datasets(smallest=1), SIZES, SIZES)
@settings(deadline=None)
def test_unpacking_what_was_packed_gives_the_sentences_back(sentences: Sentences, micro_bsz: int, seq_len: int) -> None:
    packs = build_unpack(sentences, micro_bsz=micro_bsz, seq_len=seq_len, excess="carry")
    pieces = [piece for sentence in sentences for piece in sentence.split(seq_len)]
    after = successors(sentences)
    for number, pack in enumerate(packs):
        data, labels = unpack_data(*collate([pack]), micro_bsz=micro_bsz, seq_len=seq_len)
        mine = pieces[number * micro_bsz : (number + 1) * micro_bsz]
        assert [[t for t in row if t] for row in data.input_ids.tolist()][: len(mine)] == [p.tolist() for p in mine]
        assert data.input_ids[len(mine) :].count_nonzero() == 0
        assert labels.tolist() == [[after.get(t, IGNORED) for t in row] for row in data.input_ids.tolist()]
        assert data.indexes is not None
        for row, piece in zip(data.indexes.tolist(), mine, strict=False):
            assert row == [*range(len(piece)), *[0] * (seq_len - len(piece))]


@given(datasets(smallest=1), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans())
@settings(deadline=None)
def test_the_slices_of_all_sequence_ranks_make_the_whole(
    sentences: Sentences, size: int, part: int, micro_bsz: int, packed: bool
) -> None:
    seq_len = size * part
    if not sentences:
        sentences = [torch.tensor([7])]
    process = packed_data_normalizer if packed else partial(unpack_data, micro_bsz=micro_bsz, seq_len=seq_len)
    packs = build_unpack(sentences, micro_bsz=micro_bsz, seq_len=seq_len)
    whole, label = load_accum_batch(*collate(packs), micro=len(packs) - 1, process=process)
    slices = [split_data_sequence_parallel(whole, label, rank=rank, size=size) for rank in range(size)]
    assert torch.equal(torch.cat([data.input_ids for data, _ in slices], dim=-1), whole.input_ids)
    assert torch.equal(torch.cat([labels for _, labels in slices], dim=-1), label)
    assert whole.indexes is not None
    assert torch.equal(torch.cat([data.indexes for data, _ in slices if data.indexes is not None], -1), whole.indexes)
    assert all(data.cu_seqlens is whole.cu_seqlens and data.max_seqlen == whole.max_seqlen for data, _ in slices)
    assert len({data.input_ids.shape for data, _ in slices}) == 1


def test_an_empty_dataset_gives_no_packs() -> None:
    empty = [torch.empty(0, dtype=torch.int64)]
    for nothing in ([], empty):
        assert build_pack(nothing, packed_length=16, seq_len=8) == []
        assert build_unpack(nothing, micro_bsz=2, seq_len=8) == []


def test_a_sentence_longer_than_a_pack_is_cut_as_internevo_cuts_it() -> None:
    packs = build_pack([torch.arange(1, 41)], packed_length=16, seq_len=8)
    assert [pack.tokens[0].item() for pack in packs] == [1, 17, 33]
    assert [pack.labels.tolist() for pack in packs[:2]] == [[*range(2, 18)], [*range(18, 34)]]
    assert packs[2].labels.tolist() == [*range(34, 41), *[IGNORED] * 9]
    assert [pack.cu_seqlens.tolist() for pack in packs] == [[0, 8, 16]] * 3


def test_label_0_is_learned_unless_asked_otherwise() -> None:
    packs = build_pack([torch.tensor([5, 0, 6])], packed_length=4, seq_len=4)
    assert collate(packs)[1].tolist() == [[0, 6, IGNORED, IGNORED]]
    assert collate(packs, zero="ignore")[1].tolist() == [[IGNORED, 6, IGNORED, IGNORED]]


def test_a_negative_token_is_read_and_not_learned() -> None:
    packs = build_pack([torch.tensor([-5, -7, 6, 8])], packed_length=4, seq_len=4)
    data, labels = collate(packs)
    assert data.input_ids.tolist() == [[5, 7, 6, 8]]
    assert labels.tolist() == [[IGNORED, 6, 8, IGNORED]]


def test_what_the_code_of_internevo_does_and_its_page_does_not() -> None:
    """Borders as one tensor, positions of row 0 for all rows or none, whole labels for a head that gathers."""
    packs = build_unpack([torch.arange(1, 5), torch.arange(5, 12)], micro_bsz=2, seq_len=8)
    data, labels = collate([*packs, *packs], cu_seqlens="stack")
    assert isinstance(data.cu_seqlens, Tensor) and data.cu_seqlens.tolist() == [[0, 4, 11, 16]] * 2
    second, label = load_accum_batch(data, labels, micro=1)
    assert isinstance(second.cu_seqlens, Tensor) and second.cu_seqlens.tolist() == [0, 4, 11, 16]
    assert torch.equal(split_data_sequence_parallel(second, label, rank=1, size=2, labels="whole")[1], label)
    first, _ = unpack_data(*collate(packs), micro_bsz=2, seq_len=8, indexes="first")
    assert first.indexes is not None and first.indexes.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert unpack_data(*collate(packs), micro_bsz=2, seq_len=8, indexes="drop")[0].indexes is None


@given(datasets(), st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_packing_leaves_its_input_alone(sentences: Sentences, seq_len: int) -> None:
    before = [sentence.clone() for sentence in sentences]
    packs = build_pack(sentences, packed_length=8, seq_len=seq_len) + build_unpack(
        sentences, micro_bsz=2, seq_len=seq_len
    )
    for pack in packs:
        pack.tokens.fill_(-1)
        pack.labels.fill_(-1)
    assert all(torch.equal(one, other) for one, other in zip(sentences, before, strict=True))


def test_sizes_that_cannot_be_are_refused_by_name() -> None:
    data, label = collate(build_pack([torch.arange(1, 17)], packed_length=16, seq_len=8))
    with pytest.raises(ValueError, match=r"packed_length=0: must be at least 1; legal: packed_length=8"):
        build_pack([], packed_length=0, seq_len=8)
    with pytest.raises(ValueError, match="micro_bsz=0"):
        build_unpack([], micro_bsz=0, seq_len=8)
    with pytest.raises(ValueError, match=r"packs=\[\]: must be at least one pack"):
        collate([])
    with pytest.raises(ValueError, match="size=3: must divide the 16 tokens of a row"):
        split_data_sequence_parallel(data, label, rank=0, size=3)
    with pytest.raises(ValueError, match="rank=2: must be below size=2"):
        split_data_sequence_parallel(data, label, rank=2, size=2)
    with pytest.raises(ValueError, match="micro=1: the batch has 1 rows"):
        load_accum_batch(data, label, micro=1)


def test_rows_that_would_lose_sentences_are_refused() -> None:
    packs = build_pack([torch.arange(1, 5), torch.arange(5, 10), torch.arange(10, 17)], packed_length=16, seq_len=8)
    with pytest.raises(ValueError, match=r"micro_bsz=2: 13 tokens and labels do not fit into rows of seq_len=8"):
        unpack_data(*collate(packs), micro_bsz=2, seq_len=8)
    with pytest.raises(ValueError, match="do not fit into rows of seq_len=4"):
        unpack_data(*collate(packs), micro_bsz=4, seq_len=4)


def test_only_one_packed_micro_batch_is_processed_at_a_time() -> None:
    data, label = collate(build_pack([torch.arange(1, 33)], packed_length=16, seq_len=8))
    with pytest.raises(ValueError, match=r"input_ids=\(2, 16\): must be one pack"):
        packed_data_normalizer(data, label)
    rows = Data(input_ids=data.input_ids[:1], indexes=None, cu_seqlens=None)
    with pytest.raises(ValueError, match="the data are not packed"):
        packed_data_normalizer(rows, label[:1])
