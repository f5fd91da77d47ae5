"""Asynchronous works of real backends, followed: which were waited for, and in which one a rank waits now.

The program gets a FollowedWork in place of the backend's work, to which it delegates; `wait` and the methods that
amount to it are recorded. After a wait the backend's work is dropped, since it holds the tensors that it moved.
FollowedWorks stay until the run ends: torch's C++ code holds works without holding their Python side.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shardproof.harness.engines.calls.callers import waits_when_read

_WAITING_IN = (
    *("engines/interposer.py", "processes/waits.py", "forked/worker.py"),  # in the last gloo connects
    *("distributed/distributed_c10d.py", "distributed/_functional_collectives.py"),
)


def is_waiting(file: str) -> bool:
    """Whether a rank whose innermost Python frame is in this file waits for a call to complete."""
    return file.endswith(_WAITING_IN)


class FollowedWork(dist.Work):
    """A work that records when it is waited for, by calling `waited_for` at its first wait."""

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
        """Let the current stream wait, or the caller where there is none."""
        self._finish("synchronize")

    def block_current_stream(self) -> None:
        """Let the current stream wait."""
        self._finish("block_current_stream")

    def get_future(self) -> Any:
        """The backend's future; to take it counts as a wait."""
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
        return self._inner is None or bool(self._inner.is_completed())

    def is_success(self) -> bool:
        """Whether it is complete without an error."""
        return self._inner is None or bool(self._inner.is_success())

    def exception(self) -> Any:
        """Its error, None without one."""
        return None if self._inner is None else self._inner.exception()

    def source_rank(self) -> int:
        """The sender, of a receive."""
        return int(self._source if self._inner is None else self._inner._source_rank())

    _source_rank = source_rank
    _source = -1

    def _mark(self) -> None:
        if not self.waited:
            self.waited = True
            self._waited_for()

    def _finish(self, how: str, *words: Any) -> None:
        self._mark()
        if self._inner is None:
            return
        with self._waits.waiting(self._number):
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

    def unwaited(self) -> tuple[int, ...]:
        """The places, among the asynchronous calls of the rank, of those that were never waited for.

        Results that wait when they are read are not among them: nothing read them.
        """
        return tuple(place for place, work in enumerate(self._works) if not work.waited and not work.waits_when_read)

    @contextmanager
    def waiting(self, number: int) -> Any:
        """The rank waits for this work until the body ends; where it raises, the rank goes on with its next call."""
        self._report(number)
        yield
        self._report(0)
