"""Which part of which parameter of the first launch every parameter of the second one is, by its initial values.

A layout that the program states comes first, then the part of the parameter of this name that has its numbers. Where
none has, all parameters are looked through: a stage of a pipeline counts its layers anew, and one weight may hold
several (q, k and v). A part is cut along one dim, in any order: slices are recognised by their bits. A tensor whose
elements are all equal (a bias of zeros) shows nothing; it lies as the weight of its module does, or is the one that is
left of its shape and numbers. What is found here is decided before anything is computed, and everything later is held
to it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardproof.harness.outcome.blocks import Block
from shardproof.harness.outcome.merging import bits_of, same_bits
from shardproof.harness.parity.recorded import Launch, stated_block
from shardproof.harness.programs.values import ValueRow

_MOST_SLICES = 2**20
"""A tensor with more slices than this along a dim is not looked for slice by slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """A run of slices of a local tensor, `start` to `start + length`, and where it lies in a parameter of the first
    launch, `name`, of shape `full`: at `offset` along the dim of the placement.
    """

    start: int
    length: int
    name: str
    full: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlacement:
    """Where a rank's parameter lies in those of the first launch: pieces along `dim`, or by the row's own offsets.

    `stated` is the name of the parameter whose part the program states, then there are no pieces. `known` says that
    its initial values are the first launch's, bit for bit.
    """

    dim: int = 0
    pieces: tuple[ParameterSlice, ...] = ()
    stated: str = ""
    known: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of the first launch of which it holds something."""
        return (self.stated,) if self.stated else tuple(dict.fromkeys(piece.name for piece in self.pieces))

    def blocks_of(self, row: ValueRow, local: Tensor) -> list[tuple[str, Block]]:
        """The tensor of a row that lies as the parameter does, as blocks of the first launch's tensors, by name."""
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

    `modules`: by rank, paths of modules that have another path in the first launch -> that path.
    """

    placements: Mapping[tuple[int, str], SlicePlacement]
    unplaced: tuple[tuple[int, str], ...] = ()
    modules: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def path(self, rank: int, module: str) -> str:
        """The path of a rank's module in the first launch."""
        return _rename(module, self.modules.get(rank, {}))


def find_partners(initial: Mapping[str, Tensor], aliases: Mapping[str, str], second: Launch) -> Partners:
    """The partners of the second launch's parameters among the `initial` values of the first one's.

    `aliases`: further names of the first launch's parameters -> the name in `initial`.
    """
    index = _Index(initial, aliases)
    placements: dict[tuple[int, str], SlicePlacement] = {}
    open_rows: list[tuple[int, ValueRow, Tensor]] = []
    for rank, row in second.rows("param"):
        local = rank.tensor(row)
        placement = index.by_values(row, local)
        if placement is None:
            open_rows.append((rank.rank, row, local))
        else:
            placements[rank.rank, row.name] = placement
    modules = {rank.rank: _renames_of(rank.rank, placements) for rank in second.ranks}
    unplaced = []
    sizes = _parts_of_names(second)
    for number, row, local in open_rows:
        name = index.known_name(_rename(row.name, modules[number]))
        found = _beside(number, row, local, name, index, placements)
        if found is None:
            found = _by_shape(number, row, local, name, index, placements, sizes)
        if found is None:
            unplaced.append((number, row, local))
        else:
            placements[number, row.name] = found
    placements |= _find_last_left(unplaced, index, placements, sizes)
    alone = tuple((number, row.name) for number, row, _ in unplaced if (number, row.name) not in placements)
    modules = {rank.rank: _renames_of(rank.rank, placements) for rank in second.ranks}
    return Partners(placements=placements, unplaced=alone, modules=modules)


def _find_last_left(
    unplaced: Sequence[tuple[int, ValueRow, Tensor]],
    index: "_Index",
    placements: Mapping[tuple[int, str], SlicePlacement],
    sizes: Mapping[str, Mapping[int, tuple[int, ...]]],
) -> dict[tuple[int, str], SlicePlacement]:
    """Placements by elimination: of what no rank holds yet one parameter alone has the numbers of one row alone."""
    free = index.initial.keys() - {name for placement in placements.values() for name in placement.names}
    wanted: dict[tuple[int, str], list[tuple[str, SlicePlacement]]] = {}
    for number, row, local in unplaced:
        fitting = (_by_shape(number, row, local, name, index, placements, sizes) for name in free)
        found = [placement for placement in fitting if placement is not None and placement.known]
        for placement in found:
            wanted.setdefault((number, placement.names[0]), []).append((row.name, placement))
    counts = Counter((number, row) for (number, _), rows in wanted.items() for row, _ in rows)
    alone = ((number, *rows[0]) for (number, _), rows in wanted.items() if len(rows) == 1)
    return {(number, row): placement for number, row, placement in alone if counts[number, row] == 1}


class _Index:
    """The first launch's parameters, by name and by the bits of their slices."""

    def __init__(self, initial: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
        self.initial, self._aliases = initial, aliases
        self._slices: dict[tuple[int, tuple[int, ...], torch.dtype], dict[bytes, list[tuple[str, int]]]] = {}

    def known_name(self, name: str) -> str:
        """The name under which the first launch has this parameter, "" where it has none."""
        name = self._aliases.get(name, name)
        return name if name in self.initial else ""

    def by_values(self, row: ValueRow, local: Tensor) -> SlicePlacement | None:
        """The placement that its numbers show; None where they show none."""
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
        dims = [dim for dim, (a, b) in enumerate(zip(full.shape, local.shape, strict=False)) if a != b]
        if full.dim() != local.dim() or len(dims) != 1:
            return None
        return self._along(local, dims[0], name)

    def _along(self, local: Tensor, dim: int, name: str | None) -> SlicePlacement | None:
        """The places of its slices along a dim, in one parameter or in any; None where one of them is nowhere.

        Slices at the end that are nowhere may be padding, where the parameter of its name has fewer slices in all.
        """
        rest = (*local.shape[:dim], *local.shape[dim + 1 :])
        key = dim, rest, local.dtype
        if key not in self._slices:
            known: dict[bytes, list[tuple[str, int]]] = {}
            for other, full in self.initial.items():
                if full.dim() == local.dim() and (*full.shape[:dim], *full.shape[dim + 1 :]) == rest:
                    for number, one in enumerate(_slices(full.to(local.dtype), dim)):
                        known.setdefault(one, []).append((other, number))
            self._slices[key] = known
        known = self._slices[key]
        places: list[tuple[str, int]] = []
        for one in _slices(local, dim):
            found = [place for place in known.get(one, ()) if name is None or place[0] == name]
            if not found:
                break
            follows = (places[-1][0], places[-1][1] + 1) if places else None
            places.append(follows if follows in found else found[0])
        length = local.shape[dim]
        padded = name is not None and 0 < len(places) < length and places[-1][1] == self.initial[name].shape[dim] - 1
        if len(places) < length and not padded:
            return None
        pieces, start = [], 0
        for end in range(1, len(places) + 1):
            if end == len(places) or places[end] != (places[end - 1][0], places[end - 1][1] + 1):
                other, offset = places[start]
                shape = tuple(self.initial[other].shape)
                pieces.append(ParameterSlice(start=start, length=end - start, name=other, full=shape, offset=offset))
                start = end
        return SlicePlacement(dim=dim, pieces=tuple(pieces)) if pieces else None


def is_flat(row: ValueRow, full: Tensor) -> bool:
    """Whether a row is a piece of the flattened parameter, as FSDP1 holds it."""
    return row.stated_by == "fsdp" and row.global_shape == (full.numel(),)


def _is_telling(local: Tensor) -> bool:
    """Whether its numbers show where it lies: they are not all the same one."""
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
    """Beginnings of paths that are others in the first launch, as this rank's parameters show it."""
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


def _beside(
    rank: int,
    row: ValueRow,
    local: Tensor,
    name: str,
    index: _Index,
    placements: Mapping[tuple[int, str], SlicePlacement],
) -> SlicePlacement | None:
    """A vector without telling numbers lies as the rows of the matrix of its module do."""
    module, _, leaf = row.name.rpartition(".")
    if row.global_shape is not None or local.dim() != 1 or (name and index.initial[name].shape == local.shape):
        return None
    for (own, other), placement in placements.items():
        same = own == rank and other.rpartition(".")[0] == module and other != row.name
        if not same or placement.stated or placement.dim != 0 or not placement.known:
            continue
        if sum(piece.length for piece in placement.pieces) != len(local):
            continue
        pieces = []
        for piece in placement.pieces:
            beside = index.known_name(".".join([*piece.name.split(".")[:-1], leaf]))
            full = tuple(index.initial[beside].shape) if beside else ()
            if full == piece.full[:1]:
                moved = ParameterSlice(
                    start=piece.start, length=piece.length, name=beside, full=full, offset=piece.offset
                )
                pieces.append(moved)
        if len(pieces) == len(placement.pieces):
            return SlicePlacement(pieces=tuple(pieces), known=_holds(pieces, local, index))
    return None


def _holds(pieces: Sequence[ParameterSlice], local: Tensor, index: _Index, dim: int = 0) -> bool:
    """Whether these pieces of a tensor have the first launch's numbers."""
    return all(
        _equal(
            index.initial[piece.name].narrow(dim, piece.offset, piece.length),
            local.narrow(dim, piece.start, piece.length),
        )
        for piece in pieces
    )


def _parts_of_names(second: Launch) -> dict[str, dict[int, tuple[int, ...]]]:
    """By name of a parameter: rank -> the shape of its part."""
    shapes: dict[str, dict[int, tuple[int, ...]]] = {}
    for rank, row in second.rows("param"):
        shapes.setdefault(row.name, {})[rank.rank] = row.shape
    return shapes


def _by_shape(
    rank: int,
    row: ValueRow,
    local: Tensor,
    name: str,
    index: _Index,
    placements: Mapping[tuple[int, str], SlicePlacement],
    shapes: Mapping[str, Mapping[int, tuple[int, ...]]],
) -> SlicePlacement | None:
    """The placement of a parameter whose numbers show none: as stated, whole, or a part by the rank's place."""
    if not name:
        return None
    full = index.initial[name]
    if row.global_shape is not None and row.offsets is not None:
        full = full.flatten() if is_flat(row, full) else full
        if tuple(full.shape) != row.global_shape:
            return None
        block = Block(local=local, offsets=row.offsets, global_shape=row.global_shape)
        return SlicePlacement(stated=name, known=_equal(block.part_of(full), local))
    if full.shape == local.shape:
        return _whole(name, local, known=_equal(full, local))
    dims = [dim for dim, (a, b) in enumerate(zip(full.shape, local.shape, strict=False)) if a != b]
    if full.dim() != local.dim() or len(dims) != 1 or full.shape[dims[0]] % local.shape[dims[0]]:
        return None
    dim, length = dims[0], local.shape[dims[0]]
    parts = full.shape[dim] // length
    at = _place_of_rank(rank, parts, placements)
    if at is None:
        at = sorted(shapes[row.name]).index(rank) % parts
    piece = ParameterSlice(start=0, length=length, name=name, full=tuple(full.shape), offset=at * length)
    return SlicePlacement(dim=dim, pieces=(piece,), known=_holds([piece], local, index, dim))


def _place_of_rank(rank: int, parts: int, placements: Mapping[tuple[int, str], SlicePlacement]) -> int | None:
    """Which of so many parts the rank holds of parameters whose numbers show it; None where none does."""
    for (own, _), placement in placements.items():
        if own == rank and placement.known and len(placement.pieces) == 1:
            piece = placement.pieces[0]
            if piece.full and piece.full[placement.dim] == parts * piece.length and not piece.offset % piece.length:
                return piece.offset // piece.length
    return None
