"""The flight recorder of a rank's process: calls, recorded before they are issued, and the works that it waits for.

The idea is that of torch's NCCL flight recorder (torch/csrc/distributed/c10d/FlightRecorder.hpp), for every backend and
without a dump. Ours is memory that the driver can read and that outlives the rank, so it can be read when the rank
hangs, or was killed in the middle of a call. A record is a time (s, monotonic) and the number of a call. Calls
(signature, peer, user's line) are written once each, so that a record costs a few microseconds. The memory is an
anonymous file, gone when no process holds it.

    header   run, records, calls, bytes of calls, 1 + the record of the synchronous call that is not complete, thread,
             1 + the place among the asynchronous calls of the one that is waited for
    records  a ring of _RECORDS
    calls    pickles, each after its length; they stay from run to run

After them the file holds the stacks that the process prints on a signal (processes.supervisor).

Asynchronous works of real backends are followed: the program gets a FollowedWork in place of the backend's work, to
which it delegates; `wait` and the methods that amount to it are recorded. After a wait the backend's work is dropped,
since it holds the tensors that it moved. FollowedWorks stay until the run ends: torch's C++ code holds works without
holding their Python side.
"""

import functools
import mmap
import os
import pickle
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shardproof.harness.engines.calls.callers import Caller, issued_at, waits_when_read
from shardproof.harness.engines.calls.operators import OperatorCall
from shardproof.harness.engines.calls.pending import MAKES_GROUP
from shardproof.harness.engines.calls.signature import Signature
from shardproof.harness.errors import MachineError

_WAITING_IN = (
    *("engines/interposer.py", "processes/flight_recorder.py", "forked/worker.py"),  # gloo connects in the last
    *("distributed/distributed_c10d.py", "distributed/_functional_collectives.py"),
)


def is_waiting(file: str) -> bool:
    """Whether a rank whose innermost Python frame is in this file waits for a call to complete."""
    return file.endswith(_WAITING_IN)


class FollowedWork(dist.Work):
    """A work that records when it is waited for, by calling `waited_for` at its first wait.

    A program that has asked, and was answered that the work is complete, needs no wait.
    """

    def __init__(
        self, inner: Any, outputs: Sequence[Tensor], number: int, waits: "Waits", waited_for: Callable[[], None]
    ) -> None:
        super().__init__()
        self._waited_for = waited_for
        self._inner = inner
        self._number = number
        self._waits = waits
        self._outputs = [weakref.ref(tensor) for tensor in outputs]
        self.waited = self.waits_when_read = False

    def wait(self, timeout: Any = None) -> bool:
        """Wait as the backend does."""
        self._finish("wait", *((timeout,) if timeout else ()))
        return True

    def synchronize(self) -> None:
        """Make the current stream wait, or the caller if there is no stream."""
        self._finish("synchronize")

    def block_current_stream(self) -> None:
        """Let the current stream wait."""
        self._finish("block_current_stream")

    def get_future(self) -> Any:
        """The backend's future. Taking it counts as a wait."""
        self._mark()
        if self._inner is not None:
            return self._inner.get_future()
        future: Future[list[Tensor]] = Future()
        future.set_result(self.result())
        return future

    def result(self) -> list[Tensor]:
        """The outputs; after a wait those that the program still holds."""
        if self._inner is not None:
            found: list[Tensor] = self._inner.result()
            return found
        return [tensor for reference in self._outputs if (tensor := reference()) is not None]

    def is_completed(self) -> bool:
        """Whether it is complete, without waiting."""
        return self._ask_work("is_completed")

    def is_success(self) -> bool:
        """Whether it is complete without an error."""
        return self._ask_work("is_success")

    def exception(self) -> Any:
        """Its error, None without one."""
        return None if self._inner is None else self._inner.exception()

    def source_rank(self) -> int:
        """The sender, of a receive."""
        return int(self._source if self._inner is None else self._inner._source_rank())

    _source_rank = source_rank
    _source = -1

    def _ask_work(self, question: str) -> bool:
        complete = self._inner is None or bool(getattr(self._inner, question)())
        if complete:
            self._mark()
        return complete

    def _mark(self) -> None:
        if not self.waited:
            self.waited = True
            self._waited_for()

    def _finish(self, how: str, *words: Any) -> None:
        self._mark()
        if self._inner is None:
            return
        with self._waits.wait_for(self._number):
            getattr(self._inner, how)(*words)
        with suppress(RuntimeError):  # only a receive has a source
            self._source = self._inner._source_rank()
        self._inner = None


class Waits:
    """The works of a run in the order of issue; `report(n)` gets 1 + the place of the one waited for, or 0."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._works: list[FollowedWork] = []

    def begin(self) -> None:
        """A run begins."""
        self._works.clear()

    def follow(self, inner: Any, outputs: Sequence[Tensor], waited: Callable[[], None]) -> FollowedWork:
        """The work to give to the program in place of the backend's; `waited` is called at its first wait."""
        work = FollowedWork(inner, outputs, len(self._works) + 1, self, waited)
        work.waits_when_read = waits_when_read(sys._getframe(1))
        self._works.append(work)
        return work

    def find_unwaited(self) -> tuple[int, ...]:
        """The places, among the asynchronous calls of the rank, of those that were never waited for.

        Results that wait when they are read are not among them: nothing read them.
        """
        return tuple(place for place, work in enumerate(self._works) if not work.waited and not work.waits_when_read)

    @contextmanager
    def wait_for(self, number: int) -> Any:
        """The rank waits for this work until the body ends. If the body raises, the report stays to the next call."""
        self._report(number)
        yield
        self._report(0)


_HEADER = struct.Struct("<7Q")
_RECORD = struct.Struct("<dQ")
_LENGTH = struct.Struct("<I")
_RECORDS = 1 << 18
_FIRST_RECORD = 64
_FIRST_CALL = _FIRST_RECORD + _RECORDS * _RECORD.size
RECORDER_BYTES = _FIRST_CALL + (32 << 20)
"""Virtual memory, of which most is never used."""
_RUN, _COUNT, _CALLS, _CALL_BYTES, _INSIDE, _THREAD, _WAITS = range(7)


class RecordedCall(NamedTuple):
    """A call as its rank issues it; `peer` is a global rank or -1, `caller` is "file:line in function".

    `sends` and `expects` are those of OperatorCall. When a group is made, op is "new_group", `group` the
    new group's number, and `ranks` its ranks.
    """

    group: str
    ranks: tuple[int, ...]
    description: str
    signature: Signature
    peer: int
    tag: int
    is_async: bool
    sends: tuple[Any, ...]
    expects: tuple[Any, ...]
    caller: str


class ReadCalls(NamedTuple):
    """What was read from a rank's flight recorder: the calls since the last time, each with its time.

    `inside`: the call recorded last is a synchronous one that is not known to be complete. `waits`: 1 + the place,
    among the asynchronous calls, of the one for which the rank waits; 0 for none.
    """

    new: tuple[tuple[float, RecordedCall], ...] = ()
    inside: bool = False
    waits: int = 0


def anonymous_file() -> int:
    """A descriptor of a file without a name, large enough for a flight recorder. Raises MachineError if a limit of the
    process forbids one.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shardproof flight recorder")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, RECORDER_BYTES)
    except OSError as problem:
        os.close(descriptor)
        rule = f"a rank's calls need a file of {RECORDER_BYTES >> 20} MiB in memory"
        raise MachineError(f"{rule} ({problem.strerror}); legal: a larger `ulimit -f`") from problem
    return descriptor


class FlightRecorder:
    """The rank's side, which writes; a harness.engines.interposer.CallLog."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, RECORDER_BYTES)
        self._known: dict[tuple[object, ...], int] = {}
        self._count = self._call_bytes = 0
        self.waits = Waits(functools.partial(self._put, _WAITS))
        self.follow = self.waits.follow

    def begin(self, run: int) -> None:
        """A run begins: no record yet."""
        self._count = 0
        _HEADER.pack_into(
            self._memory, 0, run, 0, len(self._known), self._call_bytes, 0, threading.get_ident() & (2**64 - 1), 0
        )
        self.waits.begin()

    def on_enter(self, issued: OperatorCall) -> None:
        """Record a call before it is issued. Raises RuntimeError if there is no room for another kind of call."""
        call = issued.call
        key = (call.group_desc, issued.signature, call.peer, issued.tag, call.is_async, issued.sends, issued.expects)
        self._write((issued.group, call.group, *key), issued_at(sys._getframe(1)), is_async=call.is_async)

    def makes_group(self, group: str, ranks: tuple[int, ...]) -> None:
        """Record that the rank makes a numbered group, of which it may be no member."""
        key = (group, ranks, "", MAKES_GROUP, -1, 0, True, (), ())
        self._write(key, issued_at(sys._getframe(1)), is_async=True)

    def on_exit(self) -> None:
        """The synchronous call entered last is complete."""
        self._put(_INSIDE, 0)

    def _write(self, call: tuple[Any, ...], caller: Caller | None, *, is_async: bool) -> None:
        key = (call, caller)
        number = self._known.get(key)
        if number is None:
            number = self._add(key, RecordedCall._make((*call, str(caller or ""))))
        place = _FIRST_RECORD + self._count % _RECORDS * _RECORD.size
        _RECORD.pack_into(self._memory, place, time.monotonic(), number)
        self._count += 1
        self._put(_COUNT, self._count)
        self._put(_WAITS, 0)
        self._put(_INSIDE, 0 if is_async else self._count)

    def _add(self, key: tuple[object, ...], call: RecordedCall) -> int:
        packed = pickle.dumps(call)
        start = _FIRST_CALL + self._call_bytes
        if start + _LENGTH.size + len(packed) > RECORDER_BYTES:
            raise RuntimeError(
                f"a rank issued more than {len(self._known)} different calls: its flight recorder is full"
            )
        _LENGTH.pack_into(self._memory, start, len(packed))
        self._memory[start + _LENGTH.size : start + _LENGTH.size + len(packed)] = packed
        self._call_bytes += _LENGTH.size + len(packed)
        self._known[key] = number = len(self._known)
        self._put(_CALL_BYTES, self._call_bytes)
        self._put(_CALLS, len(self._known))
        return number

    def _put(self, field: int, value: int) -> None:
        struct.pack_into("<Q", self._memory, 8 * field, value)


class Recording:
    """The reader's side. Each look goes on where the last one stopped."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, RECORDER_BYTES, prot=mmap.PROT_READ)
        self._calls: list[RecordedCall] = []
        self._run = self._read = self._call_bytes = 0

    def begin(self, run: int) -> None:
        """Read from the first record of this run on."""
        self._run, self._read = run, 0

    def read(self) -> ReadCalls:
        """Records of this run since the last time."""
        header = self._header()
        if header[_RUN] != self._run:
            return ReadCalls()
        while len(self._calls) < header[_CALLS]:
            start = _FIRST_CALL + self._call_bytes
            (length,) = _LENGTH.unpack_from(self._memory, start)
            self._calls.append(pickle.loads(self._memory[start + _LENGTH.size : start + _LENGTH.size + length]))
            self._call_bytes += _LENGTH.size + length
        places = range(max(self._read, header[_COUNT] - _RECORDS), header[_COUNT])
        self._read = max(self._read, header[_COUNT])  # struct writes zeros before it writes a number
        records = (_RECORD.unpack_from(self._memory, _FIRST_RECORD + i % _RECORDS * _RECORD.size) for i in places)
        new = tuple((at_s, self._calls[number]) for at_s, number in records)
        return ReadCalls(new, header[_INSIDE] == header[_COUNT] > 0, header[_WAITS])

    def thread(self) -> int:
        """The identity of the thread that runs the rank's program."""
        return int(self._header()[_THREAD])

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()

    def _header(self) -> tuple[int, ...]:
        return _HEADER.unpack_from(self._memory, 0)
