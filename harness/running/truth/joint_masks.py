"""The joint masks of a program that returns none: the place of each mask that a rank drew in a mask of the truth.

Draws of truth and ranks are matched by the line of the user's program and by their order there, or by their order alone
if the lines are not the same. Every micro-batch draws equally many masks. The truth computes the micro-batches of data
ranks one after the other, or together, with their rows along the first dim. A dim of a rank's mask that is shorter than
that of the truth is split over a mesh axis, in the order of its ranks. A DTensor states its own layout.

A joint mask is `mask/<step>/<line>.<number>`, bool [data ranks, *what was dropped]; the number is that of the truth's
draw.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor

from shardproof.harness.checking.records import MaskDraws
from shardproof.harness.mesh_axes import PIPELINE, SAME_SAMPLES, SLICES, place_of_rank
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.protocols import Axes, CaseLike
from shardproof.harness.recording.capturing.drawn_values import Draw, taken_out

Placed = dict[str, tuple[Block, ...]]


class _Misplaced(Exception):
    """Masks that have no place in those of the truth; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMasks:
    """By rank, what the subject itself returned, and its recorded masks as blocks of the joint ones.

    `problem` says why the recorded masks have no place in the joint ones; "" if they have.
    """

    outcomes: tuple[Placed, ...]
    masks: tuple[Placed, ...] = ()
    draws: MaskDraws | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankDraw:
    """A mask that a rank drew for one draw of the truth."""

    rank: int
    data_rank: int
    draw: Draw


def in_order(joint: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The joint masks in the order in which the truth draws."""
    return tuple(joint[name] for name in sorted(joint, key=lambda name: int(name.rpartition(".")[2])))


def masks_of(case: CaseLike, axes: Axes, truth: Sequence[Draw], outcomes: Sequence[Placed]) -> RankMasks:
    """The masks that DropoutProbe recorded on all ranks, as blocks of those that the truth drew.

    There are none if the truth drew none, or if the subject returned masks of its own.
    """
    parts = [taken_out(outcome) for outcome in outcomes]
    own = tuple(outcome for outcome, _ in parts)
    if not truth or any(name.startswith("mask/") for outcome in own for name in outcome):
        return RankMasks(outcomes=own)
    try:
        masks, draws = _place_masks(case, axes, truth, [drawn for _, drawn in parts])
        return RankMasks(outcomes=own, masks=tuple(masks), draws=draws)
    except _Misplaced as problem:
        rule = f"there is no joint mask, so nothing is compared: {problem}"
        return RankMasks(outcomes=own, problem=f"{rule}; legal: return mask/<step>/<site>, let the truth take given=")


def _place_masks(
    case: CaseLike, axes: Axes, truth: Sequence[Draw], ranks: Sequence[Sequence[Draw]]
) -> tuple[list[Placed], MaskDraws]:
    """Each rank's masks as blocks of the joint ones by name, and the draws' rates and repeats. Raises _Misplaced."""
    dense, *forward = [[draw for draw in drawn if not draw.anew] for drawn in (truth, *ranks)]
    found: list[Placed] = [{} for _ in ranks]
    rates: dict[str, float] = {}
    for number, dp, draws in _match_draws(case, axes, dense, forward):
        step, line = number * case.steps // len(dense), draws[0].draw.line.rpartition("/")[2]
        name = f"mask/{step}/{line}.{number}"
        rates[name] = draws[0].draw.rate
        first, *rest = true = _shape(dense[number])
        whole = all(_shape(one.draw) == true for one in draws)  # also if it is a DTensor over the data ranks
        shape = (1, *true) if whole else (dp, first // dp, *rest)
        for one, offsets in zip(draws, _offsets(axes, shape[1:], draws), strict=True):
            place = (0 if whole else one.data_rank, *offsets)
            found[one.rank][name] = tuple(_block(block, place, shape) for block in one.draw.blocks)
    anew = tuple(dict.fromkeys((draw.line, rank) for rank, drawn in enumerate(ranks) for draw in drawn if draw.anew))
    return found, MaskDraws(rates=rates, anew=anew)


def _match_draws(
    case: CaseLike, axes: Axes, truth: Sequence[Draw], ranks: Sequence[Sequence[Draw]]
) -> Iterator[tuple[int, int, list[_RankDraw]]]:
    """Every draw of the truth: its number, the data ranks whose rows it has, and what ranks drew for it."""
    lines = {draw.line for draw in truth}
    by_line = lines == {draw.line for drawn in ranks for draw in drawn}
    stages, data_ranks = ([place_of_rank(axes, axis, rank) for rank in range(len(ranks))] for axis in (PIPELINE, "dp"))
    dp = 1 + max(data_ranks)
    for line in sorted(lines) if by_line else [""]:
        numbers = [number for number, draw in enumerate(truth) if draw.line == line or not by_line]
        drawn = [[draw for draw in own if draw.line == line or not by_line] for own in ranks]
        sites = _sites_of_stages(case, dp, line, numbers, drawn, stages)
        per_round = sum(sites.values())
        apart = len(numbers) == case.steps * case.micro * dp * per_round
        by_place: dict[int, list[_RankDraw]] = {place: [] for place in range(len(numbers))}
        for rank, own in enumerate(drawn):
            before = sum(count for stage, count in sites.items() if stage < stages[rank])
            for i, draw in enumerate(own):
                micro, site = divmod(i, sites[stages[rank]])
                turn = micro * dp + data_ranks[rank] if apart else micro
                own_draw = _RankDraw(rank=rank, data_rank=0 if apart else data_ranks[rank], draw=draw)
                by_place[turn * per_round + before + site].append(own_draw)
        yield from ((numbers[place], 1 if apart else dp, draws) for place, draws in by_place.items())


def _sites_of_stages(
    case: CaseLike, dp: int, line: str, numbers: Sequence[int], drawn: Sequence[Sequence[Draw]], stages: Sequence[int]
) -> dict[int, int]:
    """Stage -> how many masks each of its ranks draws in a micro-batch at this line.

    Raises _Misplaced unless all ranks of a stage draw as many in every micro-batch, and the truth as many as all stages
    together, for each data rank by itself or for all of them at once.
    """
    rounds = case.steps * case.micro
    counts = {stage: len(own) for stage, own in zip(stages, drawn, strict=True)}
    uneven = [f"{len(own)} on rank {rank}" for rank, own in enumerate(drawn) if len(own) != counts[stages[rank]]]
    sites = {stage: count // rounds for stage, count in sorted(counts.items())}
    per_round = sum(sites.values())
    is_whole = all(counts[stage] == sites[stage] * rounds for stage in sites)
    if uneven or not is_whole or len(numbers) not in (rounds * per_round, rounds * dp * per_round):
        where = f" at {line}" if line else ""
        told = " ".join(uneven) or ", ".join(map(str, counts.values()))
        raise _Misplaced(
            f"the truth draws {len(numbers)} masks{where} and the ranks {told}, in {case.steps} steps of "
            f"{case.micro} micro-batches on {dp} data ranks"
        )
    return sites


def _offsets(axes: Axes, shape: tuple[int, ...], draws: Sequence[_RankDraw]) -> list[tuple[int, ...]]:
    """The offsets of each rank's mask in a mask of this shape, by the first possible layout with equal replicas."""
    layouts = []
    for layout in _possible_layouts(axes, shape, draws):
        if _has_equal_replicas(draws, layout):
            return layout
        layouts.append(layout)
    if not layouts:
        one = draws[0]
        rule = f"has the shape {_shape(one.draw)} on rank {one.rank} and {shape} in the truth"
        why = f"no cut over one axis in the order of ranks gives it (slices over {SLICES} say nothing of their order)"
        raise _Misplaced(f"the mask drawn at {one.draw.line} {rule}: {why}")
    return layouts[0]


def _has_equal_replicas(draws: Sequence[_RankDraw], layout: Sequence[tuple[int, ...]]) -> bool:
    """Whether blocks with the same place in this layout are equal."""
    parts: dict[object, Tensor] = {}
    return all(
        torch.equal(block.local, parts.setdefault((one.data_rank, offsets, block.offsets), block.local))
        for one, offsets in zip(draws, layout, strict=True)
        for block in one.draw.blocks
    )


def _possible_layouts(
    axes: Axes, shape: tuple[int, ...], draws: Sequence[_RankDraw]
) -> Iterator[list[tuple[int, ...]]]:
    """The offsets of all draws, for every way to split dims that are shorter than in `shape`, each over one axis."""
    shapes = {one.rank: _shape(one.draw) for one in draws}
    if any(len(own) != len(shape) for own in shapes.values()):
        return
    cut = [dim for dim, size in enumerate(shape) if any(own[dim] != size for own in shapes.values())]
    # Slices of a sequence are left out: they may be contiguous or zigzag, which shapes do not show.
    known = {axis: lists for axis, lists in axes.items() if axis not in ("dp", *SAME_SAMPLES)}
    free = [axis for axis, lists in known.items() if any(len(group) > 1 for group in lists)]
    for over in permutations(free, len(cut)):
        starts = {dim: _starts_along(shapes, dim, axes[axis], shape[dim]) for dim, axis in zip(cut, over, strict=True)}
        if None not in starts.values():
            yield [tuple((starts.get(dim) or {}).get(one.rank, 0) for dim in range(len(shape))) for one in draws]


def _starts_along(
    shapes: Mapping[int, tuple[int, ...]], dim: int, groups: Sequence[Sequence[int]], size: int
) -> dict[int, int] | None:
    """Rank -> the offset in this dim of the mask that it drew, if each group tiles the dim in its order; else None."""
    starts: dict[int, int] = {}
    for group in groups:
        start = 0
        for rank in group:
            if rank in shapes:
                starts[rank] = start
                start += shapes[rank][dim]
        if start not in (0, size):  # 0: no rank of this group draws
            return None
    return starts


def _block(block: Block, place: tuple[int, ...], shape: tuple[int, ...]) -> Block:
    """The block of a rank's mask at this place of the joint mask."""
    offsets = tuple(a + b for a, b in zip(place, (0, *block.offsets), strict=True))
    return replace(block, local=block.local[None], offsets=offsets, global_shape=shape, whole=False)


def _shape(draw: Draw) -> tuple[int, ...]:
    """The shape of what was dropped; of a DTensor that of the full tensor."""
    return draw.blocks[0].global_shape
