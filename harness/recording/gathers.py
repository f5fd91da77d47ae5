"""Which gathers after a backward or a step are of updated parameters: those of half the parameters' bytes or more, and
those of as many elements as a reduce_scatter over the same ranks had since the forward began, in whatever dtype.

The second is for parameters of which most lie apart: experts that no other rank has are gathered by none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from harness.recording.lanes import Waiting
from harness.recording.observations import ParameterMemory


class Gathers:
    """What was reduced into parts since the last forward began: the ranks, and the elements of all parts together."""

    def __init__(self) -> None:
        self._scattered: set[tuple[tuple[int, ...], int]] = set()

    def issued(self, call: Any) -> None:
        """Take any call of the rank."""
        if call.op == "reduce_scatter":
            self._scattered.add(_parts(call))

    def of_parameters(self, pending: Sequence[Waiting], by: str, memory: Callable[[], ParameterMemory]) -> set[int]:
        """The tickets of those that gather parameters, when what follows has come: a forward where `by` is data."""
        calls = {waiting.ticket: waiting.call for waiting in pending if waiting.gathers}
        found = {ticket for ticket, call in calls.items() if _parts(call) in self._scattered}
        if by == "data":
            self._scattered.clear()
        whole_bytes = sum(call.payload_bytes for call in calls.values())
        return {*calls} if calls and memory().mostly_in(whole_bytes) else found


def _parts(call: Any) -> tuple[tuple[int, ...], int]:
    bits = re.search(r"\d+", call.dtype)
    return call.group, 8 * call.payload_bytes // int(bits[0] if bits else 8)
