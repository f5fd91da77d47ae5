"""Why a tensor of two checkpoints differs: mistakes of a change of layout, each tried on the numbers.

A cause is stated only where it gives every element of B from those of A (a shift: most that differ). Several that give
the same numbers are alternatives, joined by "or".

    padding       rows of a padded vocabulary were kept; B is A from some elements before on (padding of a bucket)
    cut           gate and up cut as one block, qkv as three thirds: what ranks held so was joined as if cut rightly
    order         halves of gate and up exchanged, qkv as thirds and not by kv groups, heads permuted, transposed
    another       B holds what A holds under another key
    number        rounded to a smaller dtype, multiplied by a whole number or its inverse, never written

Sources: around.md 17.2 (re-layout rules), 19 (qkv-thirds, w13-plain, vocab-pad-kept, optim-bucket-padding).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from parallel.communication.layout import Cut, Placement, shard

__all__ = ["cause", "same", "unlike"]

_RANKS = range(2, 17)
"""Numbers of ranks for which wrong cuts are tried."""
_VOCABULARY = re.compile(r"(embedding\.tokens|head)\.weight")
_WINDOW = 8
"""Neighbouring elements by which a place of A is found in B."""


def cause(key: str, a: Tensor, b: Tensor, read: Callable[[str], Tensor], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The mistakes that turn `a` into `b`, "" when none of those above does.

    `read` gives the other tensors of A, whose `shapes` these are.
    """
    if a.shape != b.shape:
        return " or ".join(_of_forms(key, a, b))
    tried: list[Iterator[str]] = [_of_another(key, b, read, shapes)]
    if a.dim() and len(a) > 1 and not key.startswith("rng."):
        tried += [_of_cuts(key, a, b, shapes), _of_order(key, a, b), _of_shift(a, b)]
    if a.is_floating_point():
        tried.append(_of_arithmetic(a, b))
    return next((" or ".join(fitting) for fitting in map(list, tried) if fitting), "")


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN is NaN."""
    return a.shape == b.shape and bool((unlike(a, b) == 0).all())


def unlike(a: Tensor, b: Tensor) -> Tensor:
    """Which elements of two tensors of one shape differ; NaN is NaN."""
    return (a != b) & ~(a.isnan() & b.isnan()) if a.is_floating_point() else a != b


def _of_forms(key: str, a: Tensor, b: Tensor) -> Iterator[str]:
    if a.dim() and a.dim() == b.dim() and a.shape[1:] == b.shape[1:] and _VOCABULARY.search(key):
        few, many, who = (a, b, "B") if len(a) < len(b) else (b, a, "A")
        if same(few, many[: len(few)]):
            yield f"{who} kept {len(many) - len(few)} rows of the padded vocabulary behind the {len(few)} of its tokens"
    if a.dim() == 2 and same(a.t(), b):
        yield "B is A transposed"


def _of_another(
    key: str, b: Tensor, read: Callable[[str], Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Nothing was written, or what belongs to another key."""
    if _constant(b):
        if not key.startswith("rng.") and (b.isnan().all() or not b.any()):
            yield f"B is {'not a number' if b.isnan().any() else 'zero'} throughout: nothing was written there"
        return
    for other, shape in shapes.items():
        alike = other != key and shape == tuple(b.shape) and _kind(other) == _kind(key)
        if alike and same(read(other).to(b.dtype), b):
            yield f"B holds there what A holds as {other}"


def _kind(key: str) -> str:
    """Parameters and moments can be mistaken for each other, and states of streams for each other."""
    return key.split(".", maxsplit=1)[0].replace("optimizer", "model")


def _constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[:1]).all() or tensor.isnan().all())


def _of_cuts(key: str, a: Tensor, b: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Rows of a fused weight in the order of another cut, or of another system."""
    length = len(a)
    if ".w13." in key and length % 2 == 0:
        half = length // 2
        if same(a.roll(half, 0), b):
            yield "gate and up are exchanged: the first half of B is the second of A"
        yield from _wrong_cuts(a, b, (half, half), (length,), "gate and up were cut as one block over {} ranks")
    if ".wqkv." in key:
        if length % 3 == 0:
            thirds = (length // 3,) * 3
            yield from _wrong_cuts(a, b, (length,), thirds, "query, key and value were cut as thirds over {} ranks")
        for heads, kv_heads, width in _head_counts(key, length, shapes):
            order = _thirds(heads, kv_heads, width)
            for one, other, which in ((a[order], b, "B"), (a, b[order], "A")):
                if same(one, other):
                    sizes = f"{heads} heads and {kv_heads} kv heads of {width} rows"
                    yield f"{which} has all queries, then all keys, then all values and no kv groups ({sizes})"


def _of_order(key: str, a: Tensor, b: Tensor) -> Iterator[str]:
    """Rows or columns of A in another order."""
    if a.dim() == 2 and a.shape[0] == a.shape[1] and same(a.t(), b):
        yield "B is A transposed"
    for dim, word in enumerate(("rows", "columns")[: a.dim()]):
        if block := _permuted(a.transpose(0, dim), b.transpose(0, dim)):
            heads_word = ": heads are permuted" if ".attention." in key and block > 1 else ""
            yield f"{word} of B are those of A in another order, in blocks of {block}{heads_word}"


def _wrong_cuts(a: Tensor, b: Tensor, right: tuple[int, ...], wrong: tuple[int, ...], words: str) -> Iterator[str]:
    for ranks in _RANKS:
        if any(block % ranks for block in (*right, *wrong)):
            continue
        rightly, wrongly = (_joined(len(a), blocks, ranks) for blocks in (right, wrong))
        if same(b[wrongly], a[rightly]):
            yield f"{words.format(ranks)} where B was written"
        if same(b[rightly], a[wrongly]):
            yield f"{words.format(ranks)} where B was read, or A written"


def _joined(length: int, blocks: tuple[int, ...], ranks: int) -> Tensor:
    """The rows that all ranks hold, one rank after the other."""
    place = Placement(shape=(length,), cuts=(Cut(axis="tp", blocks=blocks),))
    return torch.cat([shard(torch.arange(length), place, {"tp": (rank, ranks)}) for rank in range(ranks)])


def _head_counts(key: str, rows: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[int, int, int]]:
    """(heads, kv heads, width of a head) that the sizes of a fused qkv and of the output projection allow."""
    found = re.search(r"(layers\.\d+\.attention)\.wqkv\.", key)
    out = shapes.get(f"model.{found[1]}.wo.weight") if found else None
    if out is None:
        return
    queries, keys = out[1], (rows - out[1]) // 2
    for width in range(1, keys + 1):
        if keys % width == 0 and queries % width == 0 and (queries // width) % (keys // width) == 0:
            yield queries // width, keys // width, width


def _thirds(heads: int, kv_heads: int, width: int) -> Tensor:
    """The rows of a qkv that is stored by kv groups in the order queries, keys, values."""
    rows = torch.arange((heads + 2 * kv_heads) * width).view(kv_heads, heads // kv_heads + 2, width)
    return torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])


def _permuted(a: Tensor, b: Tensor) -> int:
    """The largest block of rows of `a` that `b` has whole in another order; 0 when it has other rows."""
    held, found = (
        [row.contiguous().view(torch.uint8).numpy().tobytes() for row in side.reshape(len(side), -1)] for side in (a, b)
    )
    place = {row: number for number, row in enumerate(held)}
    rows = [place.get(row, -1) for row in found]
    if len(place) < len(a) or sorted(rows) != [*range(len(a))] or rows == sorted(rows):
        return 0
    starts = [number for number, row in enumerate(rows) if number == 0 or row != rows[number - 1] + 1]
    return math.gcd(*starts, *(rows[number] for number in starts), len(rows))


def _of_shift(a: Tensor, b: Tensor) -> Iterator[str]:
    """Most of what differs is A some elements before or behind, as when padding is counted as data."""
    before, after = a.flatten(), b.flatten()
    wrong = unlike(before, after).nonzero().flatten()
    middle = int(wrong[len(wrong) // 2])
    window = after[middle : middle + _WINDOW]
    if len(window) < 2 or _constant(window):
        return
    for start in (before == window[0]).nonzero().flatten().tolist():
        if start == middle or not same(before[start : start + len(window)], window):
            continue
        moved = middle - start
        known = wrong[(wrong >= moved) & (wrong < len(before) + moved)]
        if 2 * int((after[known] == before[known - moved]).sum()) > len(wrong):
            yield f"elements of A lie {abs(moved)} places {'later' if moved > 0 else 'earlier'} in B: padding of a " + (
                "bucket or a shard was taken for data"
            )
            return


def _of_arithmetic(a: Tensor, b: Tensor) -> Iterator[str]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if torch.finfo(dtype).bits < torch.finfo(a.dtype).bits and same(a.to(dtype).to(a.dtype), b):
            yield f"B is A rounded to {str(dtype).removeprefix('torch.')}"
    largest = int(a.abs().argmax())
    ratio = float(b.flatten()[largest] / a.flatten()[largest])
    for factor in (ratio, 1 / ratio) if math.isfinite(ratio) and ratio else ():
        if abs(factor) >= 1 and factor == round(factor) and same(a * ratio, b):
            yield f"B is A {'times' if factor is ratio else 'divided by'} {factor:g}"
