"""Standing of a rank, from its dump: its latest calls, numbered from 1, and where its program is."""

import math
import re
from dataclasses import dataclass

from shardproof.harness.engines.calls.matching import RankCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding(RankCalls):
    """Calls of a rank from the file or folder `source`. `stack`: lines of the program, innermost first."""

    world_size: int
    source: str
    silent_s: float = 0.0
    stack: tuple[str, ...] = ()


_BYTES = {"byte": 1, "char": 1, "bool": 1, "short": 2, "half": 2, "int": 4, "float": 4, "long": 8, "double": 8}
"""The dtypes of ATen whose names do not end in their bits."""


def message_bytes(dtype: str, shapes: tuple[tuple[int, ...], ...]) -> int | None:
    """The bytes of a message of these shapes; None for a dtype of unknown width."""
    bits = re.match(r"[a-z]*?(\d+)", dtype)
    width = int(bits[1]) // 8 if bits else _BYTES.get(dtype)
    return width * sum(map(math.prod, shapes)) if width else None
