"""Process-wide state that every rank of the in-process engine has to itself: swapped at every change of turns.

Random streams (torch's CPU generator, Python's `random`, numpy's global stream), the default dtype, and the state of
modules that the request names (`module_state`). Swapping is sound only because one rank runs at a time. Not swapped, so
shared by ranks: the working folder, CUDA generators, the state of other modules. The environment is looked up by
thread.
"""

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shardproof.harness.torch_internals.memory import generator_address

if TYPE_CHECKING:
    from shardproof.harness.engines.threads.state.module_state import Namespace

_WORDS = 624
_BYTES = 4 * (1 + _WORDS)
_HAS_GAUSS = 3
"""Where numpy's legacy state has the flag that the second of two normal numbers is kept for the next draw."""


class _Stream(NamedTuple):
    """A stream of the process. `mark()` is equal as long as no code draws or seeds."""

    seed: Callable[[int], object]
    read: Callable[[], Any]
    write: Callable[[Any], object]
    mark: Callable[[], Any]


class RankStreams:
    """The streams of all ranks of a run; the process's are at `seed` from here on. `clean`: no code has drawn yet.

    To read and write them costs 1 us (torch) to 36 us (numpy) and sweeps the caches, and few programs draw between two
    collectives. All three are Mersenne twisters in memory: a draw moves the place in the words, and after the last word
    new words are made. So a mark of each, place and first word, is compared with the start. A stream is swapped only
    from the first change of turns at which its mark differs. Of a twister not found in memory the mark is the state.
    """

    def __init__(self, world_size: int, seed: int) -> None:
        self._seed = seed
        self._states: list[list[Any]] = [[None] * world_size for _ in _STREAMS]
        self._mixed = [False] * len(_STREAMS)
        self.clean = True
        for stream in _STREAMS:
            stream.seed(seed)
        self._start = _TORCH_MARK(), _PYTHON_MARK(), _NUMPY_MARK()

    def enter(self, rank: int) -> None:
        """Make the process's streams this rank's; not needed while they are `clean`."""
        for stream, states, mixed in zip(_STREAMS, self._states, self._mixed, strict=True):
            if mixed and states[rank] is None:
                stream.seed(self._seed)
            elif mixed:
                stream.write(states[rank])

    def numpy_drawn(self) -> bool:
        """Whether any code has drawn from numpy's stream since it was seeded."""
        return self._mixed[-1] or _NUMPY_MARK() != self._start[-1]

    def leave(self, rank: int) -> None:
        """Keep the process's streams as this rank's."""
        marks = _TORCH_MARK(), _PYTHON_MARK(), _NUMPY_MARK()
        if self.clean and marks == self._start:
            return
        self.clean = False
        for i, stream in enumerate(_STREAMS):
            self._mixed[i] = self._mixed[i] or marks[i] != self._start[i]
            if self._mixed[i]:
                self._states[i][rank] = stream.read()


class CallerStreams:
    """The caller's streams. A state of numpy's that was read is used again while its words stay the same."""

    def __init__(self) -> None:
        self._words = b""
        self._torch, self._python, self._numpy = (stream.read() for stream in _STREAMS)

    def keep(self) -> None:
        """Read the streams."""
        words = ctypes.string_at(_NUMPY, _BYTES)
        self._torch, self._python = torch.default_generator.get_state(), random.getstate()
        if words != self._words or self._numpy[_HAS_GAUSS]:
            self._words, self._numpy = words, np.random.get_state()

    def give_back(self, streams: RankStreams) -> None:
        """Write the streams; only numpy's words when no code has drawn since they were seeded."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        if streams.numpy_drawn() or self._numpy[_HAS_GAUSS]:
            np.random.set_state(self._numpy)
        else:
            ctypes.memmove(_NUMPY, self._words, _BYTES)


@functools.lru_cache(maxsize=4)
def _seeded(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def _reader(address: int, words: int, step: int = 1) -> Callable[[], bytes]:
    """A function that reads every `step`-th of some 32-bit words of this process."""
    return memoryview((ctypes.c_uint32 * words).from_address(address))[::step].tobytes


def _torch_mark() -> Callable[[], Any]:
    """Words left, place and first word of torch's CPU generator, which follow its seed in the C++ object."""
    probe: Any = torch.Generator()
    generator: Any = torch.default_generator
    seed = 0x1234567890ABCDEF
    place = generator_address(probe.manual_seed(seed))
    head = b"" if place is None else ctypes.string_at(place, 512)
    offset = head.find(seed.to_bytes(8, sys.byteorder))  # in 512 bytes: the words alone are more than that
    if offset < 0 or struct.unpack_from("=i?3xII", head, offset + 8) != (1, True, 0, seed % 2**32):
        return lambda: generator.get_state().numpy().tobytes()
    address = (generator_address(generator) or 0) + offset
    return _reader(address + 8, 4)


def _python_mark() -> Callable[[], Any]:
    """Place and first word of Python's global stream, which CPython keeps after the object's head."""
    owner = random.random.__self__  # type: ignore[attr-defined]
    address = id(owner) + object.__basicsize__
    if type(owner).__basicsize__ >= object.__basicsize__ + _BYTES:
        place, *words = struct.unpack(f"=i{_WORDS}I", ctypes.string_at(address, _BYTES))
        if (*words, place) == random.getstate()[1]:
            return _reader(address, 2)
    return random.getstate


_NUMPY: int = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]
"""Where numpy's global twister keeps its words, and after them the place."""
_TORCH_MARK, _PYTHON_MARK, _NUMPY_MARK = _torch_mark(), _python_mark(), _reader(_NUMPY, 1 + _WORDS, _WORDS)
_GENERATOR = torch.default_generator
_STREAMS = (
    _Stream(lambda seed: _GENERATOR.set_state(_seeded(seed)), _GENERATOR.get_state, _GENERATOR.set_state, _TORCH_MARK),
    _Stream(random.seed, random.getstate, random.setstate, _PYTHON_MARK),
    _Stream(lambda seed: np.random.seed(seed % 2**32), np.random.get_state, np.random.set_state, _NUMPY_MARK),
)


class PerRankState:
    """The private state of `world_size` ranks. `leave` and `enter` frame a change of turns; `restore` ends the run.

    Every rank starts from `seed`, the caller's default dtype, and what the places of modules have now.
    """

    def __init__(self, world_size: int, seed: int, places: "Sequence[Namespace]", caller: CallerStreams) -> None:
        self._places = tuple(places)
        self._caller = caller
        self._callers_dtype = torch.get_default_dtype()
        self._callers_names = [place.read() for place in self._places]
        caller.keep()
        self._streams = RankStreams(world_size, seed)
        self._dtypes = [torch.get_default_dtype()] * world_size
        self._names: list[list[dict[str, Any]]] = [[] for _ in range(world_size)]
        if self._places:
            from shardproof.harness.engines.threads.state.module_state import own  # noqa: PLC0415

            self._names = [own(self._places) for _ in range(world_size)]
        self._holder = -1

    def enter(self, rank: int) -> None:
        """Make the process's state this rank's."""
        if self._holder == rank:
            return
        self._holder = rank
        if self._dtypes[rank] is not torch.get_default_dtype():
            torch.set_default_dtype(self._dtypes[rank])
        if not self._streams.clean:
            self._streams.enter(rank)
        if self._places:
            for place, mine in zip(self._places, self._names[rank], strict=True):
                place.write(mine)

    def leave(self, rank: int) -> None:
        """Keep the process's state as this rank's."""
        self._dtypes[rank] = torch.get_default_dtype()
        self._streams.leave(rank)
        if self._places:
            self._names[rank] = [place.read() for place in self._places]

    def end(self, rank: int) -> None:
        """The rank has finished: only whether it has drawn still matters."""
        self._streams.leave(rank)

    @property
    def drew(self) -> bool:
        """Whether any rank drew from a random stream of the process, or seeded one."""
        return not self._streams.clean

    def restore(self) -> None:
        """Make the process's state the caller's again."""
        if self._callers_dtype is not torch.get_default_dtype():
            torch.set_default_dtype(self._callers_dtype)
        self._caller.give_back(self._streams)
        for place, was in zip(self._places, self._callers_names, strict=True):
            place.write(was)
