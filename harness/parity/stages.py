"""The stages of a pipeline in the second launch, and the layers of the first launch that a stage numbers from 0.

A stage is fed by the one before: the first message that its ranks receive comes from there, and ranks that send before
they receive are the first stage. Stages hold the layers in this order. So where their numbers of a kind of parameter
add up to those of the first launch, the n-th that they hold is the n-th of the first launch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from shardproof.harness.parity.recorded import Launch
from shardproof.harness.programs.tensors.messages import SENT

Stages = Sequence[tuple[int, ...]]
Key = tuple[int, str]
"""Rank and name of a parameter."""


def group_by(ranks: Iterable[int], key: Callable[[int], object]) -> list[tuple[int, ...]]:
    """The ranks that have the same key, in the order in which the keys first appear."""
    groups: dict[object, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return [tuple(group) for group in groups.values()]


def pipeline_stages(second: Launch) -> Stages:
    """The ranks of every pipeline stage, empty if there are no stages of equal size.

    Messages show them, else parameters: ranks of one stage have parameters of the same names, and all or none of them
    receive tokens, or compute a loss.
    """
    stages = _stages_by_messages(second) or group_by(
        (rank.rank for rank in second.ranks), lambda rank: _role_of(second, rank)
    )
    return stages if len(stages) > 1 and len({len(stage) for stage in stages}) == 1 else []


def _stages_by_messages(second: Launch) -> Stages:
    """The stages in the order in which they feed each other; empty if messages do not show one chain of stages."""
    fed_by = {rank.rank: str(rank.about.get("fed_by", "")) for rank in second.ranks}
    depths: dict[int, int] = {rank: 0 for rank, source in fed_by.items() if source == str(SENT)}
    for _ in fed_by:
        of_source = {str(rank): depth for rank, depth in depths.items()}
        depths |= {rank: of_source[source] + 1 for rank, source in fed_by.items() if source in of_source}
        if depths.keys() == fed_by.keys():
            break
    else:
        return []
    stages = group_by(sorted(depths, key=lambda rank: (depths[rank], rank)), depths.__getitem__)
    # Data ranks may get their samples by messages, and have one role.
    return stages if _role_of(second, stages[0][0]) != _role_of(second, stages[-1][0]) else []


def _role_of(second: Launch, rank: int) -> object:
    """What the ranks of a stage have in common: names of parameters, whether they receive tokens, or compute a loss."""
    rows = next(one.rows for one in second.ranks if one.rank == rank)
    names = frozenset(row.name for row in rows if row.kind == "param")
    tokens = any(row.kind == "sample" and "float" not in row.dtype for row in rows)
    return names, tokens, any(row.kind == "loss" for row in rows)


class _Numbered(NamedTuple):
    """A name in which a number counts layers: what stands before the number, and behind it."""

    before: str
    behind: str

    def name(self, number: int) -> str:
        """The name with this number."""
        return ".".join(part for part in (self.before, str(number), self.behind) if part)


def _split_number(name: str) -> tuple[_Numbered, int] | None:
    """A name and the first number in it, None without one."""
    parts = name.split(".")
    at = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return None if at is None else (_Numbered(".".join(parts[:at]), ".".join(parts[at + 1 :])), int(parts[at]))


def _numbers_of(names: Iterable[str]) -> dict[_Numbered, list[int]]:
    found: dict[_Numbered, set[int]] = {}
    for kind, number in filter(None, map(_split_number, names)):
        found.setdefault(kind, set()).add(number)
    return {kind: sorted(numbers) for kind, numbers in found.items()}


def names_by_stage(known: Iterable[str], second: Launch) -> dict[Key, str]:
    """The parameters that have another number in the first launch, whose names are `known`: -> their name there."""
    stages = _stages_by_messages(second)
    if not stages:
        return {}
    theirs = _numbers_of(known)
    # Dicts, for the order of the names must not depend on the hashes of strings: the first one is told.
    names = {
        rank.rank: dict.fromkeys(row.name for row in rank.rows if row.kind in ("param", "buffer"))
        for rank in second.ranks
    }
    of_stages = [_numbers_of(name for rank in stage for name in names[rank]) for stage in stages]
    found: dict[Key, str] = {}
    for kind in dict.fromkeys(kind for own in of_stages for kind in own):
        held = [own.get(kind, []) for own in of_stages]
        other = _kind_in_first(kind, theirs)
        numbers = theirs.get(other, []) if other is not None else []
        named_alike = kind == other and sorted({n for own in held for n in own}) == numbers
        if named_alike or sum(map(len, held)) != len(numbers) or other is None:
            continue
        left = iter(numbers)
        for stage, own in zip(stages, held, strict=True):
            for number in own:
                name, wanted = kind.name(number), other.name(next(left))
                found |= {(rank, name): wanted for rank in stage if name in names[rank]}
    return found


def _kind_in_first(kind: _Numbered, theirs: Mapping[_Numbered, object]) -> _Numbered | None:
    """The kind of parameter in the first launch: of the same name, else the only one that is named alike behind its
    number, for a stage may be a sequence of layers.
    """
    alike = [other for other in theirs if other.behind == kind.behind]
    return kind if kind in theirs else alike[0] if len(alike) == 1 else None


def names_to_begin_with(first: Launch, second: Launch) -> dict[Key, str]:
    """(rank, name) -> the name in the first launch, if that is another one, for all that can get initial values.

    These are the layers that a stage numbers by itself; weights whose ranks drew what others have drawn (tied ones of
    two stages); and what is left: of one last name and shape both launches hold equally many, in one order.
    """
    shapes = {row.name: row.shape for kind in ("param", "buffer") for _, row in first.rows(kind)}
    found = names_by_stage(shapes, second)
    order = {rank: place for place, stage in enumerate(_stages_by_messages(second)) for rank in stage}
    rows = sorted(second.rows("param"), key=lambda one: order.get(one[0].rank, 0))
    drawn = {
        (rank.rank, name): bits for rank in second.ranks for name, bits in rank.about.get("drawn_parts", {}).items()
    }
    named: dict[Key, str] = {}
    for rank, row in rows:
        if (name := found.get((rank.rank, row.name), row.name)) in shapes:
            named[rank.rank, row.name] = name
    by_bits = {(drawn[key], shapes[name]): name for key, name in named.items() if key in drawn}
    left: dict[tuple[str, tuple[int, ...]], dict[tuple[int, str], list[Key]]] = {}
    for rank, row in rows:
        key = rank.rank, row.name
        if key in named or row.alias_of:
            continue
        if name := by_bits.get((drawn.get(key, ""), row.shape), ""):
            found[key] = named[key] = name
        else:
            place = order.get(rank.rank, 0), row.name
            left.setdefault((_last_name(row.name), row.shape), {}).setdefault(place, []).append(key)
    free: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in shapes.keys() - {*named.values()}:
        free.setdefault((_last_name(name), shapes[name]), []).append(name)
    for kind, mine in left.items():
        names = [name for name in shapes if name in free.get(kind, ())]
        if len(names) == len(mine):
            found |= {key: name for name, keys in zip(names, mine.values(), strict=True) for key in keys}
    return found


def _last_name(name: str) -> str:
    return name.rpartition(".")[2]
