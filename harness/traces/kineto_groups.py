"""The groups in a trace of the torch profiler: what a row says, and the list in the header, which is not cut.

Lists in a row are texts that are cut after 30 entries. An on-demand trace has cut lists in its header too: a list that
is shorter than its group is no list.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardproof.harness.traces.calls import MOST_RANKS


class TracedGroup(NamedTuple):
    """A group as far as it is known: `ranks` () and `size` None where they are not."""

    ranks: tuple[int, ...] = ()
    name: str = ""
    description: str = ""
    size: int | None = None


class Groups:
    """The groups of a header, by torch's names of them. `ranks` has those whose lists are whole."""

    def __init__(self, config: Sequence[Mapping[str, Any]]) -> None:
        self.ranks: dict[str, tuple[int, ...]] = {}
        self._known: dict[str, TracedGroup] = {}
        for one in config:
            name = str(one.get("pg_name", ""))
            ranks = _numbers(one.get("ranks"))
            size = one.get("pg_size")
            size = size if isinstance(size, int) else len(ranks) or None
            ranks = ranks if len(ranks) == size else ()
            self._known[name] = TracedGroup(ranks, name, str(one.get("pg_desc", "")), size)
            if ranks:
                self.ranks[name] = ranks

    def of(self, args: Mapping[str, Any]) -> TracedGroup:
        """The group of a row with these fields."""
        name = str(args.get("Process Group Name", args.get("Process Group ID", "")))
        known = self._known.get(name, TracedGroup())
        size = args.get("Group size")
        size = size if isinstance(size, int) and size > 0 else known.size
        description = str(args.get("Process Group Description") or known.description)
        ranks = known.ranks if len(known.ranks) == size else _numbers(args.get("Process Group Ranks"))
        if len(ranks) != size:
            ranks = _ranks_by_stride(args, size)
        return TracedGroup(ranks, name, "" if description == "undefined" else description, size)


def _numbers(value: object) -> tuple[int, ...]:
    """A list of numbers, or a text of one; () for a text that is cut."""
    if isinstance(value, str):
        return () if "..." in value else tuple(map(int, re.findall(r"\d+", value)))
    if not isinstance(value, list | tuple) or any(type(one) is not int for one in value):
        return ()
    return tuple(value)


def _ranks_by_stride(args: Mapping[str, Any], size: int | None) -> tuple[int, ...]:
    """The ranks of a group that are equally far apart, as torch says where they are."""
    first, stride = args.get("Global rank start"), args.get("Global rank stride")
    if (
        not isinstance(first, int)
        or not isinstance(stride, int)
        or size is None
        or first < 0
        or stride < 1
        or size > MOST_RANKS
    ):
        return ()
    return tuple(range(first, first + stride * size, stride))
