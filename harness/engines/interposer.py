"""Observes every collective on real backends (gloo, NCCL, fake): a kernel of each `c10d::` operator at BackendSelect.

The key is in every call's key set, above the backends and below autograd and the modes, and c10d has no kernel there.
So in-place and functional calls, DDP's reducer, FSDP2, DTensor, point-to-point and object calls of any thread pass
here, each once. Other operators are not affected. Not observed: calls made on a `Backend` object itself, symmetric
memory, CUDA graph replays. Calls are passed on with `redispatch`; the boxed variant deadlocks against gloo's mutex.

A synchronous collective on CPU is waited for here, where its caller would wait next, so that its duration is true. On a
GPU nothing waits, and completions are in the order of a stream. The completion of an asynchronous call is observed only
on a GPU, by its future, whose callback runs at once in a stream that waits for the collective. The code for GPUs was
run with NCCL of one rank, and never on several GPUs. Completions of send and recv are not observed: a second wait for
gloo's message would wait for a second message.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.harness.engines.calls.operators import MESSAGES, OperatorCall, communicates, make_reader, tensors_in
from shardproof.harness.errors import MachineError
from shardproof.harness.ledger import OTHER, Call, Observer, notify_waited
from shardproof.harness.torch_internals.backends import fake_group
from shardproof.harness.torch_internals.compiler import leave_uncompiled
from shardproof.harness.torch_internals.dispatch import BACKEND_SELECT, Add, c10d_operators, has_kernel, kernels
from shardproof.harness.torch_internals.lookup import tested_span

_KEY = "BackendSelect"
_UNFOLLOWED = (*MESSAGES, OTHER)
"""Ops whose works are not waited for here: a message arrives once, and the works of other operators are unknown."""


class CallLog(Protocol):
    """For observers that need more of a call than the ledger has; they may replace the works of asynchronous calls."""

    def on_enter(self, issued: OperatorCall) -> None:
        """A call is about to be issued."""

    def on_exit(self) -> None:
        """The call entered last, a synchronous one, is complete."""

    def follow(self, work: Any, outputs: Sequence[Tensor], waited: Callable[[], None]) -> dist.Work:
        """The work that the program gets in place of `work`, that of the asynchronous call entered last.

        `outputs` are the tensors that the operator returns beside the work; `waited` is to be called at its first wait.
        """
        ...


class Interposer:
    """While entered, the observers get every call that this process issues through the dispatcher.

    An operator that is not known here is reported as op `other`, from its schema. Raises MachineError when another
    kernel is at the key already, or when a probe call is not observed; otherwise a program would look silent although
    the recorder is blind. An exception in reading a call is raised in the program, unless there is `let_go`: then that
    gets the exception, and the call is not observed.
    """

    def __init__(
        self, *observers: Observer, log: CallLog | None = None, let_go: Callable[[Exception], object] | None = None
    ) -> None:
        self._observers = observers
        self._log = log
        self._let_go = let_go
        self._installed = ExitStack()
        self._add: Add | None = None
        self._names: set[str] = set()

    def __enter__(self) -> Self:
        with ExitStack() as installed:
            self._add = installed.enter_context(kernels("c10d", _KEY))
            self._names = set()
            self.add_operators()
            self._probe()
            leave_uncompiled()
            token = _ENTERED.set(self)
            installed.callback(_ENTERED.reset, token)
            self._installed = installed.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._installed.close()

    def add_operators(self) -> None:
        """Observe operators of c10d that an imported library has registered since. Raises MachineError."""
        names = c10d_operators()
        if not names:
            raise _blindness_error("no operators of c10d are known")
        operators = {name: getattr(torch.ops.c10d, name) for name in names if name not in self._names}
        fresh = {name: overloads.default for name, overloads in operators.items() if hasattr(overloads, "default")}
        fresh = {name: operator for name, operator in fresh.items() if communicates(operator)}
        taken = [name for name in fresh if has_kernel(f"c10d::{name}", _KEY)]
        if taken:
            rule = "one interposer at a time, leave the other one first"
            raise MachineError(f"c10d::{taken[0]} has a kernel at {_KEY} already: {rule}")
        assert self._add is not None  # entered
        for name, operator in fresh.items():
            self._add(name, self._kernel(name, operator), with_keyset=True)
        self._names |= fresh.keys()

    @contextmanager
    def also_observed_by(self, *observers: Observer) -> Iterator[None]:
        """These observers get the calls too, until the body ends."""
        before = self._observers
        self._observers = (*before, *observers)
        try:
            yield
        finally:
            self._observers = before

    def _kernel(self, name: str, operator: Any) -> Callable[..., Any]:
        read = make_reader(name, operator)

        def kernel(keys: Any, *arguments: Any) -> Any:
            try:
                issued = read(arguments)
            except Exception as problem:
                if self._let_go is None:
                    raise
                self._let_go(problem)
                return operator.redispatch(keys.remove(BACKEND_SELECT), *arguments)
            rank, call, log = issued.rank, issued.call, self._log
            if log is not None:
                log.on_enter(issued)
            tickets = [(observer, observer.on_issue(rank, call)) for observer in self._observers]
            result = operator.redispatch(keys.remove(BACKEND_SELECT), *arguments)
            if not call.is_async and call.op not in _UNFOLLOWED:
                if call.device == "cpu":
                    for work in _works_in_result(result):
                        work.wait()  # its caller waits again, which then costs nothing
                if log is not None:
                    log.on_exit()
                _complete_tickets(rank, tickets)
            if call.is_async and call.device == "cuda" and call.op not in _UNFOLLOWED:
                for work in _works_in_result(result):
                    with suppress(RuntimeError):  # a backend without a future for it
                        work.get_future().add_done_callback(lambda _future: _complete_tickets(rank, tickets))
            if call.is_async and log is not None:
                return _replace_work(result, partial(log.follow, waited=partial(_record_waits, rank, tickets)))
            return result

        return kernel

    def _probe(self) -> None:
        """Issue one call in a private group of one rank. Raises MachineError unless it is observed as issued."""
        seen: list[Call] = []
        probe: Any = SimpleNamespace(on_issue=lambda _rank, call: seen.append(call), on_completion=lambda *_: None)
        watched, log = self._observers, self._log
        self._observers, self._log = (probe,), None
        try:
            group, options = fake_group(), dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
            options.asyncOp = False
            sent = torch.zeros(8)[2:5]  # with the default dtype of the program
            group.allreduce([sent], options)
        finally:
            self._observers, self._log = watched, log
        observed = [(c.op, c.reduce_op, c.group, c.dtype, c.shapes, c.payload_bytes, c.is_async) for c in seen]
        if observed != [
            ("all_reduce", "max", (0,), str(sent.dtype).removeprefix("torch."), ((3,),), sent.nbytes, False)
        ]:
            raise _blindness_error(f"a probe all_reduce of {sent.nbytes} bytes was seen as {observed}")


_ENTERED: ContextVar[Interposer | None] = ContextVar("shardproof_interposer", default=None)
"""The interposer that was entered around the running code: one kernel a process, for any number of observers."""


@contextmanager
def observe_calls(observer: Observer) -> Iterator[None]:
    """Pass every call in the body to the observer: from the interposer that is entered here, else
    from one of its own.
    """
    entered = _ENTERED.get()
    with Interposer(observer) if entered is None else entered.also_observed_by(observer):
        yield


def _blindness_error(why: str) -> MachineError:
    return MachineError(
        f"torch {torch.__version__}: the recorder of real backends would be blind: {why}. "
        f"Run on the in-process engine, or with a torch that this release was tested with ({tested_span()})"
    )


def _complete_tickets(rank: int, tickets: Sequence[tuple[Observer, int]]) -> None:
    for observer, ticket in tickets:
        observer.on_completion(rank, ticket)


def _record_waits(rank: int, tickets: Sequence[tuple[Observer, int]]) -> None:
    """The program waits for an asynchronous call."""
    for observer, ticket in tickets:
        notify_waited(observer, rank, ticket)


def _works_in_result(result: Any) -> list[dist.Work]:
    """The works in an operator's result."""
    parts = result if isinstance(result, tuple) else (result,)
    return [dist.Work.unbox(part) for part in parts if isinstance(part, torch.ScriptObject)]


def _replace_work(result: Any, follow: Callable[[Any, Sequence[Tensor]], dist.Work]) -> Any:
    """An operator's result with another work in it."""
    parts = result if isinstance(result, tuple) else (result,)
    outputs = tensors_in([part for part in parts if not isinstance(part, torch.ScriptObject)])
    followed = tuple(
        follow(dist.Work.unbox(part), outputs).boxed() if isinstance(part, torch.ScriptObject) else part
        for part in parts
    )
    return followed if isinstance(result, tuple) else followed[0]
