"""Laws of packing: every token once, right labels, borders that partition, positions that restart."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.data.packing import IGNORED, Rows, build_pack, build_unpack, without_prompts

Sentences = list[Tensor]
SIZES = st.integers(1, 9)


@st.composite
def datasets(draw: st.DrawFn) -> Sentences:
    """Up to 8 sentences of up to 20 tokens, which all differ and are not 0, so that each has one place."""
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any))
    return [part.clone() for part in torch.arange(1, sum(lengths) + 1).split(lengths)]


def real_tokens(rows: Rows) -> list[int]:
    """The tokens without the padding: no sentence of these tests holds token 0."""
    return [token for token in rows.tokens.flatten().tolist() if token]


def check_labels(rows: Rows, sentences: Sentences) -> None:
    """Check that a token's label is the next of its sentence, -100 at its end and for padding."""
    after = {
        token: label
        for sentence in map(Tensor.tolist, sentences)
        for token, label in zip(sentence, [*sentence[1:], IGNORED], strict=False)
    }
    assert rows.labels.tolist() == [[after.get(token, IGNORED) for token in row] for row in rows.tokens.tolist()]


@given(datasets(), SIZES, SIZES)
@settings(deadline=None)
def test_packs_hold_every_token_once_with_its_label_and_place(
    sentences: Sentences, packed_length: int, seq_len: int
) -> None:
    """Borders partition a pack, positions restart at each of them, and padding is a sub-sequence of its own."""
    packs = build_pack(sentences, packed_length=packed_length, seq_len=seq_len)
    assert [token for pack in packs for token in real_tokens(pack)] == torch.cat(sentences).tolist()
    for pack in packs:
        check_labels(pack, sentences)
        assert pack.cu_seqlens is not None
        borders = pack.cu_seqlens.tolist()
        assert borders[0] == 0
        assert borders[-1] == packed_length == pack.tokens.numel()
        assert all(start < stop for start, stop in pairwise(borders))
        assert pack.positions[0].tolist() == [n for start, stop in pairwise(borders) for n in range(stop - start)]
        count = len(real_tokens(pack))
        assert pack.tokens[0, count:].count_nonzero() == 0
        assert count == packed_length or count in borders


@given(datasets(), SIZES, SIZES)
@settings(deadline=None)
def test_rows_hold_the_first_pieces_of_the_sentences(sentences: Sentences, micro_bsz: int, seq_len: int) -> None:
    rows = build_unpack(sentences, micro_bsz=micro_bsz, seq_len=seq_len)
    check_labels(rows, sentences)
    pieces = [piece.tolist() for sentence in sentences if len(sentence) for piece in sentence.split(seq_len)]
    filled = [piece + [0] * (seq_len - len(piece)) for piece in pieces[:micro_bsz]]
    assert rows.tokens.tolist() == filled + [[0] * seq_len] * (micro_bsz - len(filled))
    assert rows.positions.tolist() == [[*range(seq_len)]] * micro_bsz


def test_a_sentence_longer_than_a_pack_is_cut_as_internevo_cuts_it() -> None:
    packs = build_pack([torch.arange(1, 41)], packed_length=16, seq_len=8)
    assert [pack.tokens[0, 0].item() for pack in packs] == [1, 17, 33]
    assert [pack.labels[0].tolist() for pack in packs[:2]] == [[*range(2, 18)], [*range(18, 34)]]
    assert packs[2].labels[0].tolist() == [*range(34, 41), *[IGNORED] * 9]
    assert [pack.cu_seqlens.tolist() for pack in packs if pack.cu_seqlens is not None] == [[0, 8, 16]] * 3


def test_a_negative_token_is_read_and_not_learned_and_label_0_is() -> None:
    (pack,) = build_pack([torch.tensor([-5, -7, 6, 0, 8])], packed_length=5, seq_len=5)
    tokens, labels = without_prompts(pack.tokens, pack.labels)
    assert tokens.tolist() == [[5, 7, 6, 0, 8]]
    assert labels.tolist() == [[IGNORED, 6, 0, 8, IGNORED]]


@given(datasets(), st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_packing_leaves_its_input_alone(sentences: Sentences, seq_len: int) -> None:
    before = [sentence.clone() for sentence in sentences]
    packs = build_pack(sentences, packed_length=8, seq_len=seq_len)
    for rows in (*packs, build_unpack(sentences, micro_bsz=2, seq_len=seq_len)):
        rows.tokens.fill_(-1)
        rows.labels.fill_(-1)
    assert all(torch.equal(one, other) for one, other in zip(sentences, before, strict=True))
