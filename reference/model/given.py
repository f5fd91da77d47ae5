"""Values that the dense model cannot know and is given: masks and initial values that an implementation drew.

They reach every function of the dense model that a function with `takes_given` calls.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from torch import Tensor

_GIVEN: ContextVar[Mapping[str, Tensor]] = ContextVar("reference_given", default=MappingProxyType({}))
given_now: Callable[[], Mapping[str, Tensor]] = _GIVEN.get
"""The names and tensors that are given where this is called: "mask/<step>/<site>", "init/<parameter>"."""


@contextmanager
def holding(given: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Give these to all that is computed inside; None keeps what is given already."""
    token = _GIVEN.set(given or _GIVEN.get())
    try:
        yield
    finally:
        _GIVEN.reset(token)


def takes_given(function: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """The function with one more word, given=mapping, that holds in all that it calls."""

    @functools.wraps(function)
    def with_given(*args: Any, given: Mapping[str, Tensor] | None = None, **words: Any) -> dict[str, Tensor]:
        with holding(given):
            return function(*args, **words)

    return with_given
