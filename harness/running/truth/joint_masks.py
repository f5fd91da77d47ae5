"""The joint masks of a program that returns none: where each mask that a rank drew lies in that of the truth.

Draws are held against each other by the user's line and by their order there (by order alone where truth and ranks have
other lines). Every micro-batch draws as many. The truth takes the data ranks' micro-batches one after the other, or
their rows together as the first dim. In a mask a dim that is shorter than the truth's is cut over an axis, in the order
of its ranks. A DTensor says itself how it lies.

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
    """Masks that do not make those of the truth; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMasks:
    """By rank what the subject itself returned, and its recorded masks as blocks of the joint ones; empty without any.

    `problem` is why they have no place there, "" where they have.
    """

    outcomes: tuple[Placed, ...]
    masks: tuple[Placed, ...] = ()
    draws: MaskDraws | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankDraw:
    """Masks of one rank for one draw of the truth."""

    rank: int
    data_rank: int
    draw: Draw


def in_order(joint: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The joint masks in the order in which the truth draws."""
    return tuple(joint[name] for name in sorted(joint, key=lambda name: int(name.rpartition(".")[2])))


def masks_of(case: CaseLike, axes: Axes, truth: Sequence[Draw], outcomes: Sequence[Placed]) -> RankMasks:
    """The masks that DropoutProbe recorded on all ranks, beside those that the truth drew.

    There are none where it drew none, or where the subject returned masks of its own.
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
    """Each rank's masks as blocks of the joint ones by name, and what else is known of them. Raises _Misplaced."""
    dense, *forward = [[draw for draw in drawn if not draw.anew] for drawn in (truth, *ranks)]
    found: list[Placed] = [{} for _ in ranks]
    rates: dict[str, float] = {}
    for number, dp, draws in _match_draws(case, axes, dense, forward):
        step, line = number * case.steps // len(dense), draws[0].draw.line.rpartition("/")[2]
        name = f"mask/{step}/{line}.{number}"
        rates[name] = draws[0].draw.rate
        first, *rest = true = _shape(dense[number])
        whole = all(_shape(one.draw) == true for one in draws)  # a DTensor over the data ranks too
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
    dp, rounds = 1 + max(data_ranks), case.steps * case.micro
    for line in sorted(lines) if by_line else [""]:
        numbers = [number for number, draw in enumerate(truth) if draw.line == line or not by_line]
        drawn = [[draw for draw in own if draw.line == line or not by_line] for own in ranks]
        each = {stage: len(own) for stage, own in zip(stages, drawn, strict=True)}
        uneven = [f"{len(own)} on rank {rank}" for rank, own in enumerate(drawn) if len(own) != each[stages[rank]]]
        sites = {stage: count // rounds for stage, count in sorted(each.items())}
        several = sum(sites.values())
        apart = len(numbers) == rounds * dp * several
        if (
            uneven
            or any(each[s] != sites[s] * rounds for s in sites)
            or not (apart or len(numbers) == rounds * several)
        ):
            where = f" at {line}" if line else ""
            counts = " ".join(uneven) or ", ".join(map(str, each.values()))
            raise _Misplaced(
                f"the truth draws {len(numbers)} masks{where} and the ranks {counts}, in {case.steps} steps of "
                f"{case.micro} micro-batches on {dp} data ranks"
            )
        by_place: dict[int, list[_RankDraw]] = {place: [] for place in range(len(numbers))}
        for rank, own in enumerate(drawn):
            stage, data_rank = stages[rank], data_ranks[rank]
            before = sum(count for other, count in sites.items() if other < stage)
            for i, draw in enumerate(own):
                turn, site = divmod(i, sites[stage])
                turn = turn * dp + data_rank if apart else turn
                drawn_there = _RankDraw(rank=rank, data_rank=0 if apart else data_rank, draw=draw)
                by_place[turn * several + before + site].append(drawn_there)
        yield from ((numbers[place], 1 if apart else dp, those) for place, those in by_place.items())


def _offsets(axes: Axes, shape: tuple[int, ...], draws: Sequence[_RankDraw]) -> list[tuple[int, ...]]:
    """Where what each rank drew lies in a mask of this shape; of several ways one in which replicas are equal."""
    first = None
    for way in _ways(axes, shape, draws):
        first = first or way
        parts: dict[object, Tensor] = {}
        places = zip(draws, way, strict=True)
        if all(
            torch.equal(block.local, parts.setdefault((one.data_rank, offsets, block.offsets), block.local))
            for one, offsets in places
            for block in one.draw.blocks
        ):
            return way
    if first is None:
        one = draws[0]
        rule = f"has the shape {_shape(one.draw)} on rank {one.rank} and {shape} in the truth"
        why = f"no cut over one axis in the order of ranks gives it (slices over {SLICES} say nothing of their order)"
        raise _Misplaced(f"the mask drawn at {one.draw.line} {rule}: {why}")
    return first


def _ways(axes: Axes, shape: tuple[int, ...], draws: Sequence[_RankDraw]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to cut the dims that are shorter than these, each over one axis."""
    shapes = {one.rank: _shape(one.draw) for one in draws}
    if any(len(own) != len(shape) for own in shapes.values()):
        return
    cut = [dim for dim, size in enumerate(shape) if any(own[dim] != size for own in shapes.values())]
    # slices of the sequence may be of any form: zigzag, contiguous
    known = {axis: lists for axis, lists in axes.items() if axis not in ("dp", *SAME_SAMPLES)}
    free = [axis for axis, lists in known.items() if any(len(group) > 1 for group in lists)]
    for over in permutations(free, len(cut)):
        way = [[0] * len(shape) for _ in draws]
        whole = True
        for dim, axis in zip(cut, over, strict=True):
            for group in axes[axis]:
                start = 0
                for rank in group:
                    for place, one in enumerate(draws):
                        if one.rank == rank:
                            way[place][dim], start = start, start + shapes[rank][dim]
                whole = whole and start in (0, shape[dim])
        if whole:
            yield [tuple(offsets) for offsets in way]


def _block(block: Block, place: tuple[int, ...], shape: tuple[int, ...]) -> Block:
    """A block of what a rank dropped, which lies there in the joint mask."""
    offsets = tuple(a + b for a, b in zip(place, (0, *block.offsets), strict=True))
    return replace(block, local=block.local[None], offsets=offsets, global_shape=shape, whole=False)


def _shape(draw: Draw) -> tuple[int, ...]:
    """The shape of what was dropped, that of the full tensor where it is a DTensor."""
    return draw.blocks[0].global_shape
