"""Traffic by module, as a tree that can be unfolded: what a module sends is what it and everything in it send.

Calls and payload bytes of the busiest rank, all cases of a mode on as many ranks added up. Where a model has many
layers, equal paths of different layers are one: "layers.*.mlp.w1".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from harness.ledger import BACKWARD
from reports.stored.frames import Run

__all__ = ["MOST_NODES", "Node", "by_module", "tree"]

MOST_NODES = 80
"""Modules of one mode beyond which layers are folded into one."""
OUTSIDE = "outside modules"
_Row = tuple[tuple[str, ...], str, int, int]
"""Path, phase, calls, bytes."""
_KEYS = ["mode", "world_size", "phase", "region"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A module: its name, what it and its parts send in all phases, and its parts."""

    name: str
    calls: int
    payload_bytes: int
    forward_bytes: int
    backward_bytes: int
    parts: tuple[Node, ...] = ()

    @property
    def other_bytes(self) -> int:
        """What is sent in other phases: data, loss, gradient synchronisation, step."""
        return self.payload_bytes - self.forward_bytes - self.backward_bytes


def by_module(run: Run) -> pd.DataFrame:
    """mode, world_size, phase, region, calls, payload_bytes."""
    ranks = run.ledger.groupby(["case", "rank", *_KEYS], observed=True, sort=False)["payload_bytes"]
    most = ranks.agg(calls="size", payload_bytes="sum").groupby(["case", *_KEYS], observed=True, sort=False).max()
    return most.groupby(_KEYS, observed=True, sort=True).sum().reset_index()


def tree(lines: pd.DataFrame) -> tuple[Node, ...]:
    """The modules of one mode, outermost first, in the order of their names; from the rows of `by_module`."""
    regions = lines["region"].where(lines["region"] != "", OUTSIDE)
    if regions.nunique() > MOST_NODES:
        regions = regions.str.replace(r"(?<=\.)\d+(?=\.|$)", "*", regex=True)
    rows = zip(regions, lines["phase"].astype("str"), lines["calls"], lines["payload_bytes"], strict=True)
    return tuple(_nodes([(tuple(path.split(".")), phase, calls, size) for path, phase, calls, size in rows], 0))


def _nodes(rows: list[_Row], depth: int) -> Iterator[Node]:
    names = {path[depth] for path, _, _, _ in rows if len(path) > depth}
    for own in sorted(names, key=_natural):
        inside = [row for row in rows if row[0][depth : depth + 1] == (own,)]
        name, parts = own, tuple(_nodes(inside, depth + 1))
        while len(parts) == 1 and parts[0].payload_bytes == _sum(inside):  # one part that is all of it: one line
            name, parts = f"{name}.{parts[0].name}", parts[0].parts
        yield Node(
            name=name,
            calls=sum(calls for _, _, calls, _ in inside),
            payload_bytes=_sum(inside),
            forward_bytes=_sum(inside, "forward"),
            backward_bytes=_sum(inside, *BACKWARD),
            parts=parts,
        )


def _sum(rows: list[_Row], *phases: str) -> int:
    return sum(size for _, phase, _, size in rows if not phases or phase in phases)


def _natural(name: str) -> tuple[int, str, int]:
    """layers.2 before layers.10; what lies outside of modules last."""
    number = re.fullmatch(r"\d+", name)
    return (2 if name == OUTSIDE else 0), "" if number else name, int(name) if number else 0
