"""Sees every collective on real backends (gloo, NCCL, fake): a kernel for each `c10d::` operator at key BackendSelect.

That key is in every call's key set, above the backends and below autograd and the modes, and c10d has no kernel there.
So in-place and functional calls, DDP's reducer, FSDP2, DTensor, point-to-point and object calls of any thread pass
here, each once, and nothing on the way to other operators is touched. Not seen: calls made on a `Backend` object
itself, symmetric memory, CUDA graph replays. Calls are sent on with `redispatch`; the boxed variant deadlocks against
gloo's mutex.

A synchronous collective on CPU is waited for here, where its caller would wait next, so that its duration is true; on a
GPU nothing waits, and what is told is told in the order of a stream. The completion of an asynchronous call is told on
a GPU alone, by its future, whose callback runs at once in a stream that waits for the collective; not tried, since it
was written without a GPU. That of send and recv is not told: a second wait for gloo's message would wait for a second
message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey

from harness.engines.operators import MESSAGES, OPERATORS, Told, reader, tensors_in
from harness.errors import MachineError
from harness.ledger import Call, Observer

__all__ = ["CallLog", "Interposer", "observing"]

_KEY = "BackendSelect"
_SILENT = {"check_for_nan"}
"""Operators of c10d that send nothing."""


class CallLog(Protocol):
    """Whoever needs more of a call than the ledger does: an engine that compares ranks."""

    def entered(self, told: Told) -> None:
        """A call is about to be issued."""
        ...

    def left(self) -> None:
        """The call entered last, a synchronous one, is complete."""
        ...

    def follow(self, work: Any, outputs: Sequence[Tensor]) -> dist.Work:
        """The work of the call entered last, an asynchronous one; what comes back is given to the program.

        `outputs` are the tensors that the operator returns beside the work.
        """
        ...


class Interposer:
    """While entered, tells the observer of every call that this process issues through the dispatcher.

    Raises MachineError when this torch has an operator that we do not know, when someone else sits at the key already,
    or when a probe call is not seen: a blind recorder must not pass for a silent program.
    """

    def __init__(self, *observers: Observer, log: CallLog | None = None) -> None:
        self._observers = observers
        self._log = log
        self._installed = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as installed:
            library = torch.library.Library("c10d", "IMPL")
            installed.callback(library._destroy)
            for name in _known_operators():
                operator = getattr(torch.ops.c10d, name).default
                library.impl(name, self._kernel(name, operator), _KEY, with_keyset=True)
            self._prove()
            token = _ENTERED.set(self)
            installed.callback(_ENTERED.reset, token)
            self._installed = installed.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._installed.close()

    @contextmanager
    def telling(self, *observers: Observer) -> Iterator[None]:
        """These observers are told too, until the body ends."""
        before = self._observers
        self._observers = (*before, *observers)
        try:
            yield
        finally:
            self._observers = before

    def _kernel(self, name: str, operator: Any) -> Callable[..., Any]:
        read = reader(name, operator)

        def kernel(keys: Any, *arguments: Any) -> Any:
            told = read(arguments)
            rank, call, log = told.rank, told.call, self._log
            if log is not None:
                log.entered(told)
            tickets = [(observer, observer.issued(rank, call)) for observer in self._observers]
            result = operator.redispatch(keys.remove(DispatchKey.BackendSelect), *arguments)
            if not call.is_async and call.op not in MESSAGES:
                if call.device == "cpu":
                    _wait(result)
                if log is not None:
                    log.left()
                _completed(rank, tickets)
            if call.is_async and call.device == "cuda" and call.op not in MESSAGES:
                _when_done(result, partial(_completed, rank, tickets))
            if call.is_async and log is not None:
                return _replaced(result, log.follow)
            return result

        return kernel

    def _prove(self) -> None:
        """Issue one call in a private group of one rank, and see that it is told right."""
        probe, watched, log = _Probe(), self._observers, self._log
        self._observers, self._log = (probe,), None
        try:
            group = dist.ProcessGroup(torch._C._distributed_c10d.HashStore(), 0, 1)
            backend = torch._C._distributed_c10d.FakeProcessGroup._create_internal(0, 1)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
            options.asyncOp = False
            group.allreduce([torch.zeros(8)[2:5]], options)
        finally:
            self._observers, self._log = watched, log
        said = [(c.op, c.reduce_op, c.group, c.dtype, c.shapes, c.payload_bytes, c.is_async) for c in probe.calls]
        if said != [("all_reduce", "max", (0,), "float32", ((3,),), 12, False)]:
            raise _blind(f"a probe all_reduce of 12 bytes was seen as {said}")


_ENTERED: ContextVar[Interposer | None] = ContextVar("shardproof_interposer", default=None)
"""The interposer that was entered around the running code: there is one kernel a process, but many may listen."""


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell the observer of every call in the body: by the interposer that is entered here, else by one of its own."""
    entered = _ENTERED.get()
    with Interposer(observer) if entered is None else entered.telling(observer):
        yield


class _Probe:
    """Keeps the calls that it is told of."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def issued(self, _rank: int, call: Call) -> int:
        self.calls.append(call)
        return 0

    def completed(self, rank: int, ticket: int) -> None:
        """Nothing to keep."""


def _blind(why: str) -> MachineError:
    return MachineError(
        f"torch {torch.__version__}: the recorder of real backends would be blind: {why}. "
        "Run on the in-process engine, or with a torch that this release was tested with (2.11 to 2.13)",
        ranks=(),
        positions=(),
    )


def _known_operators() -> list[str]:
    """Every operator of c10d that communicates. Raises MachineError for one that is new or taken."""
    names = {full.removeprefix("c10d::").partition(".")[0] for full in _all_operators() if full.startswith("c10d::")}
    unknown = names - OPERATORS.keys() - _SILENT
    if unknown or not names:
        raise _blind(f"operators of c10d that are not known here: {' '.join(sorted(unknown)) or 'all'}")
    taken = [name for name in sorted(names) if _has_kernel(f"c10d::{name}", _KEY)]
    if taken:
        raise MachineError(
            f"c10d::{taken[0]} has a kernel at {_KEY} already: one interposer at a time, leave the other one first",
            ranks=(),
            positions=(),
        )
    return sorted(names - _SILENT)


_all_operators: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
_has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key


def _completed(rank: int, tickets: Sequence[tuple[Observer, int]]) -> None:
    for observer, ticket in tickets:
        observer.completed(rank, ticket)


def _wait(result: Any) -> None:
    """Wait for the work in an operator's result; its caller waits too, which then costs nothing."""
    parts = result if isinstance(result, tuple) else (result,)
    for part in parts:
        if isinstance(part, torch.ScriptObject):
            dist.Work.unbox(part).wait()


def _when_done(result: Any, tell: Callable[[], None]) -> None:
    """Tell when the work in an operator's result is done, if its backend has a future of it."""
    parts = result if isinstance(result, tuple) else (result,)
    for part in parts:
        if isinstance(part, torch.ScriptObject):
            with suppress(RuntimeError):
                dist.Work.unbox(part).get_future().add_done_callback(lambda _future: tell())


def _replaced(result: Any, follow: Callable[[Any, Sequence[Tensor]], dist.Work]) -> Any:
    """An operator's result with another work in it."""
    parts = result if isinstance(result, tuple) else (result,)
    outputs = tensors_in([part for part in parts if not isinstance(part, torch.ScriptObject)])
    followed = tuple(
        follow(dist.Work.unbox(part), outputs).boxed() if isinstance(part, torch.ScriptObject) else part
        for part in parts
    )
    return followed if isinstance(result, tuple) else followed[0]
