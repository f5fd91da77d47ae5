"""Whether the ranks of the second launch together read the samples of the first one, each once, step by step.

A sample is a row along dim 0 of what the outermost module receives. Under context parallelism a rank has parts of a
row's sequence (dim 1): contiguous ones, or two in zigzag. Ranks that read the same rows and parts (of one tensor
parallel group) are one reader. Rows are told by their bits, so their order may be another one: `Samples.sources` says
which row of the first launch each one is, and outputs of modules are put into its order by it. Batches may be padded to
their longest row, so that what a rank reads is wider in one launch: a padded row ends, or begins, in one value of its
tensor, and where the rows of both launches are the same without it, they are all brought to one width.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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


Tensors = Mapping[tuple[int, int], Mapping[str, Tensor]]
"""(rank, micro-batch) -> what the outermost module received, by its place there."""
_MOST = 64
"""Values that are tried as the padding of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of one step. `rows` are those of the first launch, by micro-batch.

    sources   (rank, micro-batch) -> the row of the first launch that each row is, None for a row that it has not
    parts     rank -> the parts of the sequence that it has, of `of_parts`
    copies    a part of a row that has the bits of an earlier one -> that one: nothing tells which of them is read
    readers   ranks that read the same, a tuple each; ranks that receive no sample (later stages) are in none
    problem   why rows cannot be compared; None where they can
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
        """What a rank reads of the first launch's samples, in its order."""
        found = [source for (own, _), rows in sorted(self.sources.items()) if own == rank for source in rows]
        return [(*source, part) for source in found if source for part in self.parts[rank]]


def samples_of(first: Launch, second: Launch, step: int) -> Samples:
    """The samples of a step of both launches."""
    mine, theirs = _tensors_of(first, step), _tensors_of(second, step)
    mine, theirs = without_padding(mine, theirs) or (mine, theirs)
    names = _common_names(mine, theirs)
    if not names:
        left = any(name.startswith("sample/") for launch in (first, second) for name in launch.left_out())
        problem = state_fact("samples_left_out") if left else state_fact("nothing_received")
        if mine and theirs:
            problem = state_fact("no_rows_alike", mine=_words_of(mine), theirs=_words_of(theirs))
        return Samples(step=step, sources={}, parts={}, problem=problem)
    pairs = [(own, other) for own, other in names]
    many = _count_parts(mine, theirs, pairs[0])
    whole: dict[tuple[bytes, ...], list[Unit]] = {}
    calls, rows = _calls_once(mine), []
    for number, tensors in enumerate(calls):
        parts_of_rows = _rows_of(tensors, [own for own, _ in pairs], many)
        rows.append(len(parts_of_rows))
        for row, parts in enumerate(parts_of_rows):
            for part, key in enumerate(parts):
                whole.setdefault(key, []).append((number, row, part))
    sources: dict[tuple[int, int], tuple[Source | None, ...]] = {}
    parts_of_rank: dict[int, tuple[int, ...]] = {}
    read: dict[int, list[object]] = {}
    used: Counter[tuple[Source, tuple[int, ...]]] = Counter()
    for (rank, call), tensors in sorted(theirs.items(), key=lambda one: one[0]):
        own_call = calls[0]
        if not all(other in tensors and _are_alike(own_call[own], tensors[other]) for own, other in pairs):
            continue  # a later stage of a pipeline is given what the one before it returns
        share = many * tensors[pairs[0][1]].shape[1] // own_call[pairs[0][0]].shape[1] if many > 1 else 1
        keys = _rows_of(tensors, [other for _, other in pairs], share)
        sources[rank, call] = tuple(_find_row(row, whole, used, parts_of_rank, rank) for row in keys)
        read.setdefault(rank, []).append(tuple(map(tuple, keys)))
    readers: dict[object, list[int]] = {}
    for rank, own in read.items():
        readers.setdefault(tuple(own), []).append(rank)
    for ranks in readers.values():  # one reader's ranks have one row where the first launch has several alike
        sources |= {(rank, call): rows for rank in ranks for (own, call), rows in [*sources.items()] if own == ranks[0]}
    return Samples(
        step=step,
        rows=tuple(rows),
        sources=sources,
        parts=parts_of_rank,
        of_parts=many,
        copies={unit: units[0] for units in whole.values() for unit in units[1:]},
        readers=tuple(map(tuple, readers.values())),
    )


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
    """How the samples of a step differ from those of the first launch; None where they do not."""
    every = [
        (call, row, part) for call, rows in enumerate(one.rows) for row in range(rows) for part in range(one.of_parts)
    ]
    there = Counter(one.copies.get(unit, unit) for unit in every)
    least, most = (
        Counter(one.copies.get(unit, unit) for rank in ranks for unit in one.units(rank))
        for ranks in ([ranks[0] for ranks in one.readers], [rank for ranks in one.readers for rank in ranks])
    )
    missing = _rows_once(unit for unit, count in there.items() if most[unit] < count)
    twice = _rows_once(unit for unit, count in there.items() if least[unit] > count)
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
    """Whether the ranks, one after the other, have the first launch's rows in its order."""
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


def _calls_once(tensors: Tensors) -> list[Mapping[str, Tensor]]:
    """The micro-batches of a launch, those that several ranks read in the same way once."""
    calls: list[Mapping[str, Tensor]] = []
    seen: set[object] = set()
    for (_, call), given in sorted(tensors.items(), key=lambda one: one[0]):
        key = (call, *((name, bits_of(one).numpy().tobytes()) for name, one in sorted(given.items())))
        if key not in seen:
            seen.add(key)
            calls.append(given)
    return calls


def _common_names(mine: Tensors, theirs: Tensors) -> list[tuple[str, str]]:
    """Pairs of places whose tensors are rows of samples in both launches: of the same name, else the first alike."""
    own, other = _batches_of(mine), _batches_of(theirs)
    same = [(name, name) for name in own if name in other and _are_alike(own[name], other[name])]
    if same:
        return same
    return [(a, b) for a in own for b in other if _are_alike(own[a], other[b])][:1]


def _batches_of(tensors: Tensors) -> dict[str, Tensor]:
    """Places of the first micro-batch of the first rank whose tensors have its rows, integers first."""
    if not tensors:
        return {}
    given = tensors[min(tensors)]
    rows = [one.shape[0] for one in given.values() if not one.is_floating_point()] or [
        one.shape[0] for one in given.values()
    ]
    found = {name: one for name, one in given.items() if one.shape[0] == rows[0] and one.numel()}
    return dict(sorted(found.items(), key=lambda one: one[1].is_floating_point()))


def _are_alike(mine: Tensor, theirs: Tensor) -> bool:
    """Whether rows of both may be the same: they have one kind of number and shape, but for a part of a sequence."""
    if mine.is_floating_point() != theirs.is_floating_point() or mine.dim() != theirs.dim():
        return False
    a, b = tuple(mine.shape[1:]), tuple(theirs.shape[1:])
    return a == b or (len(a) > 0 and a[1:] == b[1:] and b[0] > 0 and a[0] % b[0] == 0)


def _count_parts(mine: Tensors, theirs: Tensors, pair: tuple[str, str]) -> int:
    """Into how many parts sequences are cut to be compared: 1, or two for each rank that has a part."""
    a, b = mine[min(mine)][pair[0]], theirs[min(theirs)][pair[1]]
    if a.shape[1:] == b.shape[1:]:
        return 1
    ranks = a.shape[1] // b.shape[1]
    return 2 * ranks if not a.shape[1] % (2 * ranks) else ranks


def _rows_of(tensors: Mapping[str, Tensor], names: Sequence[str], parts: int) -> list[list[tuple[bytes, ...]]]:
    """By row: the bits of each of its parts, of all these tensors."""
    cut = []
    for name in names:
        tensor = tensors[name]
        wide = tensor.to(torch.int64) if not tensor.is_floating_point() else tensor.double()
        pieces = wide.chunk(parts, 1) if parts > 1 and wide.dim() > 1 else [wide] * parts
        cut.append([[bits_of(row).numpy().tobytes() for row in piece.unbind(0)] for piece in pieces])
    rows = len(cut[0][0])
    return [[tuple(of_name[part][row] for of_name in cut) for part in range(parts)] for row in range(rows)]


def _find_row(
    keys: Sequence[tuple[bytes, ...]],
    whole: Mapping[tuple[bytes, ...], Sequence[Unit]],
    used: Counter[tuple[Source, tuple[int, ...]]],
    parts: dict[int, tuple[int, ...]],
    rank: int,
) -> Source | None:
    """The row of the first launch that has all these parts, of several alike one that is not used yet."""
    options = [{unit[:2]: unit[2] for unit in reversed(whole.get(key, ()))} for key in keys]
    rows = [source for source in sorted(options[0]) if all(source in other for other in options)] if options else []
    if not rows:
        parts.setdefault(rank, (0,))
        return None
    at = {source: tuple(other[source] for other in options) for source in rows}
    best = min(rows, key=lambda source: (used[source, at[source]], source))
    used[best, at[best]] += 1
    parts.setdefault(rank, at[best])
    return best


def without_padding(mine: Tensors, theirs: Tensors) -> tuple[Tensors, Tensors] | None:
    """Both launches' tensors at one width, those alone that can be; None where widths agree, or padding is none."""
    names = {name for given in mine.values() for name in given} & {name for given in theirs.values() for name in given}
    aligned: dict[str, dict[int, Tensor]] = {}
    told = False
    for name in sorted(names):
        tensors = [given[name] for launch in (mine, theirs) for given in launch.values() if name in given]
        if any(one.dim() != 2 for one in tensors):
            continue
        if len({one.shape[1] for one in tensors}) == 1:
            aligned[name] = {id(one): one for one in tensors}
            continue
        for value, last in _paddings(tensors):
            own, other = (
                {_strip(row, value, last) for given in launch.values() if name in given for row in given[name].tolist()}
                for launch in (mine, theirs)
            )
            if own == other:
                width = max(one.shape[1] for one in tensors)
                aligned[name] = {id(one): _widen(one, width, value, last) for one in tensors}
                told = told or () not in own
                break
    if not told:
        return None
    first, second = (
        {
            key: {name: aligned[name][id(one)] for name, one in given.items() if name in aligned}
            for key, given in of.items()
        }
        for of in (mine, theirs)
    )
    return first, second


def _paddings(tensors: list[Tensor]) -> Iterator[tuple[float, bool]]:
    """Values in which rows end, then those in which they begin."""
    for last in (True, False):
        values = torch.cat([one[:, -1 if last else 0] for one in tensors]).unique()
        yield from ((value, last) for value in values[:_MOST].tolist())


def _strip(row: list[float], value: float, last: bool) -> tuple[float, ...]:
    """A row without the padding at its end, or at its beginning."""
    step = -1 if last else 1
    kept = row[::step]
    while kept and kept[0] == value:
        kept = kept[1:]
    return tuple(kept[::step])


def _widen(tensor: Tensor, width: int, value: float, last: bool) -> Tensor:
    more = tensor.new_full((tensor.shape[0], width - tensor.shape[1]), value)
    return torch.cat([tensor, more] if last else [more, tensor], 1)
