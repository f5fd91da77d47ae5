"""Which results the program looks at before its rank's next call: the proof that a late arrival there is not noticed.

A result is looked at when an operator other than a view is given its memory. Seen from a dispatch mode in the rank's
thread, so in backward too; a program that reads memory without an operator (`data_ptr`, numpy) is not seen to look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from harness.engines.calls.arithmetic import Combine, Operands
from harness.engines.calls.pending import Group
from harness.engines.calls.signature import Signature
from harness.engines.threads.intervention import Plain
from harness.engines.threads.matcher import Exchange, Work
from harness.engines.threads.scheduler import Baton
from harness.faults import Place
from harness.ledger import Observer
from harness.torch_internals.modes import DispatchMode, leaves

__all__ = ["Touches"]


class Touches(Plain):
    """The intervention that changes nothing and watches. `on_rank` is to be entered around a rank's program."""

    def __init__(self) -> None:
        self._pending: dict[int, dict[int, list[Place]]] = {}
        self._touched: set[Place] = set()

    def exchange(self, world_size: int, baton: Baton, observer: Observer | None) -> Exchange:
        """Calls do what they say."""
        self._pending = {rank: {} for rank in range(world_size)}
        self._touched = set()
        return _Watching(world_size, baton, observer, self._pending)

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """Watch this thread's operators."""
        with _Mode(self._pending[rank], self._touched):
            yield

    @property
    def touched(self) -> frozenset[Place]:
        """After the run, (rank, call index) of the results that were looked at, or for which no next call came."""
        waiting = (place for results in self._pending.values() for places in results.values() for place in places)
        return frozenset(self._touched).union(waiting)


class _Mode(DispatchMode):
    """Notes which of the pending results an operator is given."""

    def __init__(self, pending: dict[int, list[Place]], touched: set[Place]) -> None:
        super().__init__()
        self._pending, self._touched = pending, touched

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._pending and not func.is_view:
            for value in leaves((args, kwargs)):
                if isinstance(value, Tensor):
                    self._touched.update(self._pending.get(_memory(value), ()))
        return func(*args, **(kwargs or {}))


class _Watching(Exchange):
    """Tells which results came since each rank's last call."""

    def __init__(
        self, world_size: int, baton: Baton, observer: Observer | None, pending: dict[int, dict[int, list[Place]]]
    ) -> None:
        super().__init__(world_size, baton, observer)
        self._pending = pending
        self._issued = [-1] * world_size
        self._places: dict[Work, Place] = {}

    def issue(
        self,
        group: Group,
        member: int,
        said: Signature,
        operands: Operands,
        combine: Combine,
        payload: Sequence[Tensor],
        is_async: bool,
    ) -> Work:
        """As in any exchange."""
        return self._placed(
            group.ranks[member],
            lambda: Exchange.issue(self, group, member, said, operands, combine, payload, is_async),
        )

    def post(
        self, group: Group, member: int, said: Signature, peer: int, tag: int, tensor: Tensor, is_async: bool
    ) -> Work:
        """As in any exchange."""
        return self._placed(
            group.ranks[member], lambda: Exchange.post(self, group, member, said, peer, tag, tensor, is_async)
        )

    def close(self, work: Work) -> None:
        """As in any exchange; from here on the program may look at the result."""
        super().close(work)
        for tensor in work.outputs:
            self._pending[work.rank].setdefault(_memory(tensor), []).append(self._places[work])

    def _placed(self, rank: int, issue: Callable[[], Work]) -> Work:
        self._pending[rank].clear()
        self._issued[rank] += 1
        place = rank, self._issued[rank]
        work = issue()
        self._places[work] = place
        return work


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
