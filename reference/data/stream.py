"""The corpus of a case as one endless stream of tokens, cut into sentences.

The stream is cut at the end of every document and at random places from `case.seed`, into sentences of uneven length. A
window is a stretch of consecutive tokens and the one after them. Window number n begins n * length tokens behind the
place where this seed starts to read. When a short corpus would give the same tokens again, it begins one token later.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data import corpus


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
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


def stream_of(case: Case) -> Stream:
    """The stream that this case reads. Raises DataError when the corpus cannot be read."""
    return _stream(corpus.sources(case), case.vocab, case.seq, case.seed)


@lru_cache(maxsize=8)
def _stream(files: tuple[corpus.Source, ...], vocab: int, seq: int, seed: int) -> Stream:
    """The corpus cut into sentences of 2 to 5/4 seq tokens, and at the ends of its documents."""
    text = corpus.read(files, vocab)
    generator = torch.Generator(device="cpu").manual_seed(mixed(seed))
    high = max(2, seq + seq // 4)
    lengths = torch.randint(2, high + 1, (len(text.ids) // 2,), generator=generator, device="cpu")
    cuts = lengths.cumsum(0) - 1
    is_end = torch.zeros(len(text.ids), dtype=torch.bool, device="cpu")
    is_end[cuts[cuts < len(text.ids)]] = True
    is_end[torch.tensor(text.lengths, device="cpu").cumsum(0) - 1] = True
    return Stream(ids=text.ids, is_end=is_end, origin=mixed(seed, len(text.ids)) % len(text.ids))


def mixed(*words: int) -> int:
    """A 63-bit seed from several numbers; near numbers give far seeds (multiply and fold, as in splitmix64)."""
    value = 0
    for word in words:
        value = ((value ^ word) + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 % 2**64
        value ^= value >> 31
    return value >> 1
