"""Merging: joins the blocks of all ranks to full tensors, and reports flaws of the layout before any number.

It runs outside the ranks, so it adds no communication. A name whose blocks are flawed has no merged tensor, and no
number of it is compared; the verdicts say so. Replicas that differ by rounding are compared if all of them are far off.
Shapes count elements. Shards may overlap (a head that several ranks share), and must agree bit for bit there. Source of
the verdicts: TTrace (omission, replica conflict before any numeric comparison).
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardproof.harness.outcome.blocks import Block, dtype_word
from shardproof.harness.verdicts.facts import Fact, state_fact

Outcomes = Sequence[Mapping[str, Sequence[Block]]]
"""By rank: name -> blocks."""

Placed = list[tuple[int, Block]]
"""(rank, block) of every rank that returned something under one name."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integers that have its bits."""
_SMALL = 2**16
"""A tensor of more elements is not held twice."""
_REDUCE = {
    "sum": torch.Tensor.add,
    "avg": torch.Tensor.add,
    "product": torch.Tensor.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Why the blocks of a name do not make one full tensor; `ranks` are those in question.

    For replicas that differ, `value` is the tensor of the first ones, `distance` the largest difference from it.
    """

    name: str
    kind: str
    fact: Fact
    ranks: tuple[int, ...]
    value: Tensor | None = field(default=None, compare=False, repr=False)
    distance: float = field(default=math.inf, compare=False)

    @property
    def message(self) -> str:
        """The fact in words."""
        return self.fact.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The full tensors of names without a flaw, and the flaws. `match_truth` adds tensors whose
    replicas all are wrong.
    """

    tensors: Mapping[str, Tensor]
    flaws: tuple[Flaw, ...]


def match_truth(merged: Merged, truth: Mapping[str, Tensor]) -> Merged:
    """The merged tensors that have the truth's shape and kind of number; the others become flaws.

    Replicas that differ keep their flaw. If all of them are wrong, the first one is added to the tensors.
    """
    flaws = list(merged.flaws)
    tensors = {flaw.name: flaw.value for flaw in flaws if flaw.value is not None and _are_all_wrong(flaw, truth)}
    for name, tensor in merged.tensors.items():
        true = truth.get(name)
        if true is not None and tensor.shape != true.shape:
            fact = state_fact("shape_of_truth", shape=tuple(tensor.shape), truth=tuple(true.shape))
            flaws.append(Flaw(name=name, kind="shape", fact=fact, ranks=()))
        elif true is not None and tensor.is_floating_point() != true.is_floating_point():
            fact = state_fact("dtype_of_truth", dtype=dtype_word(tensor.dtype), truth=dtype_word(true.dtype))
            flaws.append(Flaw(name=name, kind="dtype", fact=fact, ranks=()))
        else:
            tensors[name] = tensor
    return Merged(tensors=tensors, flaws=tuple(flaws))


def _are_all_wrong(flaw: Flaw, truth: Mapping[str, Tensor]) -> bool:
    """Whether replicas differ by rounding alone, and from the truth by more: then their difference is not the error."""
    true, value = truth.get(flaw.name), flaw.value
    if true is None or value is None or true.shape != value.shape or true.is_complex():
        return False
    largest, error = float(true.abs().max()), float((value.double() - true.double()).abs().max())
    # Half-way, in orders of magnitude, between the rounding of the dtype and the tensor itself.
    return flaw.distance <= largest * math.sqrt(torch.finfo(value.dtype).eps) < error


class _Flawed(Exception):
    """Ends the merging of one name with its flaw."""

    def __init__(self, kind: str, fact: Fact, ranks: Sequence[int]) -> None:
        super().__init__(fact.text)
        self.kind, self.fact, self.ranks = kind, fact, tuple(ranks)


def merge_outcomes(outcomes: Outcomes, known: Mapping[str, Tensor] | None = None) -> Merged:
    """The ranks' outcomes as full tensors, in the order in which ranks name them; those in `known` are not merged
    again.
    """
    tensors: dict[str, Tensor] = {}
    flaws: list[Flaw] = []
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome):
        if known and name in known:
            tensors[name] = known[name]
            continue
        placed = [(rank, block) for rank, outcome in enumerate(outcomes) for block in outcome.get(name, ())]
        absent = [rank for rank, outcome in enumerate(outcomes) if name not in outcome]
        full, found = _merge_one(placed, absent)
        if full is not None:
            tensors[name] = full
        for flaw in found:
            first, gap = _first_replicas(placed, absent) if flaw.kind == "replica conflict" else (None, math.inf)
            flaws.append(Flaw(name=name, kind=flaw.kind, fact=flaw.fact, ranks=flaw.ranks, value=first, distance=gap))
    return Merged(tensors=tensors, flaws=tuple(flaws))


def _merge_one(placed: Placed, absent: list[int]) -> tuple[Tensor | None, list[_Flawed]]:
    """The full tensor, None if there are flaws, and the flaws: replicas may differ and elements be missing at once."""
    if not placed:
        return None, [_Flawed("omission", state_fact("held_nowhere"), ())]
    flaws = []
    holders = sorted({rank for rank, _ in placed})
    if absent and any(block.whole for _, block in placed):
        flaws.append(_Flawed("missing", state_fact("not_on_all_ranks", holders=holders, absent=absent), absent))
    try:
        _check_shapes_agree(placed)
    except _Flawed as flaw:
        return None, [*flaws, flaw]
    shape, dtype = placed[0][1].global_shape, placed[0][1].local.dtype
    parts, shared = [*{block.region: (rank, block) for rank, block in placed}.values()], True
    try:
        parts = [part for part in _merge_replicas(placed) if part[1].local.numel()]
        shared = _has_shared_elements(parts)
    except _Flawed as flaw:
        flaws.append(flaw)
    if shared or sum(block.local.numel() for _, block in parts) != math.prod(shape):
        left, at = _not_held(parts, shape)
        if left:
            lack = state_fact("elements_missing", missing=left, elements=math.prod(shape), first=at)
            flaws.append(_Flawed("omission", lack, holders))
    if flaws:
        return None, flaws
    full = torch.empty(shape, dtype=dtype)  # only now: a shape that no rank fills may exceed the memory
    for _, block in parts:
        block.part_of(full).copy_(block.local)
    return full, []


def _first_replicas(placed: Placed, absent: list[int]) -> tuple[Tensor | None, float]:
    """The tensor of the first of differing replicas, None if there is none, and the largest difference from it."""
    firsts: dict[tuple[tuple[int, int], ...], tuple[int, Block]] = {}
    gap = 0.0
    for rank, block in placed:
        kept = firsts.setdefault(block.region, (rank, block))[1]
        if block.reduce_op or block.local.shape != kept.local.shape or not block.local.is_floating_point():
            return None, math.inf
        gaps = (block.local.double() - kept.local.double()).abs().flatten()
        gap = max(gap, float(gaps.nan_to_num(math.inf).max()) if len(gaps) else 0.0)
    full, _ = _merge_one([*firsts.values()], absent)
    return full, math.inf if full is None else gap


def held_once(outcomes: Outcomes, merged: Merged) -> tuple[Mapping[str, Sequence[Block]], ...]:
    """The outcomes, with blocks of large tensors as views of the merged ones, so that nothing is held twice."""
    flawed = {flaw.name for flaw in merged.flaws}
    large = {n: tensor for n, tensor in merged.tensors.items() if tensor.numel() > _SMALL and n not in flawed}
    if not large:
        return tuple(outcomes)

    def views(found: Sequence[Block], full: Tensor) -> list[Block]:
        """A block that is still to be reduced has other bits than the merged tensor."""
        return [block if block.reduce_op else replace(block, local=block.part_of(full)) for block in found]

    return tuple({n: views(found, large[n]) if n in large else found for n, found in run.items()} for run in outcomes)


def _check_shapes_agree(placed: Placed) -> None:
    """Require that all blocks state the same full tensor."""
    first_rank, first = placed[0]
    for rank, block in placed[1:]:
        both = {"rank": first_rank, "other": rank}
        if block.global_shape != first.global_shape:
            fact = state_fact("shapes_differ", **both, shape=first.global_shape, other_shape=block.global_shape)
            raise _Flawed("shape", fact, (first_rank, rank))
        if block.local.dtype != first.local.dtype:
            mine, other = dtype_word(first.local.dtype), dtype_word(block.local.dtype)
            fact = state_fact("dtypes_differ", **both, dtype=mine, other_dtype=other)
            raise _Flawed("dtype", fact, (first_rank, rank))
        if block.reduce_op != first.reduce_op:
            mine, other = first.reduce_op or "none", block.reduce_op or "none"
            fact = state_fact("reductions_differ", **both, reduce_op=mine, other_reduce_op=other)
            raise _Flawed("replica conflict", fact, (first_rank, rank))


def _merge_replicas(placed: Placed) -> Placed:
    """Blocks of distinct regions: replicas must be equal bit for bit, partial values are reduced in a fixed order."""
    regions: dict[tuple[tuple[int, int], ...], dict[tuple[int, ...], tuple[int, Block]]] = {}
    for rank, block in placed:
        mine = block.region, block.terms
        other, kept = regions.setdefault(block.region, {}).setdefault(block.terms, (rank, block))
        if kept is not block and not same_bits(kept.local, block.local):
            raise _Flawed(
                "replica conflict",
                state_fact("replicas_differ", rank=rank, other=other, how=state_differences(block.local, kept.local)),
                sorted({r for r, b in placed if (b.region, b.terms) == mine and not same_bits(b.local, kept.local)}),
            )
    return [_sum_pending_terms(terms) for terms in regions.values()]


def _sum_pending_terms(terms: Mapping[tuple[int, ...], tuple[int, Block]]) -> tuple[int, Block]:
    ordered = [terms[place] for place in sorted(terms)]
    rank, block = ordered[0]
    if not block.reduce_op:
        return rank, block
    total = block.local
    for _, term in ordered[1:]:
        total = _REDUCE[block.reduce_op](total, term.local)
    if block.reduce_op == "avg":
        total = total / len(ordered)
    return rank, Block(local=total, offsets=block.offsets, global_shape=block.global_shape)


def _has_shared_elements(parts: Placed) -> bool:
    """Whether some parts have elements in common. Raises _Flawed if these differ in a bit."""
    shared = False
    for (rank, mine), (other, theirs) in itertools.combinations(parts, 2):
        common = mine.common_with(theirs)
        if common is None:
            continue
        shared = True
        here, there = mine.local_at(common), theirs.local_at(common)
        if not same_bits(here, there):
            fact = state_fact(
                "overlap_differs",
                rank=rank,
                other=other,
                how=state_differences(there, here, tuple(a for a, _ in common)),
                common=_text_of_region(common),
                region=_text_of_region(mine.region),
                other_region=_text_of_region(theirs.region),
            )
            raise _Flawed("replica conflict", fact, sorted({rank, other}))
    return shared


def _not_held(parts: Placed, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """How many elements no part holds, and the first of them, () if there is none.

    Boxes between the edges of parts are searched, not single elements.
    """
    edges = [
        sorted({0, *(edge for _, block in parts for edge in block.region[dim] if edge < size)})
        for dim, size in enumerate(shape)
    ]
    free = torch.ones([len(starts) for starts in edges], dtype=torch.int64)
    for _, block in parts:
        pairs = zip(edges, block.region, strict=True)
        free[tuple(slice(bisect_left(starts, a), bisect_left(starts, b)) for starts, (a, b) in pairs)] = 0
    if not bool(free.any()):
        return 0, ()
    first = torch.unravel_index((free.reshape(-1) > 0).to(torch.uint8).argmax(), free.shape)
    sizes = free
    for dim, (starts, size) in enumerate(zip(edges, shape, strict=True)):
        widths = torch.tensor([*starts[1:], size]) - torch.tensor(starts)
        sizes = sizes * widths.reshape([-1 if other == dim else 1 for other in range(len(shape))])
    return int(sizes.sum()), tuple(starts[int(i)] for starts, i in zip(edges, first, strict=True))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; equal NaNs are equal, 0.0 and -0.0 are not."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    word = None if a.is_complex() else _WORDS.get(a.element_size())
    if word is None:
        return torch.equal(bits_of(a), bits_of(b))
    return torch.equal(a.view(word), b.view(word))


def bits_of(a: Tensor) -> Tensor:
    """The bytes of a tensor, in the order of its elements."""
    # An expanded tensor of one element counts as contiguous, but `view` refuses its stride.
    return a.contiguous().as_strided((a.numel(),), (1,)).view(torch.uint8)


def state_differences(a: Tensor, b: Tensor, offsets: tuple[int, ...] = ()) -> Fact:
    """How two tensors differ: in shape or dtype, or else in how many elements, by how much, and where first.

    `offsets` are those of their first element in the tensor whose indices are named.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        shapes = {"shape": tuple(a.shape), "other_shape": tuple(b.shape)}
        return state_fact("forms_differ", **shapes, dtype=dtype_word(a.dtype), other_dtype=dtype_word(b.dtype))
    width = a.element_size()
    wrong = (bits_of(a).view(-1, width) != bits_of(b).view(-1, width)).any(dim=1)
    first = torch.unravel_index(wrong.to(torch.uint8).argmax(), a.shape) if a.dim() else ()
    gaps = ((a.double() - b.double()) if not a.is_complex() else (a - b)).abs().flatten()[wrong]
    finite = gaps[gaps.isfinite()]
    return state_fact(
        "bits_differ",
        differing=int(wrong.sum()),
        elements=a.numel(),
        odd=len(gaps) - len(finite),
        largest=float(finite.max()) if len(finite) else None,
        first=[int(i) + o for i, o in zip(first, offsets or (0,) * a.dim(), strict=True)],
    )


def _text_of_region(region: Sequence[tuple[int, int]]) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in region) + "]"
