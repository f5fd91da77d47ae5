"""Named random number streams of one rank, with Megatron's seeds.

    seed' = seed + 100 * pp_rank
    data-parallel-rng      seed'                                     the default; the same on all ranks of tp
    model-parallel-rng     seed' + 2718 + tp_rank
    expert-parallel-rng    seed' + 1024 + 100 * ep_rank + etp_rank

Megatron has no term for context ranks, whose masks repeat along the sequence then (Megatron-LM #4828); here they add
CONTEXT_STRIDE * cp_rank. Source: Megatron-Core 0.16.1 `tensor_parallel/random.py`, `training/initialize.py`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from shardproof.parallel.communication.layout import Coordinates

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
