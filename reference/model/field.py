"""Philox4x32-10 as a field: numbers of the coordinates (site, step, sample, element), for whole tensors.

    key      the first 8 bytes of sha256("<seed> <site>") as two little-endian words of 32 bits
    counter  (element mod 2^32, element div 2^32, sample, step), element row-major in the tensor of one sample

Words are int64 in [0, 2^32), multiplied by halves of 16 bits, so that nothing overflows. Source: Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; its test vectors are in the tests.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

__all__ = ["philox4x32", "words"]

_LOW, _WORD = 2**16 - 1, 2**32 - 1


def words(text: str, *, samples: range, step: int, shape: tuple[int, ...]) -> Tensor:
    """The four words of every element, int64 [4, samples, *shape], under the key of this text."""
    digest = hashlib.sha256(text.encode("ascii")).digest()
    key = [int.from_bytes(digest[first : first + 4], "little") for first in (0, 4)]
    element = torch.arange(math.prod(shape), device="cpu").expand(len(samples), -1)
    sample = torch.tensor(samples, device="cpu")[:, None].expand_as(element)
    counter = torch.stack((element % 2**32, element // 2**32, sample, torch.full_like(element, step)))
    return philox4x32(counter, key).view(4, len(samples), *shape)


def philox4x32(counter: Tensor, key: list[int], rounds: int = 10) -> Tensor:
    """The words int64 [4, ...] of counters int64 [4, ...]."""
    left, first, right, second = counter
    for number in range(rounds):
        a, b = ((word + number * step) & _WORD for word, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        (high, low), (other_high, other_low) = _product(0xD2511F53, left), _product(0xCD9E8D57, right)
        left, first, right, second = other_high ^ first ^ a, other_low, high ^ second ^ b, low
    return torch.stack((left, first, right, second))


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a product of two words."""
    low, high = factor * (word & _LOW), factor * (word >> 16)  # 48 bits each
    return (high + (low >> 16)) >> 16, (((high & _LOW) << 16) + low) & _WORD
