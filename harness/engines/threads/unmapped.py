"""Operators of torch unknown to the in-process engine: recorded from their schemas as they pass the dispatcher.

The engine's groups answer the methods that torch calls today. A method that a newer torch adds, or an operator of a
library, comes to the dispatcher instead. There it is reported to the observer as op `other` and passed on to its own
kernel, where it has one. Else it cannot be computed here, and the case that issues it is unknown by its name.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harness.engines.calls.operators import OPERATORS, communicates
from harness.torch_internals.operators import has_kernel, kernels, operator_names

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
            self._modules, self._operators = len(sys.modules), _unmapped()
        if not self._operators:
            yield
            return
        from harness.engines.threads.unmapped_kernels import kernel_of  # noqa: PLC0415

        with kernels("c10d", _KEY) as add:
            for name, operator in self._operators.items():
                if not has_kernel(f"c10d::{name}", _KEY):  # a recorder of real backends has one
                    add(name, kernel_of(name, operator), with_keyset=True)
            yield


def _unmapped() -> dict[str, Any]:
    found = {}
    for name in operator_names("c10d"):
        operator = getattr(getattr(torch.ops.c10d, name), "default", None) if name not in OPERATORS else None
        if operator is not None and communicates(operator):
            found[name] = operator
    return found
