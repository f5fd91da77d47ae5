"""Handles of asynchronous calls in a recorded program: those that the program drops before it has waited for them.

The program keeps the works of its backend. They are followed by weak references, so that none lives longer than it
would without us. The methods of torch's class that amount to a wait are wrapped. Only works that Python code gets are
followed: C++ waits itself for what it issues for itself (DDP's reducer, functional collectives).
"""

import threading
import weakref
from collections import Counter
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any

from torch.distributed import distributed_c10d

from shardproof.harness.engines.calls.operators import MESSAGES, OperatorCall
from shardproof.harness.torch_internals.backends import waits_of_works

Place = tuple[str, str, str]
"""Op, axis and caller of a call."""


class Handles:
    """While it is entered, `dropped` counts the works that were never waited for by place."""

    def __init__(self) -> None:
        self.dropped: Counter[Place] = Counter()
        self._open: dict[int, tuple[Place, weakref.ref[Any]]] = {}
        self._local = threading.local()
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(waits_of_works(self._note_wait))

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def follow(self, work: Any, place: Place) -> None:
        """Follow a work that is about to be given to the program, in this thread."""
        self._local.newest = work  # nobody else holds it yet
        self._open[id(work)] = place, weakref.ref(work, partial(self._on_drop, id(work)))

    def release_last(self) -> None:
        """The program has what was followed last in this thread, or has dropped it."""
        self._local.newest = None

    def close(self) -> None:
        """The program has ended: what it still holds it never waited for."""
        self.release_last()
        while self._open:
            self.dropped[self._open.popitem()[1][0]] += 1

    def _note_wait(self, work: int) -> None:
        self._open.pop(work, None)

    def _on_drop(self, work: int, _reference: object) -> None:
        if (found := self._open.pop(work, None)) is not None:
            self.dropped[found[0]] += 1


def is_given(issued: OperatorCall, caller: FrameType | None) -> bool:
    """Whether Python code gets the work of a call that was issued by the code of this frame.

    torch's own functions do, but for messages on a GPU, which batch_isend_irecv waits for together.
    """
    from_python = caller is not None and caller.f_code.co_filename == distributed_c10d.__file__
    return from_python and (issued.call.op not in MESSAGES or issued.call.device == "cpu")
