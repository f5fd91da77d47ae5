"""Which asynchronous calls are hidden: whether a rank computed a product between a call's issue and its first wait.

    with Overlap() as overlap:                      # an observer of calls (harness.ledger.Observer)
        with overlap.on_rank(rank): program(rank)   # in the thread of each rank
    overlap.hidden

A product is a matrix product, a convolution or attention: what torch.utils.flop_counter counts, and what a mode hides
its calls behind. Each has a kernel at the dispatch key BackendSelect, where these operators have none; it counts and
sends the call on, below autograd, so that no bit changes and nothing else is touched. It costs microseconds a product,
hence it is entered in runs that are not timed. A product of code that torch.compile wrote is not seen.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch.utils import flop_counter

from harness.ledger import Call
from harness.torch_internals.meta_device import FUSED, FUSED_BACKWARD
from harness.torch_internals.operators import BACKEND_SELECT, full_name, has_kernel, kernels

RankCallIndex = tuple[int, int]
"""(rank, call index)."""
_KEY = "BackendSelect"


class Overlap:
    """`hidden` are the asynchronous calls (rank, call index) behind which their rank computed a product."""

    def __init__(self) -> None:
        self.hidden: set[RankCallIndex] = set()
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
        """This thread runs the program of a rank until the context is left."""
        self._local.rank = rank
        self._products[rank] += 0
        try:
            yield
        finally:
            del self._local.rank

    def issued(self, rank: int, call: Call) -> int:
        """A rank is about to issue a call; the ticket is the call's index on the rank."""
        ticket = self._calls[rank]
        self._calls[rank] += 1
        if call.is_async:
            self._open[rank, ticket] = self._products[rank], call.device
        return ticket

    def completed(self, rank: int, ticket: int) -> None:
        """The call is complete: on the CPU its wait returned, on a GPU it may not have been waited for yet."""
        if self._open.get((rank, ticket), (0, ""))[1] != "cuda":
            self.waited(rank, ticket)

    def waited(self, rank: int, ticket: int) -> None:
        """The rank waits for the call, or reads its result."""
        before, _device = self._open.pop((rank, ticket), (self._products[rank], ""))
        if self._products[rank] > before:
            self.hidden.add((rank, ticket))

    def _kernel(self, operator: Any) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **words: Any) -> Any:
            rank = getattr(self._local, "rank", None)
            if rank is None and len(self._products) == 1:
                (rank,) = self._products  # a thread of the only rank here, such as autograd's for a device
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
