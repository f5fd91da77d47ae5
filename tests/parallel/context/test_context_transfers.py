"""What every method sends, call by call and rank by rank, is its closed form; nothing asynchronous stays unwaited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
import torch

from parallel.context.exchanged import exchanged_transfers, nested_transfers
from parallel.context.gathered import gathered_transfers
from parallel.context.ring import ring_transfers, short_ring_transfers
from parallel.context.slices import Slices, contiguous, zigzag
from parallel.context.transfers import Transfer
from tests.parallel.context.rows import METHODS, full_row, on_axis, on_two_axes
from tests.parallel.ranks import Calls

ROWS, HEADS, DIM = 2, 12, 3
Line = tuple[str, str, int, str, int]


def _same(calls: Calls, rank: int, expected: Iterable[Transfer], sizes: Mapping[str, int], dtype: torch.dtype) -> bool:
    """Are these the calls of a rank? Those of forward come first. `sizes`: ranks of each level."""
    counts: dict[str, Counter[Line]] = {"forward": Counter(), "backward": Counter()}
    for transfer in expected:
        kind = torch.promote_types(dtype, torch.float32) if transfer.wide else dtype
        line = (transfer.op, transfer.reduce_op, sizes[transfer.axis], str(kind)[6:], transfer.payload_bytes)
        counts[transfer.phase][line] += transfer.calls
    first = counts["forward"].total()
    issued = [
        (call.op, call.reduce_op, len(call.group), call.dtype, call.payload_bytes)
        for call in calls.by_rank.get(rank, [])
    ]
    return Counter(issued[:first]) == counts["forward"] and Counter(issued[first:]) == counts["backward"]


def _keys(tokens: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> int:
    return ROWS * tokens * kv_heads * DIM * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kv_heads", [12, 4, 1])
def test_every_rank_issues_the_closed_form(ranks: int, kv_heads: int, dtype: torch.dtype) -> None:
    """The ring's block gradients travel in float32 for bfloat16; all-to-all repeats kv heads that are too few."""
    length = 24
    full = [x.to(dtype) for x in full_row(ROWS, length, HEADS, kv_heads, dim=DIM)]
    slices, own = Slices(held=zigzag(length, ranks)), length // ranks
    keys, queries, wide = _keys(own, kv_heads, dtype), _keys(own, HEADS, dtype), 2 if dtype == torch.bfloat16 else 1
    forms = {
        "ring": [*ring_transfers([keys] * ranks, 0, wide=wide)],
        "gathered": [*gathered_transfers(keys, ranks)],
        "exchanged": [*exchanged_transfers(queries, keys * max(1, ranks // kv_heads), ranks)],
    }
    for method, expected in forms.items():
        if method == "exchanged" and kv_heads % ranks and ranks % kv_heads:
            continue
        on_axis(METHODS[method], full, slices, observer=(calls := Calls()))
        assert all(_same(calls, rank, expected, {"": ranks}, dtype) for rank in range(ranks))


@pytest.mark.parametrize(("length", "ranks"), [(11, 3), (2, 3), (5, 4)])
def test_messages_of_uneven_slices(length: int, ranks: int) -> None:
    """Every rank has another ledger; empty blocks are no message. What is sent over a hop is received there."""
    slices = Slices(held=contiguous(length, ranks))
    keys = [_keys(len(own), 2) for own in slices.held]
    on_axis(METHODS["ring"], full_row(ROWS, length, 4, 2, dim=DIM), slices, observer=(calls := Calls()))
    forms = [[*ring_transfers(keys, rank)] for rank in range(ranks)]
    assert len({tuple(form) for form in forms}) > 1
    for rank, form in enumerate(forms):
        assert _same(calls, rank, form, {"": ranks}, torch.float64)
        received = [t.payload_bytes for t in forms[(rank + 1) % ranks] if t.op == "recv"]
        assert [t.payload_bytes for t in form if t.op == "send"] == received


def test_both_levels_have_their_closed_form() -> None:
    inner, outer, length = 2, 3, 24
    slices = Slices(held=zigzag(length, inner * outer))
    own = length // inner // outer
    for kv_heads in (4, 1):
        full = full_row(ROWS, length, 4, kv_heads, dim=DIM)
        on_two_axes(full, slices, inner=inner, outer=outer, observer=(calls := Calls()))
        expected = [*nested_transfers(_keys(own, 4), _keys(own, max(kv_heads, inner)), inner=inner, outer=outer)]
        sizes = {"inner": inner, "outer": outer}
        for rank in range(inner * outer):
            found = Counter(calls.lines(rank))
            wanted: Counter[Line] = Counter()
            for t in expected:
                wanted[t.op, t.reduce_op, sizes[t.axis], "float64", t.payload_bytes] += t.calls
            assert found == wanted


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_by_the_table(ranks: int) -> None:
    """K bytes of keys. Forward 2K(c-1); backward 2K(c-1) + 2Kc, by the short way 4K(c-1), in c messages."""
    keys = 1000
    sent = [t for t in ring_transfers([keys] * ranks, 1) if t.op == "send"]
    assert [t.payload_bytes for t in sent if t.phase == "forward"] == [2 * keys] * (ranks - 1)
    assert sum(t.payload_bytes for t in sent if t.phase == "backward") == 2 * keys * (2 * ranks - 1)
    short = [t for t in short_ring_transfers(keys, ranks) if t.op == "send"]
    back = [t.payload_bytes for t in short if t.phase == "backward"]
    assert len(back) == ranks and sum(back) == 4 * keys * (ranks - 1)
    assert [t for t in short if t.phase == "forward"] == [t for t in sent if t.phase == "forward"]


def test_the_next_block_travels_while_this_one_is_computed_with() -> None:
    """With overlap all hops are issued asynchronously either way; what differs is when they are awaited."""
    slices = Slices(held=zigzag(12, 3))
    ledgers = []
    for method in ("ring", "ring awaited"):
        on_axis(METHODS[method], full_row(ROWS, 12, 4, 2), slices, observer=(calls := Calls()))
        assert {call.is_async for call in calls.by_rank[0]} == {True}
        ledgers.append(calls.lines())
    assert ledgers[0] == ledgers[1]
