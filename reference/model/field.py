"""Philox4x32-10 as a field: numbers of the coordinates (site, step, sample, element), for whole tensors.

    key      the first 8 bytes of sha256("<seed> <site>") as two little-endian words of 32 bits
    counter  (element mod 2^32, element div 2^32, sample, step), element row-major in the tensor of one sample

Products of two words are unsigned numbers of 64 bits, in numpy, because torch multiplies signed ones alone. Source:
Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; its test vectors are in the tests.

Initial values as Megatron sets them, of which `of_field` gives the field's:

    weight of a column linear, table, head    mean 0, standard deviation 0.02
    weight of a row linear (wo, w2)            the same / sqrt(2 * layers), so that residuals do not grow with depth
    bias                                       0
    weight of a norm                           1

Source: Megatron-Core 0.16.1 `init_method_normal`, `scaled_init_method_normal`; GPT-2 (Radford et al. 2019).
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from shardproof.reference.case import Case

STANDARD = 0.02
_ROW = (".wo", ".w2", ".experts.down")


def deviation(case: Case, name: str) -> float:
    """The standard deviation of a parameter's initial values; 0 for one that begins as a constant."""
    module, _, leaf = name.rpartition(".")
    if leaf == "bias" or module.endswith("norm"):
        return 0.0
    return STANDARD / math.sqrt(2 * case.layers) if module.endswith(_ROW) else STANDARD


def of_field(case: Case, name: str, shape: tuple[int, ...]) -> Tensor:
    """A parameter's values in float64 by the field: a sum of four uniform numbers for each element, or its constant."""
    scale = deviation(case, name)
    if not scale:
        return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, dtype=torch.float64, device="cpu")
    four = words(f"{case.seed} init {name}", samples=range(1), step=0, shape=shape)[:, 0]
    centred = four.sum(0) - 2 * (2**32 - 1)
    return centred.double() / math.sqrt((2.0**64 - 1) / 3) * scale


_WORD = 2**32 - 1
_STEPS = 0x9E3779B9, 0xBB67AE85
_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_HALF, _LOW = np.uint64(32), np.uint64(_WORD)


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
    left, first, right, second = counter.numpy().astype(np.uint64)
    for number in range(rounds):
        a, b = (np.uint64((word + number * step) & _WORD) for word, step in zip(key, _STEPS, strict=True))
        product, other = left * _FACTORS[0], right * _FACTORS[1]
        left, first, right, second = (
            (other >> _HALF) ^ first ^ a,
            other & _LOW,
            (product >> _HALF) ^ second ^ b,
            product & _LOW,
        )
    return torch.from_numpy(np.stack((left, first, right, second)).astype(np.int64))
