"""Measurements of a rank beside its calls, from outside: which calls are hidden, how many bytes autograd holds.

    with Overlap() as overlap:                      # an observer of calls (harness.ledger.Observer)
        with overlap.on_rank(rank): program(rank)   # in the thread of each rank
    overlap.hidden

An asynchronous call is hidden when its rank computed a product between the call's issue and its first wait. A product
is a matrix product, a convolution or attention: the operators that torch.utils.flop_counter counts. Each gets a kernel
at the dispatch key BackendSelect, where torch has none for these operators. The kernel counts and sends the call on,
below autograd, so that no bit changes and nothing else is touched. A product costs microseconds more, hence Overlap is
entered only where calls are expected to be hidden. A product of code that torch.compile wrote is not seen.

Saved activations are the storages that forward passes hand to autograd, each counted once while it is held, parameters
left out. The peak is what one rank must have room for beside its parameters. The hooks change no value: pack and unpack
return the tensor. Hooks that a program enters itself hide those around them, so tensors that they keep are counted as
they pack. Transforms of torch.func (grad, vjp) refuse all hooks, so nothing is counted inside of them. Unit: bytes.
Source of the idea: torch.autograd.graph.saved_tensors_hooks.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import flop_counter

from shardproof.harness.ledger import Call, Observer, notify_waited
from shardproof.harness.torch_internals.autograd import allow_disabled_hooks, numbers_of, storage_id
from shardproof.harness.torch_internals.dispatch import (
    BACKEND_SELECT,
    FUSED,
    FUSED_BACKWARD,
    full_name,
    has_kernel,
    kernels,
)

RankCallIndex = tuple[int, int]
"""(rank, call index)."""
_KEY = "BackendSelect"


class Overlap:
    """`hidden` are the asynchronous calls (rank, call index) during which their rank computed a product.

    Calls are passed on to another observer, if given, whose tickets are call indices too.
    """

    def __init__(self, other: Observer | None = None) -> None:
        self.hidden: set[RankCallIndex] = set()
        self._other = other
        self._products: Counter[int] = Counter()
        self._calls: Counter[int] = Counter()
        self._open: dict[RankCallIndex, tuple[int, str]] = {}
        self._local = threading.local()
        self._installed = ExitStack()

    def __enter__(self) -> Self:
        add = self._installed.enter_context(kernels("aten", _KEY))
        for operator in _products():
            name = full_name(operator)
            if not has_kernel(name, _KEY):
                add(name.removeprefix("aten::"), self._kernel(operator), with_keyset=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._installed.close()

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """Mark this thread as running the program of a rank, until the context is left."""
        self._local.rank = rank
        self._products[rank] += 0
        try:
            yield
        finally:
            del self._local.rank

    def on_issue(self, rank: int, call: Call) -> int:
        """A rank is about to issue a call; the ticket is the call's index on the rank."""
        ticket = self._other.on_issue(rank, call) if self._other else self._calls[rank]
        self._calls[rank] += 1
        if call.is_async:
            self._open[rank, ticket] = self._products[rank], call.device
        return ticket

    def on_completion(self, rank: int, ticket: int) -> None:
        """The call has completed: on the CPU its wait returned; on a GPU it may not have been waited for."""
        if self._other:
            self._other.on_completion(rank, ticket)
        if self._open.get((rank, ticket), (0, ""))[1] != "cuda":
            self._close_span(rank, ticket)

    def on_wait(self, rank: int, ticket: int) -> None:
        """The rank waits for the call, or reads its result."""
        if self._other:
            notify_waited(self._other, rank, ticket)
        self._close_span(rank, ticket)

    def _close_span(self, rank: int, ticket: int) -> None:
        before, _device = self._open.pop((rank, ticket), (self._products[rank], ""))
        if self._products[rank] > before:
            self.hidden.add((rank, ticket))

    def _kernel(self, operator: Any) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **words: Any) -> Any:
            rank = getattr(self._local, "rank", None)
            if rank is None and len(self._products) == 1:
                (rank,) = self._products  # a thread of the only rank in this process, such as autograd's for a device
            if rank is not None:
                self._products[rank] += 1
            return operator.redispatch(keys.remove(BACKEND_SELECT), *args, **words)

        return kernel


def _products() -> Iterator[Any]:
    """Every overload of the operators that compute products."""
    kind = type(torch.ops.aten.mm)
    for packet in dict.fromkeys([*flop_counter.flop_registry, FUSED, FUSED_BACKWARD]):
        if isinstance(packet, kind) and str(packet).startswith("aten."):
            yield from (getattr(packet, overload) for overload in packet.overloads())


class _CountedTensor:
    """A saved tensor. The bytes of its storage count until its last holder is gone."""

    __slots__ = ("tensor", "_account", "_key")

    def __init__(self, tensor: Tensor, account: "_Account") -> None:
        self.tensor = tensor
        self._account, self._key = account, account.hold(tensor)

    def __del__(self) -> None:
        self._account.release(self._key)


class _Account:
    """The storages that one rank now holds, by identity: how many holders each has, and the peak of all their bytes."""

    def __init__(self) -> None:
        self._holders: dict[int, list[int]] = {}
        self._bytes = 0
        self.peak_bytes = 0

    def hold(self, tensor: Tensor) -> int:
        key = storage_id(tensor)
        size = tensor.nbytes if tensor.is_mkldnn else numbers_of(tensor).untyped_storage().nbytes()
        entry = self._holders.setdefault(key, [0, size])
        if entry[0] == 0:
            self._bytes += entry[1]
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        entry[0] += 1
        return key

    def release(self, key: int) -> None:
        entry = self._holders[key]
        entry[0] -= 1
        if entry[0] == 0:
            self._bytes -= entry[1]
            del self._holders[key]


class SavedActivations:
    """Watches every rank that enters `on_rank`; `peak_bytes(rank)` has the result."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}
        self._of_thread: dict[int, _Account] = {}
        self._hooks: dict[int, saved_tensors_hooks] = {}
        self._disabling = ExitStack()
        self._lock = threading.Lock()
        self._made = saved_tensors_hooks.__init__

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """Count what the forward passes of this thread save, until the context is left."""
        account = self._accounts[rank] = _Account()
        with self._lock:
            if not self._of_thread:
                saved_tensors_hooks.__init__ = self._make_counting_hooks()  # type: ignore[method-assign]
                self._disabling.enter_context(allow_disabled_hooks(lambda: self._hooks.get(threading.get_ident())))
            self._of_thread[threading.get_ident()] = account
        hooks = self._hooks[threading.get_ident()] = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        try:
            with hooks:
                yield
        finally:
            with self._lock:
                del self._of_thread[threading.get_ident()], self._hooks[threading.get_ident()]
                if not self._of_thread:
                    self._disabling.close()
                    saved_tensors_hooks.__init__ = self._made  # type: ignore[method-assign]

    def peak_bytes(self, rank: int) -> int:
        """The most bytes that autograd held at once on this rank; 0 for a rank that was not watched."""
        account = self._accounts.get(rank)
        return account.peak_bytes if account else 0

    def _make_counting_hooks(self) -> Callable[..., None]:
        """An `__init__` of saved_tensors_hooks whose hooks count, on watched threads, the tensors that they keep."""
        of_thread, made = self._of_thread, self._made

        def make(hooks: Any, pack_hook: Callable[[Tensor], Any], unpack_hook: Callable[[Any], Tensor]) -> None:
            def pack(tensor: Tensor) -> Any:
                kept = pack_hook(tensor)
                account = of_thread.get(threading.get_ident())
                # A leaf that requires a gradient is a parameter, which is there anyway.
                counts = isinstance(kept, Tensor) and not (kept.is_leaf and kept.requires_grad)
                return _CountedTensor(kept, account) if counts and account is not None else kept

            def unpack(saved: Any) -> Tensor:
                return unpack_hook(saved.tensor if isinstance(saved, _CountedTensor) else saved)

            made(hooks, pack, unpack)

        return make
