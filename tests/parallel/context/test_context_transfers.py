"""What every method sends, call by call and rank by rank, counted by hand; nothing asynchronous stays unwaited.

The closed forms of cases, which have equal slices, are held against ledgers of whole cases (test_context_cases).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from parallel.context.slices import Slices, contiguous, zigzag
from tests.parallel.context.rows import METHODS, full_row, on_axis, on_two_axes
from tests.parallel.ranks import Calls

ROWS, HEADS, DIM = 2, 12, 3
Line = tuple[str, str, int, str, int]
"""(op, reduce op, ranks, dtype, payload bytes)."""
Form = tuple[Counter[Line], Counter[Line]]
"""Calls of forward, and of backward."""


def _same(calls: Calls, rank: int, expected: Form) -> bool:
    """Are these the calls of a rank? Those of forward come first."""
    issued: list[Line] = [
        (call.op, call.reduce_op, len(call.group), call.dtype, call.payload_bytes)
        for call in calls.by_rank.get(rank, [])
    ]
    first = expected[0].total()
    return (Counter(issued[:first]), Counter(issued[first:])) == expected


def _ring(keys: Sequence[int], rank: int, dtype: torch.dtype = torch.float64) -> Form:
    """Of the bytes K of every rank: 2K(c-1) forward, in backward once more, and c hops of gradients, wide."""
    ranks, wide = len(keys), torch.promote_types(dtype, torch.float32)
    forward: Counter[Line] = Counter()
    gradients: Counter[Line] = Counter()
    for step in range(ranks if ranks > 1 else 0):
        for op, owner in (("send", rank - step), ("recv", rank - step - 1)):
            if size := 2 * keys[owner % ranks]:
                gradients[op, "", ranks, str(wide)[6:], size * wide.itemsize // dtype.itemsize] += 1
                forward[op, "", ranks, str(dtype)[6:], size] += step < ranks - 1
    return +forward, forward + gradients


def _gathered(keys: int, ranks: int, dtype: torch.dtype) -> Form:
    both = ("all_gather", ""), ("reduce_scatter", "sum")
    forward, backward = (Counter({(*op, ranks, str(dtype)[6:], ranks * keys): 2 * (ranks > 1)}) for op in both)
    return +forward, +backward


def _exchanged(queries: int, keys: int, ranks: int, dtype: torch.dtype = torch.float64) -> Form:
    """Queries, context, and keys with values as one."""
    forward: Counter[Line] = Counter()
    for size in (queries, queries, 2 * keys) if ranks > 1 else ():
        forward["all_to_all", "", ranks, str(dtype)[6:], size] += 1
    return forward, forward


def _keys(tokens: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> int:
    return ROWS * tokens * kv_heads * DIM * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kv_heads", [12, 4, 1])
def test_every_rank_issues_the_calls_of_the_method(ranks: int, kv_heads: int, dtype: torch.dtype) -> None:
    """The ring's block gradients travel in float32 for bfloat16; all-to-all repeats kv heads that are too few."""
    length = 24
    full = [x.to(dtype) for x in full_row(ROWS, length, HEADS, kv_heads, dim=DIM)]
    slices, own = Slices(held=zigzag(length, ranks)), length // ranks
    keys, queries = _keys(own, kv_heads, dtype), _keys(own, HEADS, dtype)
    forms = {
        "ring": _ring([keys] * ranks, 0, dtype),
        "gathered": _gathered(keys, ranks, dtype),
        "exchanged": _exchanged(queries, keys * max(1, ranks // kv_heads), ranks, dtype),
    }
    for method, expected in forms.items():
        if method == "exchanged" and kv_heads % ranks and ranks % kv_heads:
            continue
        on_axis(METHODS[method], full, slices, observer=(calls := Calls()))
        assert all(_same(calls, rank, expected) for rank in range(ranks))


@pytest.mark.parametrize(("length", "ranks"), [(11, 3), (2, 3), (5, 4)])
def test_messages_of_uneven_slices(length: int, ranks: int) -> None:
    """Every rank has another ledger; empty blocks are no message. What is sent over a hop is received there."""
    slices = Slices(held=contiguous(length, ranks))
    keys = [_keys(len(own), 2) for own in slices.held]
    on_axis(METHODS["ring"], full_row(ROWS, length, 4, 2, dim=DIM), slices, observer=(calls := Calls()))
    forms = [_ring(keys, rank) for rank in range(ranks)]
    assert any(form != forms[0] for form in forms)
    assert all(_same(calls, rank, form) for rank, form in enumerate(forms))


def test_both_levels_have_their_closed_form() -> None:
    inner, outer, length = 2, 3, 24
    slices = Slices(held=zigzag(length, inner * outer))
    own = length // inner // outer
    for kv_heads in (4, 1):
        full = full_row(ROWS, length, 4, kv_heads, dim=DIM)
        on_two_axes(full, slices, inner=inner, outer=outer, observer=(calls := Calls()))
        keys = _keys(own, max(kv_heads, inner))
        levels = (*_exchanged(_keys(own, 4), keys, inner), *_ring([keys] * outer, 0))
        expected: Counter[Line] = sum(levels, Counter())
        assert all(Counter(calls.lines(rank)) == expected for rank in range(inner * outer))


def test_the_next_block_travels_while_this_one_is_computed_with() -> None:
    """With overlap all hops are issued asynchronously either way; what differs is when they are awaited."""
    slices = Slices(held=zigzag(12, 3))
    ledgers = []
    for method in ("ring", "ring awaited"):
        on_axis(METHODS[method], full_row(ROWS, 12, 4, 2), slices, observer=(calls := Calls()))
        assert {call.is_async for call in calls.by_rank[0]} == {True}
        ledgers.append(calls.lines())
    assert ledgers[0] == ledgers[1]
