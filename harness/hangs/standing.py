"""Standing of a rank, from its dump: its latest calls by group and number. Findings are about these."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Channel = tuple[str, tuple[int, ...], str]
"""Calls counted together: a group's name, its ranks, and "" for collectives or "send 3", "recv 0" for messages. The
n-th send of one rank is the n-th receive of the other. Numbers begin at 1.
"""


class LastCall(NamedTuple):
    """A call. In `signature` (op, reduce op, dtype, shape, root) all ranks of a group must agree.

    `place` is where it belongs (phase, module, step, micro-batch), which differs between ranks that skipped a call.
    `complete` is None where that is not known. `members` are the signatures of the calls in a coalesced one, and
    `size_bytes` those of a message, None where that is not known.
    """

    signature: tuple[str, ...]
    place: tuple[object, ...]
    axis: str
    caller: str
    order: int
    complete: bool | None
    members: tuple[tuple[str, ...], ...] = ()
    size_bytes: int | None = None

    @property
    def words(self) -> str:
        """ "all_reduce sum float32 4x8 over tp, layers.3 (backward, step 2)"; what is not known is left out."""
        op = words_of(self.signature) + (f" of {len(self.members)}" if self.members else "")
        phase, region, step, _micro = self.place if len(self.place) == 4 else ("", "", -1, 0)
        where = ", ".join(str(word) for word in (phase, f"step {step}" if step != -1 else "") if word)
        text = f"{op} over {self.axis}" + (f", {region}" if region else "") + (f" ({where})" if where else "")
        return text + (f", at {self.caller}" if self.caller else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding:
    """Calls of a rank. `calls`: channel -> number -> call, the latest only; `last`: channel -> number of its last call.

    `ended`: "" while it ran, else how it ended; `lost`: it was killed, and left no calls. `counted`: the numbers of its
    messages are those of the whole run. `stack`: lines of the program, innermost first.
    """

    rank: int
    world_size: int
    source: str
    calls: Mapping[Channel, Mapping[int, LastCall]] = field(default_factory=dict)
    last: Mapping[Channel, int] = field(default_factory=dict)
    ended: str = ""
    lost: bool = False
    counted: bool = True
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """Ranks that parted, `how` (skipped, extra, differs, behind, gone, cycle, message), the call, who waits in it.

    `number` is the call's in its group; `instead` is what the ranks issued in its place, None when nothing.
    """

    how: str
    ranks: tuple[int, ...]
    channel: Channel
    number: int
    call: LastCall | None
    instead: LastCall | None = None
    waiting: tuple[int, ...] = ()


_BYTES = {"byte": 1, "char": 1, "bool": 1, "short": 2, "half": 2, "int": 4, "float": 4, "long": 8, "double": 8}
"""The dtypes of ATen whose names do not end in their bits."""


def words_of(signature: Sequence[str]) -> str:
    """A signature in words, without what is empty."""
    return " ".join(word for word in signature if word)


def message_bytes(dtype: str, shape: str) -> int | None:
    """The bytes of a message of this shape, "2x4"; None for a dtype of unknown width."""
    bits = re.match(r"[a-z]*?(\d+)", dtype)
    width = int(bits[1]) // 8 if bits else _BYTES.get(dtype)
    return width * math.prod(int(size) for size in shape.split("x") if size) if width else None
