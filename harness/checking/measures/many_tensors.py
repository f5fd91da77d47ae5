"""Many tensors compared at once: the rms of every kind, and what `tolerance.measure` finds, in a tenth of its time.

Small tensors are concatenated in float64, and sums and maxima are taken by segment. What this cannot compare is left to
`measure`: other dtypes, large or empty tensors, integers that differ, squares that would underflow, and a truth that is
nearly zero compared with its kind.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.measures.measured import (
    FLOAT64_ALLOWED,
    MEASURES,
    SCALE_SHARE,
    Measured,
    epsilon,
    measure_exact,
)

_EPSILON = epsilon("float64")


BLOCK = 2**18
"""The most elements that are read at a time: large tensors are read in blocks, so that no temporary is as large."""
SOUND = (1e-140, 1e38)
"""A largest element between these two has a square that neither underflows nor overflows, and is none of LARGEST."""
LARGEST = frozenset(torch.finfo(dtype).max for dtype in (torch.float64, torch.float32, torch.bfloat16))
"""The largest numbers of dtypes. Programs mask with them (`torch.finfo(x.dtype).min`) as others do with an infinity.

That of float16, 65,504, is left out: a right result may be as large.
"""


def kind_rms(truth: Mapping[str, Tensor]) -> dict[str, float]:
    """The rms over all tensors of each kind of name ("grad", "act", ...), without tensors that are not finite."""
    kinds: dict[str, dict[str, int]] = {}
    for name, tensor in truth.items():
        if tensor.is_floating_point():
            kinds.setdefault(kind_of(name), {})[name] = tensor.numel()
    rms: dict[str, float] = {}
    for kind, sizes in kinds.items():
        found = [each for names in groups_of(sizes) for each in _root_mean_squares([truth[name] for name in names])]
        if found:
            largest, count = max(each for each, _ in found), max(sum(count for _, count in found), 1)
            shares = sum(count * (each / largest) ** 2 for each, count in found) if largest else 0.0
            rms[kind] = largest * math.sqrt(shares / count)
    return rms


def _root_mean_squares(tensors: Sequence[Tensor]) -> list[tuple[float, int]]:
    """(Root of the mean square, number of elements) of all the tensors together, or of each one that is finite."""
    count = sum(tensor.numel() for tensor in tensors)
    blocks = [_end_to_end(tensors)] if len(tensors) > 1 else blocks_of(tensors[0])
    square = sum(float(block.dot(block)) for block in (block.reshape(-1).double() for block in blocks))
    if square < SOUND[1] ** 2:
        return [(math.sqrt(square / max(count, 1)), count)]
    if len(tensors) > 1:
        return [each for tensor in tensors for each in _root_mean_squares([tensor])]
    largest = max(largest_of(block.double()) for block in blocks_of(tensors[0]))
    if not math.isfinite(largest) or largest in LARGEST:
        return []
    shares = sum(float((block.double() / largest).square().sum()) for block in blocks_of(tensors[0]))
    return [(largest * math.sqrt(shares / count), count)]


def largest_of(tensor: Tensor) -> float:
    """The largest absolute value: NaN if there is a NaN, 0 without elements."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@dataclass(frozen=True, slots=True)
class Computed:
    """A large tensor that is computed element by element from others, a block at a time, so that it is never whole in
    memory.

    `of` computes a block from the blocks of `tensors`, which all have its shape.
    """

    of: Callable[..., Tensor]
    tensors: tuple["Numbers", ...]

    def numel(self) -> int:
        """The number of elements."""
        return self.tensors[0].numel()


Numbers: TypeAlias = Tensor | Computed


def compute(of: Callable[..., Tensor], *tensors: Numbers) -> Numbers:
    """What `of` computes from these tensors of one shape, element by element, now or in blocks if they are large."""
    whole = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.numel() <= BLOCK]
    return of(*whole) if len(whole) == len(tensors) else Computed(of, tensors)


def whole_of(numbers: Numbers) -> Tensor:
    """All numbers as one tensor; computed ones are flat."""
    return numbers if isinstance(numbers, Tensor) else torch.cat([*blocks_of(numbers)])


def blocks_of(numbers: Numbers) -> Iterable[Tensor]:
    """The tensor in blocks of at most BLOCK elements; a small tensor is one block."""
    if isinstance(numbers, Computed):
        return (numbers.of(*blocks) for blocks in zip(*map(blocks_of, numbers.tensors), strict=True))
    return (numbers,) if numbers.numel() <= BLOCK else numbers.reshape(-1).split(BLOCK)


def groups_of(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in groups of at most BLOCK elements together; a larger tensor is a group of its own."""
    group: list[str] = []
    elements = 0
    for name, size in sizes.items():
        if group and elements + size > BLOCK:
            yield group
            group, elements = [], 0
        group.append(name)
        elements += size
    if group:
        yield group


def measured_together(
    values: Mapping[str, Tensor], truth: Mapping[str, Tensor], kinds: Mapping[str, float]
) -> dict[str, Measured]:
    """Name -> how `values` differs from `truth`, for names of both; `kinds` is the rms of each kind of name.

    The limits are those of float64, and no bound on rounding is added to them.
    """
    fit = {
        name: truth[name].numel()
        for name, value in values.items()
        if 0 < value.numel() <= BLOCK
        and value.shape == truth[name].shape
        and value.is_floating_point()
        and truth[name].is_floating_point()
    }
    results: dict[str, Measured] = {}
    for names in groups_of(fit):
        x, t = (_end_to_end([tensors[name] for name in names]) for tensors in (values, truth))
        lengths = torch.tensor([fit[name] for name in names], device=x.device)
        gap = x - t
        sums = (
            _reduce_each(gap.abs(), "max", lengths),
            _reduce_each(gap * gap, "mean", lengths),
            _reduce_each(gap * t, "mean", lengths),
        )
        true = (_reduce_each(t.abs(), "max", lengths), _reduce_each(t * t, "mean", lengths))
        for name, *row in zip(names, *sums, *true, strict=True):
            result = _measure_row(name, row, kinds.get(kind_of(name), 0.0), fit[name])
            results |= {name: result} if result else {}
    integers = [name for name in values if not (truth[name].is_floating_point() or truth[name].is_complex())]
    return results | {
        name: equal for name in integers if (equal := measure_exact(name, values[name], truth[name])).right
    }


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors])


def _reduce_each(numbers: Tensor, what: str, lengths: Tensor) -> list[float]:
    segments: list[float] = torch.segment_reduce(numbers, what, lengths=lengths, unsafe=True).tolist()
    return segments


def _measure_row(name: str, row: Sequence[float], kind: float, elements: int) -> Measured | None:
    gap_largest, gap_square, product, largest, square = row
    low, high = SOUND
    if not low < largest < high or not (gap_largest == 0 or low < gap_largest < high):
        return None  # NaN too
    rms = math.sqrt(square)
    if rms < SCALE_SHARE * kind:
        return None
    errors = dict(
        zip(MEASURES, (math.sqrt(gap_square) / rms, gap_largest / rms, abs(product / rms / rms)), strict=True)
    )
    which = max(MEASURES, key=lambda name: errors[name] / FLOAT64_ALLOWED)  # all have the same limit
    error = errors[which]
    return Measured(
        name=name, measure=which, error=error, allowed=FLOAT64_ALLOWED, epsilons=error / _EPSILON, elements=elements
    )
