"""Operators of torch unknown to the in-process engine: recorded from their schemas as they pass the dispatcher.

The engine's groups answer the methods that torch calls today. A method that a newer torch adds, or an operator of a
library, comes to the dispatcher instead. There it is reported to the observer as op `other` and passed on to its own
kernel, where it has one. Without one the call raises NotComputed, which names it, and the case is unknown.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardproof.harness.engines.calls.operators import OPERATORS, communicates
from shardproof.harness.errors import NotComputed, error_text
from shardproof.harness.torch_internals.operators import BACKEND_SELECT, has_kernel, kernels, operator_names
from shardproof.harness.torch_internals.world import rank_tables

_KEY = "BackendSelect"


class Unmapped:
    """The operators of c10d that OPERATORS lacks; looked for again when modules were imported, since it takes 3 ms."""

    def __init__(self) -> None:
        self._modules = 0
        self._operators: dict[str, Any] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within it, calls of these operators by rank threads are recorded."""
        if self._modules != len(sys.modules):
            names = [name for name in operator_names("c10d") if name not in OPERATORS]
            operators = {name: getattr(getattr(torch.ops.c10d, name), "default", None) for name in names}
            self._modules = len(sys.modules)
            self._operators = {name: one for name, one in operators.items() if one is not None and communicates(one)}
        if not self._operators:
            yield
            return
        with kernels("c10d", _KEY) as add:
            for name, operator in self._operators.items():
                if not has_kernel(f"c10d::{name}", _KEY):  # a recorder of real backends has one
                    add(name, _kernel_of(name, operator), with_keyset=True)
            yield


def _kernel_of(name: str, operator: Any) -> Callable[..., Any]:
    """The kernel of this operator of c10d, under a key by which the dispatcher selects a backend."""
    from shardproof.harness.engines.calls.reading import reader  # noqa: PLC0415

    read = reader(name, operator)

    def kernel(keys: Any, *arguments: Any) -> Any:
        rank = rank_tables()
        observer = None if rank is None else rank.matcher.observer
        issued = None if observer is None else read(arguments)
        ticket = None if observer is None or issued is None else observer.issued(issued.rank, issued.call)
        try:
            result = operator.redispatch(keys.remove(BACKEND_SELECT), *arguments)
        except RuntimeError as problem:
            if rank is None:
                raise
            text = f"c10d::{name} of torch {torch.__version__} is not known to the in-process engine, which cannot"
            text += f" compute it ({error_text(problem)}); legal: --engine pool"
            raise NotComputed(text, ranks=(rank.rank,)) from problem
        if observer is not None and issued is not None and ticket is not None:
            observer.completed(issued.rank, ticket)
        return result

    return kernel
