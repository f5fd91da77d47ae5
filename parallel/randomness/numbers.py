"""Random numbers of a rank: as a function of place and not of order, or from named streams with Megatron's seeds.

The field is Philox4x32-10 of a key and a counter:

    key      the first 8 bytes of sha256("<seed> <site>"), two little-endian words
    counter  element % 2^32, element / 2^32, sample, step       element: row-major in the full tensor of one sample
    word 0   decides a mask: kept where word / 2^32 >= p
    sum of the four words, (sum - 2 (2^32 - 1)) / sqrt((2^64 - 1) / 3): an initial value of mean 0 and standard
    deviation 1 (sum of four uniform numbers; integers only, so that no kernel rounds it in another way)

A rank evaluates it at the global coordinates of what it holds, so every layout has the same numbers. All arithmetic is
in int64, whose product keeps the low 64 bits: equal on every device. `reference.model.randomness` is another
implementation of the same function. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011
(Random123).

Streams have these seeds:

    seed' = seed + 100 * pp_rank
    data-parallel-rng      seed'                                     the default; the same on all ranks of tp
    model-parallel-rng     seed' + 2718 + tp_rank
    expert-parallel-rng    seed' + 1024 + 100 * ep_rank + etp_rank

Megatron has no term for context ranks, whose masks repeat along the sequence then (Megatron-LM #4828); here they add
CONTEXT_STRIDE * cp_rank. Source: Megatron-Core 0.16.1 `tensor_parallel/random.py`, `training/initialize.py`.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


DEFAULT, MODEL_PARALLEL, EXPERT = "data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"
CONTEXT_STRIDE = 2**16
_SEEDS = 2**64
"""A generator takes seeds below this."""


def seeds(
    seed: int, *, tp_rank: int = 0, pp_rank: int = 0, cp_rank: int = 0, ep_rank: int = 0, etp_rank: int = 0
) -> dict[str, int]:
    """Name of each stream of a rank -> its seed."""
    own = seed + 100 * pp_rank + CONTEXT_STRIDE * cp_rank
    found = {DEFAULT: own, MODEL_PARALLEL: own + 2718 + tp_rank, EXPERT: own + 1024 + 100 * ep_rank + etp_rank}
    return {name: value % _SEEDS for name, value in found.items()}


def seeds_at(seed: int, at: Coordinates, *, slices: bool) -> dict[str, int]:
    """Seeds of the rank at these coordinates; `slices`: each context rank has seeds of its own."""
    return seeds(seed, tp_rank=at["tp"][0], pp_rank=at["pp"][0], cp_rank=at["cp"][0] if slices else 0)


def goes_on(at: Coordinates) -> bool:
    """Whether the streams of initial values go on as those of dropout: on the first context ranks."""
    return at["cp"][0] == 0


class Streams:
    """Streams that take turns on one generator of the CPU; draws from `generator` come from the stream in force.

    The generator is the object's own: nothing outside moves it, and it moves nothing outside.
    """

    def __init__(self, seeds: Mapping[str, int]) -> None:
        self.generator = torch.Generator(device="cpu")
        made = {name: torch.Generator(device="cpu").manual_seed(seed) for name, seed in seeds.items()}
        self._states = {name: generator.get_state() for name, generator in made.items()}
        self._current = next(iter(seeds))
        self.generator.set_state(self._states[self._current])

    @contextmanager
    def fork(self, name: str) -> Iterator[torch.Generator]:
        """In it, draws come from this stream; the one before goes on after it as if nothing had been drawn.

        A fork of the stream in force, at any depth, goes on with it: a stream never draws its numbers twice. Raises
        ValueError for an unknown name.
        """
        if name not in self._states:
            raise ValueError(f"name={name}: is no stream; legal: {' '.join(self._states)}")
        outer = self._current
        self._switch(name)
        try:
            yield self.generator
        finally:
            self._switch(outer)

    def state_dict(self) -> dict[str, Tensor]:
        """Name -> a copy of the stream's state, uint8 [bytes], the one in force included."""
        self._states[self._current] = self.generator.get_state()
        return {name: state.clone() for name, state in self._states.items()}

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Go on from these states. Raises ValueError for names that are not those of the streams."""
        if set(states) != set(self._states):
            raise ValueError(f"states={sorted(states)}: must be those of the streams; legal: {sorted(self._states)}")
        self._states = {name: state.clone() for name, state in states.items()}
        self.generator.set_state(self._states[self._current])

    @contextmanager
    def rewound(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """In it, draws begin at these states; after it every stream goes on as if nothing had been drawn."""
        now = self.state_dict()
        self.load_state_dict(states)
        try:
            yield
        finally:
            self.load_state_dict(now)

    def _switch(self, name: str) -> None:
        if name != self._current:
            self._states[self._current] = self.generator.get_state()
            self.generator.set_state(self._states[name])
            self._current = name
