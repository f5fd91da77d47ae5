"""Calls that in-process ranks have issued, and the works of torch through which programs wait for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shardproof.harness.engines.calls.arithmetic import Combine, Operands
from shardproof.harness.engines.calls.callers import Caller
from shardproof.harness.engines.calls.pending import ANY, PendingCollective, PendingMessage, RankGroup
from shardproof.harness.engines.calls.signature import Signature
from shardproof.harness.torch_internals.groups import answers_torch


@dataclass(slots=True, eq=False)
class RankCall:
    """A call of a rank on its process group: what it issues, and from then on the state of the call.

    Group rank `member` of `group`, global rank `rank`, issues the call. `payload` are the tensors whose bytes the
    ledger counts. `peer` (a group rank, or ANY) and `tag` are those of a point-to-point call, whose `operands` have an
    output or an input alone. `outputs` are the program's tensors that it writes. Set when it is issued: `number` counts
    the rank's calls in the group, `event` is the state over all ranks, `ticket` the observer's. `origin` is the user's
    line of an asynchronous call. `waits_when_read`: whether the program gets a result that waits by itself. `waited`:
    whether a wait has returned.
    """

    group: RankGroup
    member: int
    rank: int
    signature: Signature
    operands: Operands
    outputs: Sequence[Tensor]
    combine: Combine
    payload: Sequence[Tensor]
    is_async: bool
    peer: int = ANY
    tag: int = 0
    event: PendingCollective | PendingMessage = field(init=False)
    number: int = field(init=False)
    ticket: int | None = None
    origin: Caller | None = None
    waits_when_read: bool = False
    waited: bool = False


class _Waited(dist.Work):
    """A work of which all follows from `wait`, `is_completed` and `result`. A failed call raises in `wait`."""

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    block_current_stream = synchronize

    def is_success(self) -> bool:
        """The same as `is_completed`."""
        return self.is_completed()

    def exception(self) -> None:
        """None."""

    def get_future(self) -> Future[list[Tensor]]:
        """A completed future of the outputs, after a wait: C++ would wait for it and no other rank could run."""
        future: Future[list[Tensor]] = Future()
        future.set_result(self.result())
        return future


@answers_torch
class Work(_Waited):
    """An asynchronous call. `wait` and `get_future` let other ranks run until the call is complete."""

    def __init__(self, call: RankCall, wait: Callable[[RankCall], None]) -> None:
        super().__init__()
        self._call = call
        self._wait = wait

    def wait(self, timeout: object = None) -> bool:
        """Return when the call is complete; another rank may run meanwhile."""
        self._wait(self._call)
        return True

    def is_completed(self) -> bool:
        """Whether the call is complete, without waiting."""
        return self._call.event.done

    def result(self) -> list[Tensor]:
        """The outputs, when complete."""
        self.wait()
        return list(self._call.outputs)

    def source_rank(self) -> int:
        """The group rank of the sender, of a receive that is complete; -1 for other calls."""
        event = self._call.event
        return event.peer if isinstance(event, PendingMessage) and self._call.signature.op == "recv" else -1


class _CompleteWork(_Waited):
    """The work of any synchronous call, which returns when it is complete; it has no outputs of its own."""

    def wait(self, timeout: object = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


COMPLETE = _CompleteWork()


class BatchedWorks(_Waited):
    """The works of one coalescing block, waited for together."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = tuple(works)

    def wait(self, timeout: object = None) -> bool:
        """Return when all are complete."""
        return all([work.wait() for work in self._works])

    def is_completed(self) -> bool:
        """Whether all are complete, without waiting."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Tensor]:
        """The outputs of all."""
        return [tensor for work in self._works for tensor in work.result()]
