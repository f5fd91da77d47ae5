"""Random numbers as a function of place and not of order: Philox4x32-10 of a key and a counter.

    key      the first 8 bytes of sha256("<seed> <site>"), two little-endian words
    counter  element % 2^32, element / 2^32, sample, step       element: row-major in the full tensor of one sample
    word 0   decides a mask: kept where word / 2^32 >= p
    sum of the four words, (sum - 2 (2^32 - 1)) / sqrt((2^64 - 1) / 3): an initial value of mean 0 and standard
    deviation 1 (sum of four uniform numbers; integers only, so that no kernel rounds it in another way)

A rank evaluates it at the global coordinates of what it holds, so every layout has the same numbers. All arithmetic is
in int64, whose product keeps the low 64 bits: equal on every device. `reference.model.field` is another implementation
of the same function. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011 (Random123).
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardproof.parallel.communication.layout import Coordinates, Placement, shard

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox(key: tuple[int, int], counter: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of Philox4x32-10, int64 in [0, 2^32), of four counter words of one shape (after broadcast)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _WORD) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32 & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return c0, c1, c2, c3


def indices(place: Placement, at: Coordinates) -> list[Tensor]:
    """For every dim of a placed tensor, the global indices that the rank at these coordinates holds, as they lie there.

    Padding has index 0. Every cut must be along a dim.
    """
    found = [torch.arange(size) for size in place.shape]
    for cut in place.cuts:
        assert cut.dim is not None  # a flat range has no indices by dim
        line = found[cut.dim]
        found[cut.dim] = shard(line, Placement(shape=tuple(line.shape), cuts=(replace(cut, dim=0),)), at)
    return found


def kept(
    seed: int, site: str, rate: float, *, step: int, samples: Tensor, elements: Sequence[Tensor], shape: Sequence[int]
) -> Tensor:
    """Bool [samples, *elements]: the mask of a site at these coordinates, True where dropout with this rate keeps.

    `elements` are the indices of each dim of a sample, whose full tensor has this `shape`.
    """
    first, *_ = _words(f"{seed} dropout {site}", elements, shape, step=step, samples=samples)
    return first >= math.ceil(rate * 2**32)


def standard(seed: int, name: str, elements: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Float64 [*elements]: values of mean 0 and standard deviation 1 of a parameter of this full `shape`."""
    words = _words(f"{seed} init {name}", elements, shape, step=0, samples=torch.zeros(1, dtype=torch.int64))
    return (sum(words[1:], words[0])[0] - 2 * _WORD).double() / math.sqrt((2.0**64 - 1) / 3)


def _words(
    text: str, elements: Sequence[Tensor], shape: Sequence[int], *, step: int, samples: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digest = hashlib.sha256(text.encode("ascii")).digest()
    key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    dims = len(elements)
    element = torch.zeros((1,) * (dims + 1), dtype=torch.int64)
    for dim, index in enumerate(elements):
        element = element * shape[dim] + index.view((-1,) + (1,) * (dims - 1 - dim))
    sample = samples.view((-1,) + (1,) * dims)
    counter = element & _WORD, element >> 32, sample, torch.full_like(sample, step)
    return philox(key, counter)
