"""Which results the program reads before its rank's next call: a late arrival of any other result has no effect there.

A result is read when an operator other than a view is given its memory. Observed by a dispatch mode in the rank's
thread, so in backward too; a program that reads memory without an operator (`data_ptr`, numpy) is not observed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from harness.engines.threads.intervention import Intervention
from harness.engines.threads.matcher import CollectiveMatcher
from harness.engines.threads.scheduler import Scheduler
from harness.engines.threads.work import RankCall
from harness.faults import RankCallIndex
from harness.ledger import Observer
from harness.torch_internals.modes import DispatchMode, FakeTensor, leaves, take_themselves_apart
from harness.torch_internals.operators import short_name


class Touches(Intervention):
    """The intervention that changes nothing and watches. `on_rank` is to be entered around a rank's program."""

    def __init__(self) -> None:
        self._pending: dict[int, dict[int, list[RankCallIndex]]] = {}
        self._touched: set[RankCallIndex] = set()

    def matcher(self, world_size: int, scheduler: Scheduler, observer: Observer | None) -> CollectiveMatcher:
        """Calls are computed as issued."""
        self._pending = {rank: {} for rank in range(world_size)}
        self._touched = set()
        return _Watching(world_size, scheduler, observer, self._pending)

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """Watch this thread's operators."""
        with _Mode(self._pending[rank], self._touched):
            yield

    @property
    def touched(self) -> frozenset[RankCallIndex]:
        """After the run, (rank, call index) of the results that were read, or for which no next call came."""
        waiting = (place for results in self._pending.values() for places in results.values() for place in places)
        return frozenset(self._touched).union(waiting)


class _Mode(DispatchMode):
    """Notes which of the pending results an operator is given."""

    def __init__(self, pending: dict[int, list[RankCallIndex]], touched: set[RankCallIndex]) -> None:
        super().__init__()
        self._pending, self._touched = pending, touched

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if take_themselves_apart(types):
            return NotImplemented
        if self._pending and not func.is_view and short_name(func) != "wait_tensor":
            for value in leaves((args, kwargs)):
                if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                    self._touched.update(self._pending.get(_memory(value), ()))
        return func(*args, **(kwargs or {}))


class _Watching(CollectiveMatcher):
    """Keeps the results that came since each rank's last call."""

    def __init__(
        self,
        world_size: int,
        scheduler: Scheduler,
        observer: Observer | None,
        pending: dict[int, dict[int, list[RankCallIndex]]],
    ) -> None:
        super().__init__(world_size, scheduler, observer)
        self._pending = pending
        self._issued = [-1] * world_size
        self._places: dict[RankCall, RankCallIndex] = {}

    def issue(self, call: RankCall) -> None:
        """As in the base class; results that came before the rank's call are no longer pending."""
        self._count(call)
        super().issue(call)

    def post(self, call: RankCall) -> None:
        """As in the base class; results that came before the rank's call are no longer pending."""
        self._count(call)
        super().post(call)

    def close(self, call: RankCall) -> None:
        """As in the base class; from here on the program may read the result."""
        super().close(call)
        for tensor in call.outputs:
            self._pending[call.rank].setdefault(_memory(tensor), []).append(self._places[call])

    def _count(self, call: RankCall) -> None:
        self._pending[call.rank].clear()
        self._issued[call.rank] += 1
        self._places[call] = call.rank, self._issued[call.rank]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
