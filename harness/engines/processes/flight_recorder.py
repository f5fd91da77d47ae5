"""The board: what one rank issues, written before it is issued to memory that the supervisor reads at any time.

It outlives the rank, so it can be read when the rank hangs, or has been killed in the middle of a call. A record is a
time (s, monotonic) and the number of a fact; facts (what is said, to whom, from which line) are written once each, so
that a record costs a few microseconds. The memory is an anonymous file: nothing is left of it when nobody holds it.

    header   run, records, facts, bytes of facts, 1 + the record of the synchronous call that is not complete, thread,
             1 + the place among the asynchronous calls of the one that is waited for
    records  a ring of _RECORDS
    facts    pickles, each after its length; they stay from run to run

What a rank's thread prints of itself when it is asked for its stack goes behind all that (forked.stacks).
"""

from __future__ import annotations

import functools
import mmap
import os
import pickle
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from harness.callers import Caller, issued_at
from harness.engines.calls.operators import Told
from harness.engines.calls.signature import Signature
from harness.engines.processes.waits import Waits

__all__ = ["BOARD_BYTES", "Fact", "Reader", "Writer", "anonymous_file"]

_HEADER = struct.Struct("<7Q")
_RECORD = struct.Struct("<dQ")
_LENGTH = struct.Struct("<I")
_RECORDS = 1 << 18
_FIRST_RECORD = 64
_FIRST_FACT = _FIRST_RECORD + _RECORDS * _RECORD.size
BOARD_BYTES = _FIRST_FACT + (32 << 20)
"""Most of it is never touched, hence never there."""
_RUN, _COUNT, _FACTS, _FACT_BYTES, _INSIDE, _THREAD, _WAITS = range(7)


class Fact(NamedTuple):
    """A call as its rank says it; `peer` is a global rank or -1, `caller` is "file:line in function".

    `sends` and `expects` are those of calls.operators.Told. When a group is made, op is "new_group", `group`
    the new group's number, and `ranks` those of which it is made.
    """

    group: str
    ranks: tuple[int, ...]
    description: str
    said: Signature
    peer: int
    tag: int
    is_async: bool
    sends: tuple[Any, ...]
    expects: tuple[Any, ...]
    caller: str


def anonymous_file() -> int:
    """A descriptor of a file without a name, long enough for a board."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shardproof board")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, BOARD_BYTES)
    return descriptor


class Writer:
    """The rank's side; a harness.engines.interposer.CallLog."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, BOARD_BYTES)
        self._known: dict[tuple[object, ...], int] = {}
        self._count = self._fact_bytes = 0
        self.waits = Waits(functools.partial(self._put, _WAITS))
        self.follow = self.waits.follow

    def begin(self, run: int) -> None:
        """A run begins: no record yet."""
        self._count = 0
        _HEADER.pack_into(
            self._memory, 0, run, 0, len(self._known), self._fact_bytes, 0, threading.get_ident() & (2**64 - 1), 0
        )
        self.waits.begin()

    def entered(self, told: Told) -> None:
        """Write a call down before it is issued."""
        call = told.call
        fact = (call.group_desc, told.said, call.peer, told.tag, call.is_async, told.sends, told.expects)
        self._write((told.group, call.group, *fact), issued_at(sys._getframe(1)), is_async=call.is_async)

    def makes(self, group: str, ranks: tuple[int, ...]) -> None:
        """Write down that the rank makes a numbered group, or takes part in making it."""
        said = Signature("new_group", "single", "", -1, "", ())
        self._write((group, ranks, "", said, -1, 0, True, (), ()), issued_at(sys._getframe(1)), is_async=True)

    def _write(self, fact: tuple[Any, ...], found: Caller | None, *, is_async: bool) -> None:
        key = (fact, found)
        number = self._known.get(key)
        if number is None:
            number = self._learn(key, Fact._make((*fact, str(found or ""))))
        place = _FIRST_RECORD + self._count % _RECORDS * _RECORD.size
        _RECORD.pack_into(self._memory, place, time.monotonic(), number)
        self._count += 1
        self._put(_COUNT, self._count)
        self._put(_INSIDE, 0 if is_async else self._count)

    def left(self) -> None:
        """The synchronous call entered last is complete."""
        self._put(_INSIDE, 0)

    def _learn(self, key: tuple[object, ...], fact: Fact) -> int:
        packed = pickle.dumps(fact)
        start = _FIRST_FACT + self._fact_bytes
        if start + _LENGTH.size + len(packed) > BOARD_BYTES:
            raise RuntimeError(f"a rank issued more than {len(self._known)} different calls: the board is full")
        _LENGTH.pack_into(self._memory, start, len(packed))
        self._memory[start + _LENGTH.size : start + _LENGTH.size + len(packed)] = packed
        self._fact_bytes += _LENGTH.size + len(packed)
        self._known[key] = number = len(self._known)
        self._put(_FACT_BYTES, self._fact_bytes)
        self._put(_FACTS, len(self._known))
        return number

    def _put(self, field: int, value: int) -> None:
        struct.pack_into("<Q", self._memory, 8 * field, value)


class Reader:
    """The supervisor's side; reads on from where it stopped."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, BOARD_BYTES, prot=mmap.PROT_READ)
        self._facts: list[Fact] = []
        self._run = self._read = self._fact_bytes = 0

    def begin(self, run: int) -> None:
        """Read from the first record of this run on."""
        self._run, self._read = run, 0

    def new(self) -> Iterator[tuple[float, Fact]]:
        """The calls written since the last time: when, and what."""
        header = self._header()
        if header[_RUN] != self._run:
            return
        while len(self._facts) < header[_FACTS]:
            start = _FIRST_FACT + self._fact_bytes
            (length,) = _LENGTH.unpack_from(self._memory, start)
            self._facts.append(pickle.loads(self._memory[start + _LENGTH.size : start + _LENGTH.size + length]))
            self._fact_bytes += _LENGTH.size + length
        self._read = max(self._read, header[_COUNT] - _RECORDS)
        while self._read < header[_COUNT]:
            place = _FIRST_RECORD + self._read % _RECORDS * _RECORD.size
            at_s, number = _RECORD.unpack_from(self._memory, place)
            self._read += 1
            yield at_s, self._facts[number]

    def inside(self) -> bool:
        """Whether the call written last is a synchronous one that is not known to be complete."""
        header = self._header()
        return header[_RUN] == self._run and header[_INSIDE] == header[_COUNT] > 0

    def waits(self) -> int:
        """1 + the place, among the asynchronous calls, of the one for which the rank waits; 0 for none."""
        header = self._header()
        return header[_WAITS] if header[_RUN] == self._run else 0

    def thread(self) -> int:
        """The identity of the thread that runs the rank's program."""
        return int(self._header()[_THREAD])

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def _header(self) -> tuple[int, ...]:
        return _HEADER.unpack_from(self._memory, 0)
