"""The kernel of an operator that is not known here: reported to the observer, then passed on to its own one."""

from collections.abc import Callable
from typing import Any

import torch

from harness.engines.calls.reading import reader
from harness.errors import NotComputed, error_text
from harness.torch_internals.operators import BACKEND_SELECT
from harness.torch_internals.world import rank_tables


def kernel_of(name: str, operator: Any) -> Callable[..., Any]:
    """The kernel of this operator of c10d, under a key by which the dispatcher selects a backend."""
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
            raise _not_computed(name, rank.rank, problem) from problem
        if observer is not None and issued is not None and ticket is not None:
            observer.completed(issued.rank, ticket)
        return result

    return kernel


def _not_computed(name: str, rank: int, problem: Exception) -> NotComputed:
    text = (
        f"c10d::{name} of torch {torch.__version__} is not known to the in-process engine, which cannot compute it "
        f"({error_text(problem)}); legal: --engine pool"
    )
    return NotComputed(text, ranks=(rank,), positions=())
