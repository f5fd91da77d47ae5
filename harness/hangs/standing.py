"""Where one rank stands after a hang: its last calls in every group, numbered as the group counts them.

Collectives of a group are numbered from 1 on every rank. Messages are numbered by direction and peer, so that the n-th
send of one rank is the n-th receive of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Channel = tuple[str, tuple[int, ...], str]
"""What is counted together: a group's name, its ranks, and "" for collectives or "send 3", "recv 0" for messages."""


class LastCall(NamedTuple):
    """One call. In `signature` (op, reduce op, dtype, shape, root) all ranks of a group must agree; `place` is where it
    belongs (phase, module, step, micro-batch), which differs between ranks that skipped a call. `complete` is None
    where that is not known.
    """

    signature: tuple[str, ...]
    place: tuple[object, ...]
    axis: str
    caller: str
    order: int
    complete: bool | None

    @property
    def words(self) -> str:
        """ "all_reduce sum float32 4x8 over tp, layers.3 (backward, step 2)"; what is not known is left out."""
        op = " ".join(word for word in self.signature if word)
        phase, region, step, _micro = self.place if len(self.place) == 4 else ("", "", -1, 0)
        where = ", ".join(str(word) for word in (phase, f"step {step}" if step != -1 else "") if word)
        text = f"{op} over {self.axis}" + (f", {region}" if region else "") + (f" ({where})" if where else "")
        return text + (f", at {self.caller}" if self.caller else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding:
    """One rank. `calls`: channel -> number -> call, the latest calls only; `last`: channel -> number of its last call.

    `ended`: "" while it ran, else how it ended; `lost`: it was killed, and left no calls. `stack`: lines of the
    program, innermost first.
    """

    rank: int
    world_size: int
    source: str
    calls: Mapping[Channel, Mapping[int, LastCall]] = field(default_factory=dict)
    last: Mapping[Channel, int] = field(default_factory=dict)
    ended: str = ""
    lost: bool = False
    silent_s: float = 0.0
    stack: tuple[str, ...] = ()

    @property
    def latest(self) -> tuple[Channel, int, LastCall] | None:
        """The call in which the rank is, or that it issued last: the oldest incomplete one, else the last of all."""
        calls = [(channel, number, call) for channel, by in self.calls.items() for number, call in by.items()]
        inside = [one for one in calls if one[2].complete is False]
        if inside:
            return min(inside, key=lambda one: one[2].order)
        return max(calls, key=lambda one: one[2].order, default=None)
