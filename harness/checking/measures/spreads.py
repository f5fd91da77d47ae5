"""How far values differ that must be equal bit for bit: replicas of a tensor, or its values in several runs.

A spread is the largest difference as a share of the largest value: a ratio, infinite if one of them is not finite.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, zip_longest

from torch import Tensor

from shardproof.harness.outcome.blocks import Block
from shardproof.harness.outcome.merging import Outcomes, same_bits


def replica_spread(outcomes: Outcomes, name: str) -> float:
    """How far the ranks' blocks of a tensor differ where they hold the same elements."""
    firsts: dict[object, Block] = {}
    blocks = [block for outcome in outcomes for block in outcome.get(name, ())]
    pairs = [(firsts.setdefault((block.region, block.terms), block), block) for block in blocks]
    for one, other in combinations(firsts.values(), 2):  # blocks of unequal extent may overlap
        alike = one.terms == other.terms and one.global_shape == other.global_shape
        common = one.common_with(other) if alike and one.region != other.region else None
        if common is not None:
            offsets = tuple(first for first, _ in common)
            pairs.append((_cut_block(one, common, offsets), _cut_block(other, common, offsets)))
    return _spread_of_pairs(pairs)


def _cut_block(block: Block, region: tuple[tuple[int, int], ...], offsets: tuple[int, ...]) -> Block:
    return replace(block, local=block.local_at(region), offsets=offsets, whole=False)


def run_spreads(first: Outcomes, second: Outcomes) -> dict[str, float]:
    """Name -> how far two runs of the same case differ in it, for the tensors that do."""
    names = dict.fromkeys(name for run in (first, second) for outcome in run for name in outcome)
    found = {name: _spread_of_pairs(_pair_blocks(first, second, name)) for name in names}
    return {name: spread for name, spread in found.items() if spread}


def _pair_blocks(first: Outcomes, second: Outcomes, name: str) -> Iterable[tuple[Block | None, Block | None]]:
    for mine, theirs in zip(first, second, strict=True):
        yield from zip_longest(mine.get(name, ()), theirs.get(name, ()))


def _spread_of_pairs(pairs: Iterable[tuple[Block | None, Block | None]]) -> float:
    pairs = [*pairs]
    largest = max((_size_of_block(block) for pair in pairs for block in pair if block is not None), default=0.0)
    gaps = (_gap_of_blocks(a, b) for a, b in pairs)
    return max((gap if math.isinf(gap) or not largest else gap / largest for gap in gaps if gap), default=0.0)


def _gap_of_blocks(a: Block | None, b: Block | None) -> float:
    if a is None or b is None or a.region != b.region or a.local.dtype != b.local.dtype:
        return math.inf
    if a is b or same_bits(a.local, b.local):
        return 0.0
    gap = float((_as_wide(a) - _as_wide(b)).abs().max())
    return gap if math.isfinite(gap) else math.inf


def _size_of_block(block: Block) -> float:
    """The largest finite value of a block."""
    values = _as_wide(block).abs()
    finite = values[values.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _as_wide(block: Block) -> Tensor:
    return block.local if block.local.is_complex() else block.local.double()
