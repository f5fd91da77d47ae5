"""Patterns in wrong numbers: right numbers in wrong places, numbers of another step, zeros, rounded numbers.

Every pattern is tested on the numbers and none is guessed from names; a tensor that fits none gets no cause. Value and
truth are full tensors of equal shape; `axes` are the mesh axes that split something, name -> size. The patterns are
those of real bugs: rows in another order, collectives on flat memory, a neighbour's shard. Factors: see `factors`.
"""

import itertools
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from shardproof.harness.diagnosing.causes.cause import Cause, claim_cause
from shardproof.harness.diagnosing.causes.hypothesis import STATE, VALUES, Hypothesis, of_values
from shardproof.harness.diagnosing.causes.proofs import Explained, NotFinite, Rounded
from shardproof.harness.verdicts.facts import state_fact

CLOSE = 1e-2
"""A tensor is taken for right if it differs from the truth by less than this share."""
_COUNTED = 20
"""A single whole number below this proves nothing."""
MOST_ROWS = 4096
"""Tensors with more rows are not searched for permutations."""


def from_patterns(
    value: Tensor, truth: Tensor, axes: Mapping[str, int], others: Mapping[str, Tensor], name: str = ""
) -> list[Cause]:
    """The first pattern that explains the `value` of this name; none if no pattern does.

    `others` are the truths of other tensors that it may be.
    """
    if value.shape != truth.shape or not truth.numel() or not bool(torch.isfinite(truth).all()):
        return []
    if not bool(torch.isfinite(value).all()):
        share = 1 - float(torch.isfinite(value).double().mean())
        return claim_cause(
            "nan", state_fact("not_finite", share=share), NotFinite(value=value, truth=truth, names=(name,))
        )
    x, t, is_guess = value.double(), truth.double(), partial(Explained, value=value, truth=truth, names=(name,))
    is_zero = is_guess(guess=torch.zeros_like(t), left=0.0)
    zero = [] if is_count(x, t) else claim_cause("zero", state_fact("zero"), is_zero)
    moved = (
        _guess_moved_parts(x, t, axes, is_guess),
        _guess_flat_parts(t, axes, is_guess),
        _guess_transposed_dims(t, is_guess),
        _guess_parts_apart(x, t, is_guess),
    )
    return list(itertools.islice(itertools.chain(zero, _guess_stale_values(x, t, others, is_guess), *moved), 1))


def is_count(x: Tensor, t: Tensor) -> bool:
    """Whether these are small whole numbers, of steps or of ranks, which equal multiples of others by chance."""
    both = torch.stack([x.flatten(), t.flatten()])
    return t.numel() == 1 and bool((both == both.round()).all()) and float(both.abs().max()) < _COUNTED


_Guess = partial[Explained]
"""Takes what a wrong tensor may be as `guess`."""


def _guess_stale_values(x: Tensor, t: Tensor, others: Mapping[str, Tensor], is_guess: _Guess) -> Iterator[Cause]:
    for name, other in others.items():
        if other.shape == x.shape and not torch.equal(other.double(), t):
            yield from claim_cause("stale", state_fact("equals", other=name), is_guess(guess=other))


def _guess_moved_parts(x: Tensor, t: Tensor, axes: Mapping[str, int], is_guess: _Guess) -> Iterator[Cause]:
    """The right numbers in wrong places."""
    for dim in range(t.dim()):
        for axis, size in by_size(axes):
            if t.shape[dim] % size or size == 1:
                continue
            width, split = t.shape[dim] // size, {"dim": dim, "size": size, "axis": axis}
            for shift in range(1, size):
                shifted = state_fact("shifted", **split, shift=shift)
                yield from claim_cause("other_part", shifted, is_guess(guess=t.roll(shift * width, dim), fitted=1))
            if (order := _find_order(x, t, dim, width)) is not None:
                ordered = is_guess(guess=_reorder_blocks(t, dim, width, order), fitted=size)
                yield from claim_cause("other_part", state_fact("shards_reordered", **split), ordered)
            yield from _guess_copied_parts(x, t, dim, axis, size, is_guess)
    for dim in range(t.dim()):
        if (order := _find_order(x, t, dim, 1)) is not None:
            ordered = is_guess(guess=_reorder_blocks(t, dim, 1, order), fitted=len(order))
            yield from claim_cause("permuted", state_fact("rows_reordered", dim=dim), ordered)


def by_size(axes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Every size with its axes in words: if several axes have one size, parts do not show which axis made them."""
    for size in dict.fromkeys(axes.values()):
        yield " or ".join(axis for axis in axes if axes[axis] == size), size


def _guess_copied_parts(x: Tensor, t: Tensor, dim: int, axis: str, size: int, is_guess: _Guess) -> Iterator[Cause]:
    """Parts along a dim that hold other parts of the truth; several may hold the same one."""
    guess, parts = nearest_parts(x, t, dim, size)
    wrong = state_fact("wrong_parts", dim=dim, size=size, axis=axis, parts=parts)
    yield from claim_cause("other_part", wrong, is_guess(guess=guess, fitted=size))


def nearest_parts(x: Tensor, t: Tensor, dim: int, size: int) -> tuple[Tensor, list[int]]:
    """For each of `size` parts of x along a dim, the nearest part of the truth, and the numbers of these parts."""
    mine, theirs = x.chunk(size, dim), t.chunk(size, dim)
    taken = [min(range(size), key=lambda j: float((part - theirs[j]).norm())) for part in mine]
    return torch.cat([theirs[j] for j in taken], dim), taken


def _guess_transposed_dims(t: Tensor, is_guess: _Guess) -> Iterator[Cause]:
    """Two dims exchanged: the memory of one layout read as the other."""
    for one, other in itertools.combinations(range(t.dim()), 2):
        if min(t.shape[one], t.shape[other]) > 1:
            exchanged = is_guess(guess=t.transpose(one, other).reshape(t.shape), fitted=1)
            yield from claim_cause("permuted", state_fact("dims_exchanged", one=one, other=other), exchanged)


def _guess_flat_parts(t: Tensor, axes: Mapping[str, int], is_guess: _Guess) -> Iterator[Cause]:
    """Parts along an inner dim that lie end to end in memory instead of side by side, as gather or scatter leave them.

    If the data ranks are stacked along dim 0, each of them has a memory of its own.
    """
    stacks = [stack for stack in dict.fromkeys((1, axes.get("dp", 1))) if t.dim() and t.shape[0] % stack == 0]
    for dim in range(1, t.dim()):
        for axis, size in by_size(axes):
            if size == 1 or t.shape[dim] % size:
                continue
            flat = state_fact("flat_shards", size=size, dim=dim, axis=axis)
            for stack in stacks:
                blocks = t.unflatten(0, (stack, -1))
                parts = blocks.unflatten(dim + 1, (size, -1)).movedim(dim + 1, 1)
                scattered = blocks.reshape(parts.shape).movedim(1, dim + 1).flatten(dim + 1, dim + 2).flatten(0, 1)
                for guess in (parts.reshape(t.shape), scattered):
                    yield from claim_cause("permuted", flat, is_guess(guess=guess, fitted=1))


def _guess_parts_apart(x: Tensor, t: Tensor, is_guess: _Guess) -> Iterator[Cause]:
    """Rows or columns in the right order with zeros between them, so that the last ones are lost.

    This is the result if parts are padded to one width and then joined with their padding.
    """
    for dim in range(t.dim()):
        mine, theirs = (y.movedim(dim, 0).reshape(t.shape[dim], -1) for y in (x, t))
        kept = mine.any(1).nonzero().flatten()
        if not len(kept) or len(kept) == len(mine):
            continue
        guess = torch.zeros_like(mine)
        guess[kept] = theirs[: len(kept)]
        first = int((kept != torch.arange(len(kept))).nonzero()[0]) if int(kept[-1]) >= len(kept) else 0
        place, lost = int(kept[first]), len(mine) - len(kept)
        if place > first:
            fact = state_fact("parts_moved", dim=dim, place=place, source=first, lost=lost)
            moved = guess.reshape(t.movedim(dim, 0).shape).movedim(0, dim)
            yield from claim_cause("other_part", fact, is_guess(guess=moved))


def _find_order(x: Tensor, t: Tensor, dim: int, width: int) -> Tensor | None:
    """For each place along `dim`, in blocks of `width`, the block of the truth that stands there; each is used once.

    None if most blocks of the truth are equal to others, since an order would mean nothing.
    """
    count = t.shape[dim] // width
    mine, theirs = (y.movedim(dim, 0).reshape(count, -1) for y in (x, t))
    keys = torch.linspace(1.0, 2.0, mine.shape[1], dtype=torch.float64)
    if count > MOST_ROWS or 2 * len((theirs @ keys).unique()) <= count:
        return None
    order = (theirs @ keys).argsort()
    places = torch.empty_like(order)
    places[(mine @ keys).argsort()] = order
    return places


def _reorder_blocks(t: Tensor, dim: int, width: int, order: Tensor) -> Tensor:
    rows = t.movedim(dim, 0)
    return rows.reshape(len(order), width, -1)[order].reshape(rows.shape).movedim(0, dim)


def guess_rounded_numbers(value: Tensor, truth: Tensor, name: str = "") -> list[Cause]:
    """Whether all numbers of a wrong tensor fit a shorter dtype and are near the right ones, which do not fit it."""
    for short in (torch.float32, torch.bfloat16, torch.float16):
        fact = state_fact("rounded", dtype=str(short).removeprefix("torch."))
        if causes := claim_cause("shorter_dtype", fact, Rounded(value=value, truth=truth, short=short, names=(name,))):
            return causes
    return []


HYPOTHESES = (
    Hypothesis(
        predicts="the truth, rounded to a shorter dtype",
        causes=of_values(
            lambda seen, names: guess_rounded_numbers(
                seen.run.tensors[names[0]], seen.truth.tensors[names[0]], names[0]
            )
        ),
        kinds=VALUES | {STATE},
    ),
)
