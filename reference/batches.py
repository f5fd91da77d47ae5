"""A case to the micro-batches of every data rank: tokens, labels, loss mask, positions and borders of sentences.

Letters: B sequences of a micro-batch, S tokens of a sequence, T = B * S. The corpus is one stream of tokens.
Micro-batch number n (steps outermost, data ranks innermost) reads the T tokens of the stream from n * T on, and the one
after them as a last label; every lap around a short corpus starts one token later, so that rows repeat as late as
possible. The stream is cut into sentences of uneven length: at the end of every document, and at random places from
`case.seed`.

    packed                      one row of T tokens by `build_pack`; sentences of up to 5/4 S, positions restart
    internlm2, llama unpacked   a sentence a row by `build_unpack`, filled with token 0 and label -100 up to S
    gpt, opt unpacked           full rows of the stream, every label the next token (Megatron's rows)

To tell a mean over ranks from a mean over tokens, some labels are -100 and the loss mask is 0 at a rate that is drawn
for every row; at least one token of a micro-batch is valid. Prompts (negative ids) are read and not learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from reference import corpus
from reference.case import Case
from reference.packing import IGNORED, build_pack, build_unpack, collate, load_accum_batch, unpack_data

__all__ = ["Batch", "micro_batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch of one data rank. Fields are [B, S]; packed [1, T].

    tokens, labels (-100 = not learned), positions: int64. loss_mask: float32, 0 or 1. A token counts where the mask is
    1 and its label is not -100. cu_seqlens: int64 [n + 1] borders of sub-sequences, None when not packed. max_seqlen:
    bounds every position. `tokens` is a non-contiguous view when B > 1, as slices of a larger batch are.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int


def micro_batch(case: Case, step: int, micro: int, dp_rank: int, *, device: torch.device | str = "cpu") -> Batch:
    """Micro-batch `micro` of step `step` on data rank `dp_rank`: a pure function of the case and its corpus.

    Neither the mode nor tp, wp, pp or cp changes it. Raises DataError when the corpus cannot be read, ValueError when
    the case has no such micro-batch.
    """
    for name, value, limit in (("step", step, math.inf), ("micro", micro, case.micro), ("dp_rank", dp_rank, case.dp)):
        if not 0 <= value < limit:
            raise ValueError(f"{name}={value}: must lie in [0, {limit}); legal: {name}=0")
    stream = _stream(corpus.sources(case), case.vocab, case.seq, case.seed)
    window, ends = stream.window(((step * case.micro + micro) * case.dp + dp_rank) * case.tokens, case.tokens + 1)
    rows = _rows(case, _sentences(window, ends))
    if int(rows.labels.max()) < 0:  # nothing to learn: one sentence then, and prompts count as text
        rows = _rows(case, [window.abs()])
    generator = torch.Generator(device="cpu").manual_seed(_mixed(case.seed, step, micro, dp_rank))
    labels, loss_mask = _valid(rows.labels, generator)
    # every second column of a wider tensor: contiguous nowhere, on any device
    tokens = torch.stack((rows.tokens, labels), dim=-1).to(device)[..., 0]
    return Batch(
        tokens=tokens if case.batch > 1 else tokens.contiguous(),
        labels=labels.to(device),
        positions=rows.positions.to(device),
        loss_mask=loss_mask.to(device),
        cu_seqlens=None if rows.cu_seqlens is None else rows.cu_seqlens.to(device),
        max_seqlen=case.seq if rows.cu_seqlens is None else int(rows.cu_seqlens.diff().max()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stream:
    """All tokens of a corpus, int64 [N], where a sentence ends, bool [N], and where this seed starts to read."""

    ids: Tensor
    is_end: Tensor
    origin: int

    def window(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """`length` tokens from place `start` of the endless stream, and which of them end a sentence."""
        place = torch.arange(start, start + length, device="cpu")
        place = (place + place // len(self.ids) + self.origin) % len(self.ids)
        return self.ids[place], self.is_end[place]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """A micro-batch before anything is masked; a negative label other than -100 is a prompt."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor | None


@lru_cache(maxsize=8)
def _stream(files: tuple[corpus.Source, ...], vocab: int, seq: int, seed: int) -> _Stream:
    """The corpus cut into sentences of 2 to 5/4 seq tokens, and at the ends of its documents."""
    text = corpus.read(files, vocab)
    generator = torch.Generator(device="cpu").manual_seed(_mixed(seed))
    high = max(2, seq + seq // 4)
    lengths = torch.randint(2, high + 1, (len(text.ids) // 2,), generator=generator, device="cpu")
    cuts = lengths.cumsum(0) - 1
    is_end = torch.zeros(len(text.ids), dtype=torch.bool, device="cpu")
    is_end[cuts[cuts < len(text.ids)]] = True
    is_end[torch.tensor(text.lengths, device="cpu").cumsum(0) - 1] = True
    return _Stream(ids=text.ids, is_end=is_end, origin=_mixed(seed, len(text.ids)) % len(text.ids))


def _sentences(window: Tensor, ends: Tensor) -> list[Tensor]:
    """The window cut behind every end; its last sentence may be empty."""
    return list(window.tensor_split(ends.nonzero()[:, 0] + 1))


def _rows(case: Case, sentences: list[Tensor]) -> _Rows:
    """The rows of this case's form: packed, a sentence a row, or full rows."""
    if case.packed:
        pack = build_pack(sentences, packed_length=case.tokens, seq_len=case.seq, tail="drop")[0]
        tokens, labels, positions = (values[None] for values in (pack.tokens, pack.labels, pack.indexes))
        return _Rows(tokens=tokens.abs(), labels=labels, positions=positions, cu_seqlens=pack.cu_seqlens)
    positions = torch.arange(case.seq, device="cpu").repeat(case.batch, 1)
    if case.family in ("internlm2", "llama"):
        # a window holds at least B pieces of at most S tokens: what exceeds S must be a sentence of its own
        packs = build_unpack(sentences[: case.batch], micro_bsz=case.batch, seq_len=case.seq, excess="carry")
        layout = partial(unpack_data, micro_bsz=case.batch, seq_len=case.seq)
        data, labels = load_accum_batch(*collate(packs[:1]), micro=0, process=layout)
        return _Rows(tokens=data.input_ids, labels=labels, positions=positions, cu_seqlens=None)
    window = torch.cat(sentences)
    tokens, labels = (part.view(case.batch, case.seq) for part in (window[:-1].abs(), window[1:]))
    return _Rows(tokens=tokens, labels=labels, positions=positions, cu_seqlens=None)


def _valid(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Labels with one in eight not learned, prompts none, and the loss mask; one valid token is kept for certain."""
    flat = torch.where(labels >= 0, labels, IGNORED).flatten()
    order = torch.randperm(len(flat), generator=generator, device="cpu")
    learned = order[flat[order] != IGNORED]
    flat[learned[1 : 2 + len(flat) // 8]] = IGNORED
    rate = torch.rand(len(labels), 1, generator=generator, device="cpu") * 0.6
    mask = (torch.rand(labels.shape, generator=generator, device="cpu") >= rate).to(torch.float32).flatten()
    mask[learned[0]] = 1.0
    return flat.view_as(labels), mask.view_as(labels)


def _mixed(*words: int) -> int:
    """One 63-bit seed from several numbers; near numbers give far seeds (multiply and fold, as in splitmix64)."""
    value = 0
    for word in words:
        value = ((value ^ word) + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 % 2**64
        value ^= value >> 31
    return value >> 1
