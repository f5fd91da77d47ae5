"""Random numbers of the dense model: dropout and initial values, by the field or as ranks drew them.

Masks and initial values that an implementation drew itself are passed to a function that `takes_given` decorates, by
the keyword `given`. All functions of the dense model that it calls use them.

A site of dropout is "embedding", "layers.{i}.attention", "layers.{i}.mlp" (hidden states [S, H] of a sample) or
"layers.{i}.attention.shares" (its softmax [N, S, S]). Behind the decoder "prediction.{k}" has the same sites, its layer
being "prediction.{k}.layer". The number of a sample in a step is the number of its micro-batch times the rows, plus its
row; a packed row is one sample. Source: arXiv:1207.0580; the sites are those of Megatron-LM's GPT.

The field is Philox4x32-10: numbers of the coordinates (site, step, sample, element), for whole tensors.

    key      the first 8 bytes of sha256("<seed> <site>") as two little-endian words of 32 bits
    counter  (element mod 2^32, element div 2^32, sample, step), element row-major in the tensor of one sample

Products of two words are unsigned numbers of 64 bits, in numpy, because torch multiplies signed ones alone. Source:
Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; its test vectors are in the tests.

Initial values as Megatron sets them; `field_values` draws them from the field:

    weight of a column linear, table, head    mean 0, standard deviation 0.02
    weight of a row linear (wo, w2, down)      the same / sqrt(2 * layers), so that residuals do not grow with depth
    bias                                       0
    weight of a norm                           1

Source: Megatron-Core 0.16.1 `init_method_normal`, `scaled_init_method_normal`; GPT-2 (Radford et al. 2019).
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import steps_before
from shardproof.reference.data.batches import Batch
from shardproof.reference.errors import CaseError

_GIVEN: ContextVar[Mapping[str, Tensor]] = ContextVar("reference_given", default=MappingProxyType({}))
given_now: Callable[[], Mapping[str, Tensor]] = _GIVEN.get
"""The names and tensors that are given where this is called: "mask/<step>/<site>", "init/<parameter>"."""


@contextmanager
def use_given(given: Mapping[str, Tensor] | None) -> Iterator[None]:
    """While entered, the dense model uses these tensors; None leaves those that it uses already."""
    token = _GIVEN.set(given or _GIVEN.get())
    try:
        yield
    finally:
        _GIVEN.reset(token)


def takes_given(function: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """The function with one more keyword, `given`: a mapping that all functions called by it use."""

    @functools.wraps(function)
    def with_given(*args: Any, given: Mapping[str, Tensor] | None = None, **words: Any) -> dict[str, Tensor]:
        with use_given(given):
            return function(*args, **words)

    return with_given


STANDARD = 0.02
_ROW = (".wo", ".w2", ".experts.down")


def initial_deviation(case: Case, name: str) -> float:
    """The standard deviation of a parameter's initial values; 0 for one that begins as a constant."""
    module, _, leaf = name.rpartition(".")
    if leaf == "bias" or module.endswith("norm"):
        return 0.0
    return STANDARD / math.sqrt(2 * case.layers) if module.endswith(_ROW) else STANDARD


def field_values(case: Case, name: str, shape: tuple[int, ...]) -> Tensor:
    """A parameter's values in float64 by the field: a sum of four uniform numbers for each element, or its constant."""
    scale = initial_deviation(case, name)
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


SHARES = "shares"
_SMALL = 2**17
"""Masks of at most this many elements are cached, since the truth and each of its control runs use the same."""


def sites(case: Case) -> dict[str, tuple[int, ...]]:
    """Every site of the case that drops something, with the shape of one sample, in the order of the forward pass."""
    length = case.row_tokens
    hidden, shares = (length, case.hidden), (case.heads, length, length)
    found: dict[str, tuple[int, ...]] = {"embedding": hidden}
    for number, block in enumerate(case.blocks):
        if case.embeds_behind and number >= case.layers:
            found[f"{block.rpartition('.')[0]}.embedding"] = hidden
        found |= {f"{block}.attention.{SHARES}": shares, f"{block}.attention": hidden, f"{block}.mlp": hidden}
    return {site: shape for site, shape in found.items() if rate_of(case, site)}


def rate_of(case: Case, site: str) -> float:
    """The share of elements that is dropped at this site."""
    rate: float = case.attention_dropout if site.endswith(f".{SHARES}") else case.dropout
    return rate


def mask(case: Case, batch: Batch, site: str) -> Tensor | None:
    """Bool [B, *shape of a sample], True where the site keeps; None where it drops nothing.

    Raises CaseError if the implementation draws it and it was not given.
    """
    rate = rate_of(case, site)
    if not rate:
        return None
    rows = batch.tokens.shape[0]
    samples = range(batch.number * rows, (batch.number + 1) * rows)
    if case.random == "field":
        return _of_field(case, site, batch.step, samples).to(batch.tokens.device)
    kept = given_mask(case, f"mask/{batch.step}/{site}")
    return kept[samples.start : samples.stop].to(batch.tokens.device)


def given_mask(case: Case, name: str) -> Tensor:
    """The mask that an implementation drew and returned. Raises CaseError, from the KeyError, if there is none."""
    try:
        return given_now()[name]
    except KeyError as problem:
        rule = f"draws masks that the dense model must be given, and {name} was not returned"
        legal = "random=field, or return what dropout kept under that name"
        raise CaseError("random", case.random, rule, legal) from problem


def masks(case: Case) -> dict[str, Tensor]:
    """`mask/<step>/<site>`: bool [samples of a step, *shape of a sample], of the field."""
    samples = range(case.dp * case.micro * case.rows)
    return {
        f"mask/{step}/{site}": _of_field(case, site, step, samples)
        for step in range(case.steps)
        for site in sites(case)
    }


def _of_field(case: Case, site: str, step: int, samples: range) -> Tensor:
    shape = sites(case)[site]
    draw = _draw_mask if len(samples) * math.prod(shape) <= _SMALL else _draw_mask.__wrapped__
    return draw(f"{case.seed} dropout {site}", rate_of(case, site), steps_before(case) + step, samples, shape)


@functools.lru_cache(maxsize=256)
def _draw_mask(text: str, rate: float, step: int, samples: range, shape: tuple[int, ...]) -> Tensor:
    return words(text, samples=samples, step=step, shape=shape)[0] >= math.ceil(rate * 2**32)
