"""A launch as it was recorded: rows and tensors by kind, and the full tensors of its ranks together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from shardproof.harness.outcome.blocks import Block
from shardproof.harness.programs.values import RankValues, ValueRow, read_values

STATES: Mapping[str, str] = {"exp_avg": "exp_avg_after", "exp_avg_sq": "exp_avg_sq_after"}
"""Name of an optimizer's state -> the kind of its name in an outcome. Other states are of kind OTHER_STATE."""
OTHER_STATE = "value_after"
_AFTER = "param_after"
COUNTS = frozenset({"step"})
"""States of an optimizer that count its steps, and show nothing that parameters do not."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The recordings of all ranks of one launch, by rank."""

    ranks: tuple[RankValues, ...]
    folder: Path
    _by_kind: dict[tuple[str, int], list[tuple[RankValues, ValueRow]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_kind: dict[tuple[str, int], list[tuple[RankValues, ValueRow]]] = {}
        for rank in self.ranks:
            for row in rank.rows:
                by_kind.setdefault((row.kind, row.step), []).append((rank, row))
        object.__setattr__(self, "_by_kind", by_kind)

    @property
    def world_size(self) -> int:
        """Ranks of the launch."""
        stated = [int(rank.about.get("world_size", 0)) for rank in self.ranks]
        return max([*stated, *(rank.rank + 1 for rank in self.ranks)], default=0)

    @cached_property
    def steps(self) -> int:
        """Steps that every rank recorded whole."""
        stated = [len(rank.about["steps"]) for rank in self.ranks if "steps" in rank.about]
        seen = (max((row.step for row in rank.rows if row.kind != "param"), default=-1) + 1 for rank in self.ranks)
        return min(stated) if len(stated) == len(self.ranks) else min(seen, default=0)

    def rows(self, kind: str, step: int = 0) -> Iterator[tuple[RankValues, ValueRow]]:
        """The rows of a kind in a step that have a tensor, rank by rank, in the order of recording."""
        return iter([(rank, row) for rank, row in self._by_kind.get((kind, step), ()) if row.key])

    def left_out(self) -> tuple[str, ...]:
        """Names of tensors that did not fit into the budget, by kind."""
        rows = [row for rank in self.ranks for row in rank.rows if row.left_out]
        return tuple(dict.fromkeys(f"{row.kind}/{row.step}/{row.name}" for row in rows))

    @cached_property
    def dtype(self) -> str:
        """The dtype of most elements of the parameters."""
        sizes: dict[str, int] = {}
        for _, row in self.rows("param"):
            count = 1
            for size in row.shape:
                count *= size
            sizes[row.dtype] = sizes.get(row.dtype, 0) + count
        return max(sizes, key=sizes.__getitem__, default="float32").removeprefix("torch.")

    def from_step(self, step: int) -> "Launch":
        """The launch as if it had begun with this step: its parameters are those after the step before."""
        ranks = tuple(_Later.of(rank, step) for rank in self.ranks) if step else self.ranks
        return Launch(ranks=ranks, folder=self.folder)

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Name of a parameter that shares the storage of another one -> the name of that one (tied weights)."""
        return {row.name: row.alias_of for rank in self.ranks for row in rank.rows if row.alias_of}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Later(RankValues):
    """The values of a rank from a step on; `recorded` are its rows in its files, by number."""

    recorded: Mapping[int, ValueRow] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: RankValues, first: int) -> "_Later":
        """The rows of the steps from `first` on, counted from 0."""
        begun = [replace(row, kind="param", step=0) for row in rank.rows if (row.kind, row.step) == (_AFTER, first - 1)]
        later = [replace(row, step=row.step - first) for row in rank.rows if row.step >= first]
        about = {**rank.about, **({"steps": rank.about["steps"][first:]} if "steps" in rank.about else {})}
        recorded = {row.number: row for row in rank.rows}
        return cls(rank=rank.rank, rows=(*begun, *later), about=about, folder=rank.folder, recorded=recorded)

    def tensor(self, row: ValueRow) -> Tensor:
        """The tensor of one of these rows."""
        return super(_Later, self).tensor(self.recorded[row.number])


def read_launch(folder: Path) -> Launch:
    """The launch that was recorded into this folder. Raises RequestError."""
    return Launch(ranks=read_values(folder), folder=folder)


def stated_block(row: ValueRow, local: Tensor) -> Block:
    """The tensor of a row with the place that the program states; without one it is a full tensor."""
    shape, offsets = row.global_shape, row.offsets
    places = {name: at for name, _, at in row.axes}
    terms = tuple(places[axis] for axis in row.pending_axes if axis in places) if row.pending else ()
    if shape is None or offsets is None or len(shape) != local.dim():
        shape, offsets = tuple(local.shape), (0,) * local.dim()
    return Block(local=local, offsets=offsets, global_shape=shape, terms=terms, reduce_op=row.pending)


def state_name(row: ValueRow, parameter: str) -> str:
    """The name in an outcome of a parameter or one of its states after a step; "" for what is not compared."""
    if row.kind == "param_after":
        return f"param_after/{row.step}/{parameter}"
    if row.leaf in COUNTS:
        return ""
    if row.leaf in STATES:
        return f"{STATES[row.leaf]}/{row.step}/{parameter}"
    return f"{OTHER_STATE}/{row.step}/{parameter}:{row.leaf}"
