"""Whether in each step the ranks of the second launch together read the samples of the first one, each of them once.

A sample is a row along dim 0 of what the outermost module receives. Under context parallelism a rank has parts of a
row's sequence (dim 1): contiguous ones, or two in zigzag. Ranks that read the same rows and parts (of one tensor
parallel group) are one reader. Rows are found by their bits, in any order: `Samples.sources` says which row of the
first launch each of them is, and outputs of modules are put into that order.

Batches may be padded to their longest row, so that tensors are wider in one launch than in the other. Padding is one
value at the end, or at the beginning, of rows. If the rows of both launches are equal without it, all are padded to one
width.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile

import torch
from torch import Tensor

from shardproof.harness.checking.finding import Finding
from shardproof.harness.outcome.merging import bits_of
from shardproof.harness.parity.recorded import Launch
from shardproof.harness.verdicts.facts import Fact, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

CHECK = "samples"
Source = tuple[int, int]
"""Micro-batch and row of the first launch."""
Unit = tuple[int, int, int]
"""A source and the number of the part of its sequence."""
RowPart = tuple[bytes, ...]
"""The bits of a part of a row, one entry for each tensor."""

Tensors = Mapping[tuple[int, int], Mapping[str, Tensor]]
"""(rank, micro-batch) -> what the outermost module received, by its place there."""
_MOST = 64
"""The most values that are tried as the padding of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of one step. `rows` are those of the first launch, by micro-batch.

    sources   (rank, micro-batch) -> for each row that row of the first launch, None for a row that it lacks
    parts     rank -> the numbers of the parts of a sequence that it reads, out of `of_parts`
    copies    a part of a row that is equal to an earlier one -> that one: either of them may be read
    readers   groups of ranks that read the same; without ranks that receive no samples (later stages)
    problem   why rows cannot be compared, or None
    """

    step: int
    rows: tuple[int, ...] = ()
    sources: Mapping[tuple[int, int], tuple[Source | None, ...]]
    parts: Mapping[int, tuple[int, ...]]
    of_parts: int = 1
    copies: Mapping[Unit, Unit] = field(default_factory=dict)
    readers: tuple[tuple[int, ...], ...] = ()
    problem: Fact | None = None

    def units(self, rank: int) -> list[Unit]:
        """The parts of rows of the first launch that a rank reads, in its order."""
        found = [source for (own, _), rows in sorted(self.sources.items()) if own == rank for source in rows]
        return [(*source, part) for source in found if source for part in self.parts[rank]]


def samples_of(first: Launch, second: Launch, step: int) -> Samples:
    """The samples of a step of both launches."""
    mine, theirs = _tensors_of(first, step), _tensors_of(second, step)
    mine, theirs = _pad_alike(mine, theirs) or (mine, theirs)
    pairs = _common_names(mine, theirs)
    if not pairs:
        return Samples(step=step, sources={}, parts={}, problem=_why_not_compared(first, second, mine, theirs))
    of_parts = _count_parts(mine, theirs, pairs[0])
    calls = [given for given in _calls_once(mine) if all(own in given for own, _ in pairs)]
    finder = _RowFinder(calls, [own for own, _ in pairs], of_parts)
    sources: dict[tuple[int, int], tuple[Source | None, ...]] = {}
    read: dict[int, list[object]] = {}
    for (rank, call), tensors in sorted(theirs.items(), key=lambda one: one[0]):
        if not all(other in tensors and _are_alike(calls[0][own], tensors[other]) for own, other in pairs):
            continue  # a later stage of a pipeline, or a head that is called by itself, receives what was computed
        own, other = pairs[0]
        parts = of_parts * tensors[other].shape[1] // calls[0][own].shape[1] if of_parts > 1 else 1
        rows = _rows_of(tensors, [other for _, other in pairs], parts)
        sources[rank, call] = tuple(finder.find(rank, row) for row in rows)
        read.setdefault(rank, []).append(tuple(map(tuple, rows)))
    readers: dict[object, list[int]] = {}
    for rank, rows_read in read.items():
        readers.setdefault(tuple(rows_read), []).append(rank)
    for ranks in readers.values():  # of equal rows of the first launch, all of them get the same one
        sources |= {(rank, call): rows for rank in ranks for (own, call), rows in [*sources.items()] if own == ranks[0]}
    return Samples(
        step=step,
        rows=tuple(finder.rows),
        sources=sources,
        parts=finder.parts_of_rank,
        of_parts=of_parts,
        copies={unit: units[0] for units in finder.units.values() for unit in units[1:]},
        readers=tuple(map(tuple, readers.values())),
    )


class _RowFinder:
    """Finds rows of the first launch by the bits of their parts. `rows` is their number by micro-batch."""

    def __init__(self, calls: Sequence[Mapping[str, Tensor]], names: Sequence[str], of_parts: int) -> None:
        self.rows: list[int] = []
        self.units: dict[RowPart, list[Unit]] = {}
        self.parts_of_rank: dict[int, tuple[int, ...]] = {}
        self._used: Counter[tuple[Source, tuple[int, ...]]] = Counter()
        for micro, tensors in enumerate(calls):
            rows = _rows_of(tensors, names, of_parts)
            self.rows.append(len(rows))
            for row, parts in enumerate(rows):
                for part, key in enumerate(parts):
                    self.units.setdefault(key, []).append((micro, row, part))

    def find(self, rank: int, parts: Sequence[RowPart]) -> Source | None:
        """The row that has all of these parts; of several equal rows the one that was found least often."""
        options = [{unit[:2]: unit[2] for unit in reversed(self.units.get(key, ()))} for key in parts]
        rows = [one for one in sorted(options[0]) if all(one in other for other in options)] if options else []
        if not rows:
            self.parts_of_rank.setdefault(rank, (0,))
            return None
        at = {row: tuple(other[row] for other in options) for row in rows}
        best = min(rows, key=lambda row: (self._used[row, at[row]], row))
        self._used[best, at[best]] += 1
        self.parts_of_rank.setdefault(rank, at[best])
        return best


def _why_not_compared(first: Launch, second: Launch, mine: Tensors, theirs: Tensors) -> Fact:
    if mine and theirs:
        return state_fact("no_rows_alike", mine=_words_of(mine), theirs=_words_of(theirs))
    left_out = any(name.startswith("sample/") for launch in (first, second) for name in launch.left_out())
    return state_fact("samples_left_out" if left_out else "nothing_received")


def check_samples(steps: Sequence[Samples]) -> Finding:
    """Whether every step of the second launch reads the samples of the same step of the first one, each once."""
    problem = next((one.problem for one in steps if one.problem), None if steps else state_fact("no_whole_step"))
    if problem is not None:
        return Finding(verdict=UNKNOWN, facts=(state_fact("no_samples", why=problem),))
    for one in steps:
        if how := describe_difference(one):
            return Finding(
                verdict=FAIL,
                facts=(state_fact("other_rows", how=how),),
                names=(f"sample/{one.step}",),
                ranks=_ranks_apart(one),
                phase="data",
            )
    rows, in_order = sum(sum(one.rows) for one in steps), all(_is_in_order(one) for one in steps)
    return Finding(verdict=PASS, facts=(state_fact("rows_read_once", rows=rows, steps=len(steps), in_order=in_order),))


def describe_difference(one: Samples) -> Fact | None:
    """How the samples of a step differ from those of the first launch; None if they do not."""
    every = [
        (call, row, part) for call, rows in enumerate(one.rows) for row in range(rows) for part in range(one.of_parts)
    ]
    needed = Counter(one.copies.get(unit, unit) for unit in every)

    def count_reads(ranks: Iterable[int]) -> Counter[Unit]:
        return Counter(one.copies.get(unit, unit) for rank in ranks for unit in one.units(rank))

    # Ranks that read the same may share a model, or be data ranks that read the same rows twice. A part is surely read
    # too often if one rank of each reader suffices for that, and surely missing if all ranks together lack it.
    least, most = count_reads(ranks[0] for ranks in one.readers), count_reads(r for ranks in one.readers for r in ranks)
    missing = _rows_once(unit for unit, count in needed.items() if most[unit] < count)
    twice = _rows_once(unit for unit, count in needed.items() if least[unit] > count)
    foreign = [
        (call, row, rank)
        for (rank, call), found in sorted(one.sources.items())
        for row, source in enumerate(found)
        if source is None
    ]
    if not missing and not twice and not foreign:
        return None
    shared = next((ranks for ranks in one.readers if len(ranks) > 1), ())
    on = [
        ranks[0]
        for ranks in one.readers
        if twice and twice[0] in [one.copies.get(unit, unit)[:2] for unit in one.units(ranks[0])]
    ]
    return state_fact(
        "rows_differ",
        step=one.step,
        samples=sum(one.rows),
        shared=shared if missing and not foreign and not twice else (),
        missing=missing,
        twice=twice,
        twice_on=on,
        foreign=foreign,
    )


def describe_own_order(one: Samples) -> Fact | None:
    """The ranks that alone read rows which the first launch does not have; None where every rank or none does so."""
    apart = _ranks_apart(one)
    others = tuple(sorted({rank for rank, _ in one.sources} - {*apart}))
    return state_fact("rows_of_own_order", ranks=apart, others=others) if apart and others else None


def _rows_once(units: Iterable[Unit]) -> list[Source]:
    """The rows of these parts, each once."""
    return list(dict.fromkeys(unit[:2] for unit in units))


def _ranks_apart(one: Samples) -> tuple[int, ...]:
    return tuple(sorted({rank for (rank, _), found in one.sources.items() if None in found}))


def _is_in_order(one: Samples) -> bool:
    """Whether the readers, one after the other, have the first launch's rows in its order."""
    found = [unit for ranks in one.readers for unit in one.units(ranks[0])]
    return found == sorted(found)


def _tensors_of(launch: Launch, step: int) -> Tensors:
    found: dict[tuple[int, int], dict[str, Tensor]] = {}
    for rank, row in launch.rows("sample", step):
        if row.shape:
            found.setdefault((rank.rank, row.call), {})[_place_of(row.name, row.leaf)] = rank.tensor(row)
    return found


def _words_of(tensors: Tensors) -> list[str]:
    """The places and shapes of one micro-batch."""
    return [f"{name} {tuple(one.shape)}" for name, one in tensors[min(tensors)].items()]


def _place_of(name: str, leaf: str) -> str:
    return f"{name}/{leaf}" if leaf else name


def _module_of(place: str) -> str:
    """The module that received what is at this place, "" for the model."""
    return place.rpartition(":")[0]


def _calls_once(tensors: Tensors) -> list[Mapping[str, Tensor]]:
    """The micro-batches of a launch, without repeats by ranks that read the same."""
    calls: list[Mapping[str, Tensor]] = []
    seen: set[object] = set()
    for (_, call), given in sorted(tensors.items(), key=lambda one: one[0]):
        key = (call, *((name, bits_of(one).numpy().tobytes()) for name, one in sorted(given.items())))
        if key not in seen:
            seen.add(key)
            calls.append(given)
    return calls


def _common_names(mine: Tensors, theirs: Tensors) -> list[tuple[str, str]]:
    """Pairs of places whose tensors are rows of samples in both launches: equal names, else the first possible pair."""
    own, other = _batches_of(mine), _batches_of(theirs)
    same = [(name, name) for name in own if name in other and _are_alike(own[name], other[name])]
    if same:
        return same
    return [(a, b) for a in own for b in other if _are_alike(own[a], other[b])][:1]


def _batches_of(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors of one micro-batch whose first dim is that of rows, by place, integers first.

    Floats count where the first module received them: those of a head or a loss that is called by itself are computed.
    """
    if not tensors:
        return {}
    given = tensors[min(tensors)]
    first = _module_of(next(iter(given)))
    rows = [one.shape[0] for one in given.values() if not one.is_floating_point()] or [
        one.shape[0] for one in given.values()
    ]
    found = {
        name: one
        for name, one in given.items()
        if one.shape[0] == rows[0] and one.numel() and (not one.is_floating_point() or _module_of(name) == first)
    }
    return dict(sorted(found.items(), key=lambda one: one[1].is_floating_point()))


def _are_alike(mine: Tensor, theirs: Tensor) -> bool:
    """Whether rows of both may be equal: both are integers or both floats, and their shapes are equal, except that
    `theirs` may be an equal part of the sequence.
    """
    if mine.is_floating_point() != theirs.is_floating_point() or mine.dim() != theirs.dim():
        return False
    a, b = tuple(mine.shape[1:]), tuple(theirs.shape[1:])
    return a == b or (len(a) > 0 and a[1:] == b[1:] and b[0] > 0 and a[0] % b[0] == 0)


def _count_parts(mine: Tensors, theirs: Tensors, pair: tuple[str, str]) -> int:
    """The number of parts in which sequences are compared: 1, or two for each rank that reads a part."""
    a, b = mine[min(mine)][pair[0]], theirs[min(theirs)][pair[1]]
    if a.shape[1:] == b.shape[1:]:
        return 1
    ranks = a.shape[1] // b.shape[1]
    return 2 * ranks if not a.shape[1] % (2 * ranks) else ranks


def _rows_of(tensors: Mapping[str, Tensor], names: Sequence[str], parts: int) -> list[list[RowPart]]:
    """The parts of every row of these tensors."""
    cut = []
    for name in names:
        tensor = tensors[name]
        wide = tensor.to(torch.int64) if not tensor.is_floating_point() else tensor.double()
        pieces = wide.chunk(parts, 1) if parts > 1 and wide.dim() > 1 else [wide] * parts
        cut.append([[bits_of(row).numpy().tobytes() for row in piece.unbind(0)] for piece in pieces])
    rows = len(cut[0][0])
    return [[tuple(of_name[part][row] for of_name in cut) for part in range(parts)] for row in range(rows)]


def _pad_alike(mine: Tensors, theirs: Tensors) -> tuple[Tensors, Tensors] | None:
    """The tensors of both launches at one width; None if all have one, or if they differ by more than padding.

    Only tensors of two dims that are equal but for padding are in the result.
    """
    names = {name for given in mine.values() for name in given} & {name for given in theirs.values() for name in given}
    aligned: dict[str, dict[int, Tensor]] = {}
    is_padded = False
    for name in sorted(names):
        own, other = ([given[name] for given in launch.values() if name in given] for launch in (mine, theirs))
        tensors = [*own, *other]
        if any(one.dim() != 2 for one in tensors):
            continue
        width = max(one.shape[1] for one in tensors)
        if all(one.shape[1] == width for one in tensors):
            aligned[name] = {id(one): one for one in tensors}
            continue
        for value, last in _paddings(tensors):
            rows = _strip_rows(own, value, last)
            if rows == _strip_rows(other, value, last):
                aligned[name] = {id(one): _widen(one, width, value, last) for one in tensors}
                is_padded = is_padded or () not in rows  # a row of padding alone is equal in all launches
                break
    if not is_padded:
        return None

    def widen(launch: Tensors) -> Tensors:
        return {
            key: {name: aligned[name][id(one)] for name, one in given.items() if name in aligned}
            for key, given in launch.items()
        }

    return widen(mine), widen(theirs)


def _paddings(tensors: list[Tensor]) -> Iterator[tuple[float, bool]]:
    """Possible padding: values in which rows end (True), then values in which they begin (False)."""
    for last in (True, False):
        values = torch.cat([one[:, -1 if last else 0] for one in tensors]).unique()
        yield from ((value, last) for value in values[:_MOST].tolist())


def _strip_rows(tensors: Sequence[Tensor], value: float, last: bool) -> set[tuple[float, ...]]:
    """All rows without the padding at their end, or at their beginning."""
    step = -1 if last else 1
    kept = set()
    for row in (row for one in tensors for row in one.tolist()):
        kept.add(tuple([*dropwhile(lambda number: number == value, row[::step])][::step]))
    return kept


def _widen(tensor: Tensor, width: int, value: float, last: bool) -> Tensor:
    more = tensor.new_full((tensor.shape[0], width - tensor.shape[1]), value)
    return torch.cat([tensor, more] if last else [more, tensor], 1)
