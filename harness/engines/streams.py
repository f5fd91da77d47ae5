"""The random streams of Python and numpy: the caller's kept aside, and every rank's own.

They are costly to read and write (numpy's 36 us each way), and few programs draw from them between two collectives.
Both are Mersenne twisters in memory: a draw moves the place in the words, and after the last word makes new words. So
place and first word are compared with the start, and the streams are swapped in full only once they differ.
"""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Caller", "Streams"]

_WORDS = 624
_BYTES = 4 * (1 + _WORDS)
_HAS_GAUSS = 3
"""Where numpy's legacy state says that the second of two normal numbers is kept for the next draw."""


class _Pair(NamedTuple):
    python: Any
    numpy: Any


class Caller:
    """The caller's streams. A state of numpy's that was read is used again while its words stay the same."""

    def __init__(self) -> None:
        self._address = _numpy_address()
        self._words = b""
        self._pair = _Pair(None, None)

    def keep(self) -> None:
        """Read both streams."""
        words = ctypes.string_at(self._address, _BYTES)
        known = words == self._words and not self._pair.numpy[_HAS_GAUSS]
        self._words = words
        self._pair = _Pair(random.getstate(), self._pair.numpy if known else np.random.get_state())

    def give_back(self, touched: bool) -> None:
        """Write both streams; `touched`: somebody has drawn since they were seeded."""
        random.setstate(self._pair.python)
        if touched or self._pair.numpy[_HAS_GAUSS]:
            np.random.set_state(self._pair.numpy)
        else:
            ctypes.memmove(self._address, self._words, _BYTES)


class Streams:
    """The streams of all ranks of a run; the process's are at `seed` from here on."""

    def __init__(self, world_size: int, seed: int) -> None:
        self._seed = seed
        self._pairs: list[_Pair | None] = [None] * world_size
        self.mixed = False
        _seed(seed)
        address = _numpy_address()
        self._numpy_word = ctypes.c_uint32.from_address(address)
        self._numpy_place = ctypes.c_uint32.from_address(address + 4 * _WORDS)
        self._start = self._marks()

    def enter(self, rank: int) -> None:
        """Make the process's streams this rank's."""
        if self.mixed:
            pair = self._pairs[rank]
            if pair is None:
                _seed(self._seed)
            else:
                random.setstate(pair.python)
                np.random.set_state(pair.numpy)

    def leave(self, rank: int) -> None:
        """Keep the process's streams as this rank's."""
        if self.mixed or self._marks() != self._start:
            self.mixed = True
            self._pairs[rank] = _Pair(random.getstate(), np.random.get_state())

    def _marks(self) -> tuple[Any, ...]:
        if _PYTHON_PLACE is None or _PYTHON_WORD is None:
            return (random.getstate(), self._numpy_place.value, self._numpy_word.value)
        return (_PYTHON_PLACE.value, _PYTHON_WORD.value, self._numpy_place.value, self._numpy_word.value)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _numpy_address() -> int:
    """Where numpy's global Mersenne twister keeps its words, and after them the place."""
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return int(bits.ctypes.state_address)


def _python_marks() -> tuple[ctypes.c_uint32 | None, ctypes.c_uint32 | None]:
    """Place and first word of Python's global stream: in CPython after the object's head; None when not found there."""
    owner = random.random.__self__  # type: ignore[attr-defined]
    if type(owner).__basicsize__ < object.__basicsize__ + _BYTES:
        return None, None
    address = id(owner) + object.__basicsize__
    place, *words = struct.unpack(f"=i{_WORDS}I", ctypes.string_at(address, _BYTES))
    if (*words, place) != random.getstate()[1]:
        return None, None
    return ctypes.c_uint32.from_address(address), ctypes.c_uint32.from_address(address + 4)


_PYTHON_PLACE, _PYTHON_WORD = _python_marks()
