"""Patterns in wrong numbers: right ones in wrong places, right ones of another step, or with a vector too much.

Every pattern is tested on the numbers, none is guessed from names; what fits none gets no cause. Tensors are full ones
of equal shape; `axes` are the mesh axes that split something, name -> size. Patterns as listed by real bugs: rows in
another order, collectives on flat memory, a neighbour's shard. Factors are those of `harness.diagnosing.rules.factors`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from harness.diagnosing.rules.causes import MEANT, Cause
from harness.errors import ranks_text

__all__ = ["causes", "drift", "explains", "not_finite", "partial_sums", "rounded", "same", "share_left"]

CLOSE = 1e-2
"""A tensor is right within this share of itself, as far as these patterns look."""
SINGLE = 1e-4
"""A single number comes near another one by chance, so it must come nearer."""
_LEFT = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Share of the error that may be left when a pattern explains it; rounding leaves more in shorter dtypes."""
_LEFT_IN_SHORT = 3e-2
DRIFT = 64
"""Replicas within this many machine epsilons of the truth differ in their last bits only."""
FEWEST = 8
"""So many numbers of a shorter dtype are none by chance."""
_NOT_FINITE = "NaN or infinite: uninitialised memory, an overflow or a division by zero"
MOST_ROWS = 4096
"""Rows beyond this are not searched for permutations."""


def share_left(value: Tensor) -> float:
    """The share of its error that an explanation of this value may leave, by its dtype."""
    return _LEFT.get(value.dtype, _LEFT_IN_SHORT if value.is_floating_point() else _LEFT[torch.float64])


def causes(value: Tensor, truth: Tensor, axes: Mapping[str, int], others: Mapping[str, Tensor]) -> list[Cause]:
    """The first pattern that explains `value`, none when no one does; `others` are truths it may be taken for."""
    if value.shape != truth.shape or not truth.numel() or not bool(torch.isfinite(truth).all()):
        return []
    x, t, left = value.double(), truth.double(), share_left(value)
    if not bool(torch.isfinite(x).all()):
        share = 1 - float(torch.isfinite(x).double().mean())
        return [Cause(id="nan", words=f"{share:.0%} of it is {_NOT_FINITE}")]
    patterns = (_zero(x, t), _stale(x, t, others, left), _moved(x, t, axes, left), _flat(x, t, axes, left))
    return next(([found] for pattern in (*patterns, _transposed(x, t, left)) for found in pattern), [])


def same(value: Tensor, truth: Tensor) -> bool:
    """Whether a tensor is right as far as these patterns look."""
    error = float((value.double() - truth.double()).norm())
    return error <= CLOSE * float(truth.double().norm())


def explains(guess: Tensor, value: Tensor, truth: Tensor) -> bool:
    """Whether `guess` accounts for the wrong `value`: next to nothing of the error is left."""
    return _explains(guess.double(), value.double(), truth.double(), share_left(value))


def _explains(guess: Tensor, x: Tensor, t: Tensor, share: float) -> bool:
    error, left = float((x - t).norm()), float((x - guess).norm())
    if t.numel() == 1 and left > SINGLE * abs(float(guess)):
        return False
    return 0 < error < math.inf and left <= share * error


def _zero(x: Tensor, t: Tensor) -> Iterator[Cause]:
    if not bool(x.any()) and bool(t.any()):
        yield Cause(id="zero", words="it is zero throughout: never computed, never accumulated, or zeroed too late")


def _stale(x: Tensor, t: Tensor, others: Mapping[str, Tensor], left: float) -> Iterator[Cause]:
    for name, other in others.items():
        distinct = other.shape == x.shape and not torch.equal(other.double(), t)
        if distinct and _explains(other.double(), x, t, left):
            words = f"it equals {name} of the dense model: stale, or taken from the wrong place"
            yield Cause(id="stale", words=words)
            return


def _moved(x: Tensor, t: Tensor, axes: Mapping[str, int], left: float) -> Iterator[Cause]:
    """The right numbers in wrong places."""
    for dim in range(t.dim()):
        for axis, size in axes.items():
            if t.shape[dim] % size or size == 1:
                continue
            width = t.shape[dim] // size
            for shift in range(1, size):
                if _explains(t.roll(shift * width, dim), x, t, left):
                    words = f"along dim {dim} it is shifted by {shift} of {size} shards: a neighbour's shard ({axis})"
                    yield Cause(id="shifted_shard", words=words)
                    return
            if _permuted(x, t, dim, width, left):
                words = f"along dim {dim} the {size} shards of {axis} are in another order: another rank's shard"
                yield Cause(id="other_shard", words=words)
                return
            if copied := list(_copied(x, t, dim, axis, size, left)):
                yield from copied
                return
    for dim in range(t.dim()):
        if _permuted(x, t, dim, 1, left):
            words = f"along dim {dim} it holds the right rows in another order: a wrong layout, reshape or gather dim"
            yield Cause(id="rows_permuted", words=words)
            return


def _copied(x: Tensor, t: Tensor, dim: int, axis: str, size: int, left: float) -> Iterator[Cause]:
    """Parts along a dim that hold another part of the truth, one of them perhaps several times."""
    mine, theirs = x.chunk(size, dim), t.chunk(size, dim)
    taken = [min(range(size), key=lambda j: float((part - theirs[j]).norm())) for part in mine]
    if taken != list(range(size)) and _explains(torch.cat([theirs[j] for j in taken], dim), x, t, left):
        told = ", ".join(f"{j} in place of {i}" for i, j in enumerate(taken) if i != j)
        yield Cause(id="other_shard", words=f"along dim {dim} it holds the wrong parts of {size} ({axis}): {told}")


def _transposed(x: Tensor, t: Tensor, left: float) -> Iterator[Cause]:
    """Two dims exchanged, in a memory of the same shape."""
    for one, other in itertools.combinations(range(t.dim()), 2):
        if min(t.shape[one], t.shape[other]) > 1 and _explains(t.transpose(one, other).reshape(t.shape), x, t, left):
            words = f"dims {one} and {other} are exchanged in memory: a transpose too many, or one left out"
            yield Cause(id="transposed", words=words)
            return


def _flat(x: Tensor, t: Tensor, axes: Mapping[str, int], left: float) -> Iterator[Cause]:
    """Parts along an inner dim, put end to end in memory instead of side by side: as they were gathered or scattered.

    Data ranks are stacked along dim 0, and each has a memory of its own.
    """
    stacks = [stack for stack in dict.fromkeys((1, axes.get("dp", 1))) if t.dim() and t.shape[0] % stack == 0]
    for dim in range(1, t.dim()):
        for axis, size in axes.items():
            if size == 1 or t.shape[dim] % size:
                continue
            for stack in stacks:
                blocks = t.unflatten(0, (stack, -1))
                parts = blocks.unflatten(dim + 1, (size, -1)).movedim(dim + 1, 1)
                gathered = parts.reshape(t.shape)
                scattered = blocks.reshape(parts.shape).movedim(1, dim + 1).flatten(dim + 1, dim + 2).flatten(0, 1)
                if _explains(gathered, x, t, left) or _explains(scattered, x, t, left):
                    words = (
                        f"it holds the right numbers as if flat memory were its {size} shards along dim {dim}: "
                        f"a collective over {axis} along dim {dim} that works along dim 0"
                    )
                    yield Cause(id="flat_dim", words=words)
                    return


def _permuted(x: Tensor, t: Tensor, dim: int, width: int, left: float) -> bool:
    """Whether blocks of `width` along `dim` are those of the truth in another order, each used once."""
    if t.shape[dim] // width > MOST_ROWS:
        return False
    mine, theirs = (y.movedim(dim, 0).reshape(t.shape[dim] // width, -1) for y in (x, t))
    keys = torch.linspace(1.0, 2.0, mine.shape[1], dtype=torch.float64)
    order = (theirs @ keys).argsort()
    places = torch.empty_like(order)
    places[(mine @ keys).argsort()] = order
    guess = theirs[places].reshape(x.movedim(dim, 0).shape).movedim(0, dim)
    return _explains(guess, x, t, left)


def _same_in_rows(rest: Tensor, true: Tensor) -> bool:
    """Whether this is the same in every row, and not just small: what ranks added to their terms (bias, positions)."""
    if rest.dim() < 2 or rest.shape[0] < 2:
        return False
    return float((rest - rest[:1]).norm()) <= 1e-6 * float(true.norm()) < float((true - true[:1]).norm())


def partial_sums(locals_by_rank: Mapping[int, Tensor], truth: Tensor, axes: Mapping[str, int]) -> list[Cause]:
    """Whether replicas that differ are the terms of a sum that was not taken."""
    tensors = [local.double() for local in locals_by_rank.values()]
    if len(tensors) < 2 or any(local.shape != truth.shape for local in tensors):
        return []
    total, true = torch.stack(tensors).sum(0), truth.double()
    for axis, size in axes.items():
        # Each term is held by every rank outside its group.
        copies = len(tensors) / size
        rest = total / copies - true
        if float(rest.norm()) <= 1e-6 * float(true.norm()) or _same_in_rows(rest, true):
            words = (
                f"the ranks' values add up to the truth over {axis}={size}: each holds one partial sum, never reduced"
            )
            return [Cause(id="not_summed", words=words)]
    return []


def not_finite(locals_by_rank: Mapping[int, Tensor], truth: Tensor) -> list[Cause]:
    """Whether replicas differ because some of them hold what is no number."""
    bad = [rank for rank, local in locals_by_rank.items() if not bool(torch.isfinite(local).all())]
    if not bad or not bool(torch.isfinite(truth).all()):
        return []
    return [Cause(id="nan", words=f"on rank{'s' if len(bad) > 1 else ''} {ranks_text(bad)} it is {_NOT_FINITE}")]


def rounded(value: Tensor, truth: Tensor) -> list[Cause]:
    """Whether all numbers of a wrong tensor, unlike the truth's, are ones of a shorter dtype, near the right ones."""
    if value.shape != truth.shape or int((value != 0).sum()) < FEWEST or not bool(torch.isfinite(value).all()):
        return []
    x, t = value.double(), truth.double()
    for short in (torch.float32, torch.bfloat16, torch.float16):
        info = torch.finfo(short)
        is_shorter = value.is_floating_point() and info.eps > torch.finfo(value.dtype).eps
        held, needed = (bool((y.to(short).double() == y).all()) for y in (x, t))
        if is_shorter and held and not needed and float((x - t).abs().max()) <= DRIFT * info.eps * float(t.abs().max()):
            words = (
                f"explained by rounding to {str(short).removeprefix('torch.')}: all its numbers are ones of it; {MEANT}"
            )
            return [Cause(id="shorter_dtype", words=words)]
    return []


def drift(locals_by_rank: Mapping[int, Tensor], truth: Tensor) -> list[Cause]:
    """Whether replicas that differ all are right but for their last bits."""
    limit = float(truth.double().abs().max()) if truth.numel() else 0.0
    for local in locals_by_rank.values():
        allowed = min(DRIFT * torch.finfo(local.dtype).eps, SINGLE) if local.is_floating_point() else 0.0
        if local.shape != truth.shape or not float((local.double() - truth.double()).abs().max()) <= allowed * limit:
            return []
    words = (
        "every rank's is right but for its last bits: replicas computed or updated apart, each with its own rounding"
    )
    return [Cause(id="replicas_drift", words=words)] if limit else []
