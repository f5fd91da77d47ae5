"""Finds by initial values which part of which parameter of the first launch each parameter of the second one is.

A layout that the program states is the only one tried, except Megatron's. Else the parts of the parameter with the same
name are tried. If their numbers differ, all parameters are searched: a pipeline stage numbers its layers from 0, and
one weight may hold several (q, k and v). A part is cut along one dim, in any order: slices are recognised by their
bits. A tensor whose elements are all equal (a bias of zeros) does not show its place. It is placed as the weight of its
module is, or by its name and shape, or in the one free parameter that it fits. Where numbers show nothing of a stage's
layers, their order does. All of this is decided before anything is computed, and holds for all later comparisons.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shardproof.harness.outcome.blocks import Block
from shardproof.harness.outcome.merging import bits_of, same_bits
from shardproof.harness.parity.recorded import Launch, stated_block
from shardproof.harness.parity.stages import names_by_stage
from shardproof.harness.programs.values import ValueRow

_MOST_SLICES = 2**20
"""A tensor with more slices than this along a dim is not looked for slice by slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """Slices `start` to `start + length` of a local tensor, and their place in the first launch: from `offset` on in
    the parameter `name` of shape `full`, along the dim of the placement.
    """

    start: int
    length: int
    name: str
    full: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlacement:
    """The place of a rank's parameter in those of the first launch: pieces along `dim`, or the offsets of its row.

    `stated` is the name of the parameter if the program states its layout; there are no pieces then. `known`: its
    initial values are those of the first launch, bit for bit.
    """

    dim: int = 0
    pieces: tuple[ParameterSlice, ...] = ()
    stated: str = ""
    known: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of the first launch of which it holds a part."""
        return (self.stated,) if self.stated else tuple(dict.fromkeys(piece.name for piece in self.pieces))

    def blocks_of(self, row: ValueRow, local: Tensor) -> list[tuple[str, Block]]:
        """A tensor with the layout of the parameter, as blocks of the first launch's tensors by name."""
        if self.stated:
            return [(self.stated, stated_block(row, local))]
        found = []
        for piece in self.pieces:
            part = local.narrow(self.dim, piece.start, piece.length) if local.dim() else local
            offsets = tuple(piece.offset if dim == self.dim else 0 for dim in range(local.dim()))
            found.append((piece.name, Block(local=part, offsets=offsets, global_shape=piece.full)))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Partners:
    """The placements of a launch's parameters by (rank, name), and those without one.

    `modules`: by rank, the path of a module -> its path in the first launch, if that is another one. `staged`: names in
    the first launch of parameters whose stage numbers its layers by itself.
    """

    placements: Mapping[tuple[int, str], SlicePlacement]
    unplaced: tuple[tuple[int, str], ...] = ()
    modules: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    staged: Mapping[tuple[int, str], str] = field(default_factory=dict)

    def path(self, rank: int, module: str) -> str:
        """The path of a rank's module in the first launch."""
        return _rename(module, self.modules.get(rank, {}))


def find_partners(initial: Mapping[str, Tensor], aliases: Mapping[str, str], second: Launch) -> Partners:
    """The partners of the second launch's parameters among the `initial` values of the first one's.

    `aliases`: further names of the first launch's parameters -> the name in `initial`.
    """
    search = _Search(_Index(initial, aliases), second, names_by_stage([*initial, *aliases], second))
    parameters = (_Parameter(rank.rank, row, rank.tensor(row)) for rank, row in second.rows("param"))
    left = search.place(parameters, search.index.by_values)
    modules = {rank.rank: _renames_of(rank.rank, search.placements) for rank in second.ranks}
    left = search.place(left, lambda one: search.by_name(one, modules[one.rank]))
    search.place_what_is_left(left)
    alone = tuple(one.key for one in left if one.key not in search.placements)
    modules = {rank.rank: _renames_of(rank.rank, search.placements) for rank in second.ranks}
    return Partners(placements=search.placements, unplaced=alone, modules=modules, staged=search.staged)


class _Parameter(NamedTuple):
    """A parameter of a rank of the second launch, with its initial values."""

    rank: int
    row: ValueRow
    local: Tensor

    @property
    def key(self) -> tuple[int, str]:
        """Rank and name."""
        return self.rank, self.row.name


class _Index:
    """The first launch's parameters, by name and by the bits of their slices."""

    def __init__(self, initial: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
        self.initial, self._aliases = initial, aliases
        self._slices: dict[tuple[int, tuple[int, ...], torch.dtype], dict[bytes, list[tuple[str, int]]]] = {}

    def known_name(self, name: str) -> str:
        """The name under which the first launch has this parameter, "" where it has none."""
        name = self._aliases.get(name, name)
        return name if name in self.initial else ""

    def by_values(self, one: "_Parameter") -> SlicePlacement | None:
        """The placement that the numbers of a parameter show, or None."""
        row, local = one.row, one.local
        if not _is_telling(local):
            return None
        name = self.known_name(row.name)
        if row.global_shape is not None and row.offsets is not None:
            found = self._find_stated(row, local, name)
            # Megatron's attributes say along which dim a weight is cut, not that its parts are contiguous.
            if found or row.stated_by != "megatron":
                return found
        if name and (found := self._in_one(local, name)):
            return found
        equal = [other for other, full in self.initial.items() if full.shape == local.shape and _equal(full, local)]
        if equal:
            return _whole(equal[0], local)
        for dim in range(local.dim()):
            if found := self._along(local, dim, None):
                return found
        return None

    def _find_stated(self, row: ValueRow, local: Tensor, name: str) -> SlicePlacement | None:
        block = Block(local=local, offsets=row.offsets or (), global_shape=row.global_shape or ())
        names = [name] if name else []
        names += [other for other in self.initial if other != name]
        for other in names:
            full = self.initial[other]
            if is_flat(row, full):
                full = full.flatten()
            if tuple(full.shape) == block.global_shape and _equal(block.part_of(full), local):
                return SlicePlacement(stated=other)
        return None

    def _in_one(self, local: Tensor, name: str) -> SlicePlacement | None:
        """Its place in the parameter of this name."""
        full = self.initial[name]
        if full.shape == local.shape:
            return _whole(name, local) if _equal(full, local) else self._along(local, 0, name) if local.dim() else None
        dim = _only_differing_dim(full, local)
        return None if dim is None else self._along(local, dim, name)

    def _along(self, local: Tensor, dim: int, name: str | None) -> SlicePlacement | None:
        """The places of its slices along a dim, in one parameter or in any; None if one of them is nowhere.

        Slices at the end that are nowhere may be padding, if the slice before them is the last of the named parameter.
        """
        places = self._find_slices(local, dim, name)
        length = local.shape[dim]
        padded = name is not None and 0 < len(places) < length and places[-1][1] == self.initial[name].shape[dim] - 1
        if not places or (len(places) < length and not padded):
            return None
        pieces, start = [], 0
        for end in range(1, len(places) + 1):
            if end == len(places) or places[end] != (places[end - 1][0], places[end - 1][1] + 1):
                other, offset = places[start]
                shape = tuple(self.initial[other].shape)
                pieces.append(ParameterSlice(start=start, length=end - start, name=other, full=shape, offset=offset))
                start = end
        return SlicePlacement(dim=dim, pieces=tuple(pieces))

    def _find_slices(self, local: Tensor, dim: int, name: str | None) -> list[tuple[str, int]]:
        """Parameter and number of the slices of a tensor, up to the first one that is nowhere."""
        known = self._slices_like(local, dim)
        places: list[tuple[str, int]] = []
        for one in _slices(local, dim):
            found = [place for place in known.get(one, ()) if name is None or place[0] == name]
            if not found:
                break
            # Of equal slices the one that continues the piece, so that a contiguous part is one piece.
            follows = (places[-1][0], places[-1][1] + 1) if places else None
            places.append(follows if follows in found else found[0])
        return places

    def _slices_like(self, local: Tensor, dim: int) -> Mapping[bytes, Sequence[tuple[str, int]]]:
        """Bits in this tensor's dtype -> parameter and number of every slice along `dim` that has its slices' shape."""
        rest = (*local.shape[:dim], *local.shape[dim + 1 :])
        key = dim, rest, local.dtype
        if key not in self._slices:
            known: dict[bytes, list[tuple[str, int]]] = {}
            for other, full in self.initial.items():
                if full.dim() == local.dim() and (*full.shape[:dim], *full.shape[dim + 1 :]) == rest:
                    for number, one in enumerate(_slices(full.to(local.dtype), dim)):
                        known.setdefault(one, []).append((other, number))
            self._slices[key] = known
        return self._slices[key]


def is_flat(row: ValueRow, full: Tensor) -> bool:
    """Whether a row is a piece of the flattened parameter, as FSDP1 holds it."""
    return row.stated_by == "fsdp" and row.global_shape == (full.numel(),)


def _is_telling(local: Tensor) -> bool:
    """Whether its numbers can show its place: not all of them are equal."""
    return local.numel() > 1 and bool((local != local.flatten()[0]).any())


def _equal(full: Tensor, local: Tensor) -> bool:
    return same_bits(full.to(local.dtype).contiguous(), local.contiguous())


def _slices(tensor: Tensor, dim: int) -> Iterator[bytes]:
    """The bytes of its slices along a dim; none of a tensor that has too many."""
    count = tensor.shape[dim]
    if not 0 < count <= _MOST_SLICES or not tensor.numel():
        return
    rows = bits_of(tensor.movedim(dim, 0).contiguous()).reshape(count, -1).numpy()
    yield from (row.tobytes() for row in rows)


def _whole(name: str, local: Tensor, *, known: bool = True) -> SlicePlacement:
    length = local.shape[0] if local.dim() else 1
    piece = ParameterSlice(start=0, length=length, name=name, full=tuple(local.shape), offset=0)
    return SlicePlacement(pieces=(piece,), known=known)


def _renames_of(rank: int, placements: Mapping[tuple[int, str], SlicePlacement]) -> dict[str, str]:
    """Beginning of a path -> that of the first launch, where this rank's parameters show that they differ."""
    votes: dict[str, Counter[str]] = {}
    for (own, name), placement in placements.items():
        if own != rank or len(placement.names) != 1:
            continue
        mine, theirs = name.split("."), placement.names[0].split(".")
        while len(mine) > 1 and len(theirs) > 1 and mine[-1] == theirs[-1]:
            mine, theirs = mine[:-1], theirs[:-1]
        if mine != theirs:
            votes.setdefault(".".join(mine), Counter())[".".join(theirs)] += 1
    return {path: counts.most_common(1)[0][0] for path, counts in votes.items()}


def _rename(path: str, renames: Mapping[str, str]) -> str:
    """A path whose longest known beginning is replaced."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        if (begin := ".".join(parts[:end])) in renames:
            return ".".join([renames[begin], *parts[end:]])
    return path


class _Search:
    """The `placements` of the second launch's parameters, by rank and name, as far as they are found."""

    def __init__(self, index: _Index, second: Launch, staged: Mapping[tuple[int, str], str]) -> None:
        self.index, self.staged = index, staged
        self.placements: dict[tuple[int, str], SlicePlacement] = {}
        self._holders: dict[str, set[int]] = {}
        """By name of a parameter, the ranks that hold it or a part of it."""
        for rank, row in second.rows("param"):
            self._holders.setdefault(row.name, set()).add(rank.rank)

    def place(
        self, parameters: Iterable[_Parameter], find: Callable[[_Parameter], SlicePlacement | None]
    ) -> list[_Parameter]:
        """Place the parameters for which `find` returns a placement. Returns the others."""
        left = []
        for one in parameters:
            found = find(one)
            if found is None:
                left.append(one)
            else:
                self.placements[one.key] = found
        return left

    def by_name(self, one: _Parameter, renames: Mapping[str, str]) -> SlicePlacement | None:
        """The placement beside the matrix of its module, else in the parameter of its name by shape."""
        renamed = _rename(one.row.name, renames)
        name = self.index.known_name(self.staged.get(one.key, renamed) if renamed == one.row.name else renamed)
        return self._beside_matrix(one, name) or self._by_shape(one, name)

    def place_what_is_left(self, unplaced: Sequence[_Parameter]) -> None:
        """Place each parameter that alone fits a free parameter of the first launch, if it fits no other free one."""
        free = self.index.initial.keys() - {name for placed in self.placements.values() for name in placed.names}
        fitting: dict[tuple[int, str], list[tuple[_Parameter, SlicePlacement]]] = {}
        for one in unplaced:
            for placement in (self._by_shape(one, name) for name in free):
                if placement is not None and placement.known:
                    fitting.setdefault((one.rank, placement.names[0]), []).append((one, placement))
        choices = Counter(one.key for rows in fitting.values() for one, _ in rows)
        for rows in fitting.values():
            if len(rows) == 1 and choices[rows[0][0].key] == 1:
                self.placements[rows[0][0].key] = rows[0][1]

    def _beside_matrix(self, one: _Parameter, name: str) -> SlicePlacement | None:
        """The placement of a vector that its numbers did not place: as the rows of its module's matrix."""
        module, _, leaf = one.row.name.rpartition(".")
        initial = self.index.initial
        if (
            one.row.global_shape is not None
            or one.local.dim() != 1
            or (name and initial[name].shape == one.local.shape)
        ):
            return None
        for (rank, other), matrix in self.placements.items():
            same_module = rank == one.rank and other.rpartition(".")[0] == module and other != one.row.name
            if not same_module or matrix.stated or matrix.dim != 0 or not matrix.known:
                continue
            if sum(piece.length for piece in matrix.pieces) != len(one.local):
                continue
            pieces = []
            for piece in matrix.pieces:
                vector = self.index.known_name(".".join([*piece.name.split(".")[:-1], leaf]))
                if vector and tuple(initial[vector].shape) == piece.full[:1]:
                    pieces.append(replace(piece, name=vector, full=piece.full[:1]))
            if len(pieces) == len(matrix.pieces):
                return SlicePlacement(pieces=tuple(pieces), known=self._has_numbers(one, pieces))
        return None

    def _by_shape(self, one: _Parameter, name: str) -> SlicePlacement | None:
        """The placement in this parameter, whatever its numbers: as stated, whole, or the part of the rank's place."""
        if not name:
            return None
        row, local, full = one.row, one.local, self.index.initial[name]
        if row.global_shape is not None and row.offsets is not None:
            full = full.flatten() if is_flat(row, full) else full
            if tuple(full.shape) != row.global_shape:
                return None
            block = Block(local=local, offsets=row.offsets, global_shape=row.global_shape)
            return SlicePlacement(stated=name, known=_equal(block.part_of(full), local))
        if full.shape == local.shape:
            return _whole(name, local, known=_equal(full, local))
        dim = _only_differing_dim(full, local)
        if dim is None or full.shape[dim] % local.shape[dim]:
            return None
        length = local.shape[dim]
        parts = full.shape[dim] // length
        number = self._part_of_rank(one.rank, parts)
        if number is None:
            number = sorted(self._holders[row.name]).index(one.rank) % parts
        piece = ParameterSlice(start=0, length=length, name=name, full=tuple(full.shape), offset=number * length)
        return SlicePlacement(dim=dim, pieces=(piece,), known=self._has_numbers(one, [piece], dim))

    def _part_of_rank(self, rank: int, parts: int) -> int | None:
        """Which of `parts` equal parts of another parameter the rank is known to hold; None without one."""
        for (own, _), placement in self.placements.items():
            if own == rank and placement.known and len(placement.pieces) == 1:
                piece = placement.pieces[0]
                whole = piece.full[placement.dim] if piece.full else 0
                if whole == parts * piece.length and not piece.offset % piece.length:
                    return piece.offset // piece.length
        return None

    def _has_numbers(self, one: _Parameter, pieces: Sequence[ParameterSlice], dim: int = 0) -> bool:
        """Whether these pieces of a parameter have the first launch's numbers."""
        return all(
            _equal(
                self.index.initial[piece.name].narrow(dim, piece.offset, piece.length),
                one.local.narrow(dim, piece.start, piece.length),
            )
            for piece in pieces
        )


def _only_differing_dim(full: Tensor, local: Tensor) -> int | None:
    """The dim in which the two shapes differ, if it is one alone."""
    dims = [dim for dim, (a, b) in enumerate(zip(full.shape, local.shape, strict=False)) if a != b]
    return dims[0] if full.dim() == local.dim() and len(dims) == 1 else None
