"""A case to the micro-batches of every data rank: tokens, labels, loss mask, positions and borders of sentences.

Letters: B sequences of a micro-batch, S tokens of a sequence, T = B * S. The corpus is one endless stream of tokens.
Micro-batch number n (steps outermost, data ranks innermost) reads the T tokens from place n * T on, and the one after
them as a last label; when a short corpus would give the same tokens again, it is read one place later. The stream is
cut into sentences of uneven length: at the end of every document, and at random places from `case.seed`.

    packed                      one row of T tokens by `build_pack`; sentences of up to 5/4 S, positions restart
    internlm2, llama unpacked   a sentence a row by `build_unpack`, filled with token 0 and label -100 up to S
    gpt, opt unpacked           full rows of the stream, every label the next token (Megatron's rows)

To tell a mean over ranks from a mean over tokens, every micro-batch of a step counts another number of valid tokens
(from 3/4 T down in equal steps, as far as its sentences allow, but at least one), and the first rows count more than
the last. The other labels are -100 or masked; the mask of tokens without a label is random. Prompts (negative ids) are
read and not learned.
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


def micro_batch(
    case: Case,
    step: int,
    micro: int,
    dp_rank: int,
    *,
    device: torch.device | str = "cpu",
    padding: int = IGNORED,
) -> Batch:
    """Micro-batch `micro` of step `step` on data rank `dp_rank`: a pure function of the case and its corpus.

    `padding` is the label of what is not to be learned, before any is masked; another one is a what-if's.
    Neither the mode nor tp, wp, pp or cp changes it. Raises DataError when the corpus cannot be read, ValueError when
    the case has no such micro-batch.
    """
    for name, value, limit in (("step", step, math.inf), ("micro", micro, case.micro), ("dp_rank", dp_rank, case.dp)):
        if not 0 <= value < limit:
            raise ValueError(f"{name}={value}: must lie in [0, {limit}); legal: {name}=0")
    stream = _stream(corpus.sources(case), case.vocab, case.seq, case.seed)
    rows = _rows(case, stream, (step * case.micro + micro) * case.dp + dp_rank)
    generator = torch.Generator(device="cpu").manual_seed(_mixed(case.seed, step, micro, dp_rank))
    labels = rows.labels.where(rows.labels >= 0, padding)
    labels, loss_mask = _masked(labels, _valid_count(case, micro * case.dp + dp_rank), generator)
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

    def windows(self, first: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Windows number `first` and on, `length` tokens and the next: ids and is_end, [count, length + 1]."""
        size = len(self.ids)
        places = size // math.gcd(length, size)  # where windows begin before one repeats
        number = torch.arange(first, first + count, device="cpu")
        start = self.origin + number * length + number // places
        place = (start[:, None] + torch.arange(length + 1, device="cpu")) % size
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


def _rows(case: Case, stream: _Stream, number: int) -> _Rows:
    """Micro-batch `number` in this case's form: packed, a sentence a row, or full rows."""
    if not case.packed and case.family not in ("internlm2", "llama"):
        window, _ = stream.windows(number * case.batch, case.batch, case.seq)
        window = window if int(window[:, 1:].max()) >= 0 else window.abs()
        return _Rows(tokens=window[:, :-1].abs(), labels=window[:, 1:], positions=_places(case), cu_seqlens=None)
    window, is_end = (values[0] for values in stream.windows(number, 1, case.tokens))
    sentences = list(window.tensor_split(is_end.nonzero()[:, 0] + 1))
    form = _packed if case.packed else _unpacked
    rows = form(case, sentences)
    for whole in (window, window.abs()):  # nothing to learn: one sentence then, and at last prompts as text
        if int(rows.labels.max()) >= 0:
            break
        rows = form(case, [whole])
    return rows


def _packed(case: Case, sentences: list[Tensor]) -> _Rows:
    pack = build_pack(sentences, packed_length=case.tokens, seq_len=case.seq, tail="drop")[0]
    tokens, labels, positions = (values[None] for values in (pack.tokens.abs(), pack.labels, pack.indexes))
    return _Rows(tokens=tokens, labels=labels, positions=positions, cu_seqlens=pack.cu_seqlens)


def _unpacked(case: Case, sentences: list[Tensor]) -> _Rows:
    # carried, because T + 1 tokens then fill B rows at least, however few sentences they are
    packs = build_unpack(sentences[: case.batch], micro_bsz=case.batch, seq_len=case.seq, excess="carry")
    layout = partial(unpack_data, micro_bsz=case.batch, seq_len=case.seq)
    data, labels = load_accum_batch(*collate(packs[:1]), micro=0, process=layout)
    return _Rows(tokens=data.input_ids, labels=labels, positions=_places(case), cu_seqlens=None)


def _places(case: Case) -> Tensor:
    """Positions of rows, padding counted on: [B, S]."""
    return torch.arange(case.seq, device="cpu").repeat(case.batch, 1)


def _valid_count(case: Case, number: int) -> int:
    """How many tokens shall be valid in micro-batch `number` of a step: another number for each, at least 1."""
    most = max(1, 3 * (case.tokens - 1) // 4)
    return most - number * max(1, most // (case.micro * case.dp)) % most


def _masked(labels: Tensor, valid_count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Labels and loss mask of rows [B, S] in which `valid_count` tokens are valid, or all that can be but a few.

    Of the tokens to learn, in a random order that prefers the first rows, the first are valid, the next are masked, and
    the last, one in eight, lose their labels.
    """
    flat = torch.where(labels >= 0, labels, IGNORED).flatten()
    preference = 1 + torch.arange(len(labels), device="cpu")[:, None]
    drawn = torch.rand((2, *labels.shape), generator=generator, dtype=torch.float32, device="cpu")
    order = (drawn[0] * preference).flatten().argsort()
    learned = order[flat[order] != IGNORED]
    kept = len(learned) - min(1 + len(learned) // 8, len(learned) - 1)
    flat[learned[kept:]] = IGNORED
    mask = drawn[1].round().flatten()
    mask[learned[:kept]] = 0
    mask[learned[: min(valid_count, max(1, kept - 1))]] = 1
    return flat.view_as(labels), mask.view_as(labels)


def _mixed(*words: int) -> int:
    """One 63-bit seed from several numbers; near numbers give far seeds (multiply and fold, as in splitmix64)."""
    value = 0
    for word in words:
        value = ((value ^ word) + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 % 2**64
        value ^= value >> 31
    return value >> 1
