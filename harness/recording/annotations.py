"""Statements of a subject about its own calls, where they are not to be inferred: their phase and their module.

    with phase("grad_sync"), region("layers.0"):
        dist.all_reduce(buffer)

Optional, for code that is made of functions and not of modules. Users import both from `shardproof`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shardproof.harness.ledger import PHASES

TOOL = "NVTX_INJECTION64_PATH"
"""The environment variable that is set in a process while a profiler that stores nvtx ranges listens to it."""
Override = tuple[str | None, str | None]
"""The phase and region that the subject stated, None if it stated none."""
_OVERRIDE: ContextVar[Override] = ContextVar("shardproof_override", default=(None, None))
overridden = _OVERRIDE.get
"""Statement of the subject about the calls of this thread right now."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Set the phase of the calls made inside, instead of the inferred one. Raises ValueError for an unknown phase."""
    if name not in PHASES:
        raise ValueError(f"phase {name!r} must be one of the ledger's phases, such as 'grad_sync': {' '.join(PHASES)}")
    token = _OVERRIDE.set((name, overridden()[1]))
    try:
        yield
    finally:
        _OVERRIDE.reset(token)


@contextmanager
def region(path: str) -> Iterator[None]:
    """Set the dotted module path of the calls made inside, instead of the inferred one."""
    token = _OVERRIDE.set((overridden()[0], path))
    try:
        yield
    finally:
        _OVERRIDE.reset(token)
