"""Asynchronous works of real backends, followed: which were waited for, and in which one a rank waits now.

Torch gives the program our work in place of the backend's, which does everything; only `wait` and what stands for it
are noticed on the way. After a wait the backend's work is let go, since it holds the tensors that it moved. Our own
objects stay until the run ends: torch's C++ code holds works without holding their Python side.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

__all__ = ["FollowedWork", "Waits"]


class FollowedWork(dist.Work):
    """A work that tells when it is waited for."""

    def __init__(
        self, inner: Any, outputs: Sequence[Tensor], number: int, waits: Waits, heard: Callable[[], None]
    ) -> None:
        super().__init__()
        self._heard = heard
        self._inner = inner
        self._number = number
        self._waits = waits
        self._outputs = [weakref.ref(tensor) for tensor in outputs]
        self.waited = False

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
        """The backend's future; whoever asks for it is taken to wait for it."""
        self._hear()
        if self._inner is not None:
            return self._inner.get_future()
        future: Future[list[Tensor]] = Future()
        future.set_result(self.result())
        return future

    def result(self) -> list[Tensor]:
        """The outputs; after a wait those that somebody still holds."""
        if self._inner is not None:
            found: list[Tensor] = self._inner.result()
            return found
        return [tensor for reference in self._outputs if (tensor := reference()) is not None]

    def is_completed(self) -> bool:
        """Whether it is complete, without waiting."""
        return self._inner is None or bool(self._inner.is_completed())

    def is_success(self) -> bool:
        """Whether it is complete and well."""
        return self._inner is None or bool(self._inner.is_success())

    def exception(self) -> Any:
        """What went wrong in it."""
        return None if self._inner is None else self._inner.exception()

    def source_rank(self) -> int:
        """The sender, of a receive."""
        return int(self._source if self._inner is None else self._inner._source_rank())

    _source_rank = source_rank
    _source = -1

    def _hear(self) -> None:
        if not self.waited:
            self.waited = True
            self._heard()

    def _finish(self, how: str, *words: Any) -> None:
        self._hear()
        if self._inner is None:
            return
        with self._waits.waiting(self._number):
            getattr(self._inner, how)(*words)
        with suppress(RuntimeError):  # only a receive has a source
            self._source = self._inner._source_rank()
        self._inner = None


class Waits:
    """The works of a run in the order of issue; `tell(number)` hears which is waited for: 1 + its place, 0 for none."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._works: list[FollowedWork] = []

    def begin(self) -> None:
        """A run begins."""
        self._works.clear()

    def follow(self, inner: Any, outputs: Sequence[Tensor], waited: Callable[[], None]) -> FollowedWork:
        """What the program gets in place of the backend's work; `waited` hears its first wait."""
        work = FollowedWork(inner, outputs, len(self._works) + 1, self, waited)
        self._works.append(work)
        return work

    def unwaited(self) -> tuple[int, ...]:
        """The places of the works that nobody waited for, among the asynchronous calls of the rank."""
        return tuple(place for place, work in enumerate(self._works) if not work.waited)

    @contextmanager
    def waiting(self, number: int) -> Any:
        """The rank waits for this work until the body ends."""
        self._tell(number)
        try:
            yield
        finally:
            self._tell(0)
