"""picotron's ring attention beside ours, from the checkout that the environment variable PICOTRON names.

What differs is named: picotron repeats kv heads before the ring, sends keys and values apart, and computes in float32
whatever the dtype is, so that both are compared in float32. Its slices are contiguous.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.communication.mesh import Axis
from parallel.context.slices import Slices, contiguous
from tests.parallel.context.rows import METHODS, error, full_row, on_axis
from tests.parallel.ranks import Calls

ROWS, HEADS, KV_HEADS, DIM, TOKENS = 2, 4, 2, 3, 5


class Manager:
    """picotron's process_group_manager, one for all ranks: each attribute is that of the rank that reads it."""

    def __init__(self) -> None:
        self.axes: dict[int, Axis] = {}

    def __getattr__(self, name: str) -> Any:
        axis = self.axes[dist.get_rank()]
        found = {
            "cp_rank": axis.rank,
            "cp_world_size": axis.size,
            "cp_group": axis.group,
            "cp_send_rank": axis.ranks[(axis.rank + 1) % axis.size],
            "cp_recv_rank": axis.ranks[axis.rank - 1],
        }
        return found[name]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """picotron's module of context parallelism."""
    checkout = os.environ.get("PICOTRON")
    if not checkout:
        pytest.skip("PICOTRON names no checkout of picotron")
    monkeypatch.syspath_prepend(checkout)
    manager = importlib.import_module("picotron.process_group_manager")
    monkeypatch.setattr(manager, "process_group_manager", Manager(), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return importlib.import_module("picotron.context_parallel.context_parallel")


@pytest.mark.peers
@pytest.mark.parametrize("ranks", [2, 3])
def test_numbers_are_picotrons_and_bytes_but_for_repeated_heads(theirs: Any, ranks: int) -> None:
    def ring(q: Tensor, k: Tensor, v: Tensor, *, axis: Axis, slices: Slices) -> Tensor:
        theirs.pgm.process_group_manager.axes[dist.get_rank()] = axis
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        context: Tensor = theirs.ring_attention(q, k, v, DIM**-0.5, True)
        return context.transpose(1, 2)

    full = [x.float() for x in full_row(ROWS, TOKENS * ranks, HEADS, KV_HEADS, dim=DIM)]
    slices = Slices(held=contiguous(TOKENS * ranks, ranks))
    found = on_axis(ring, full, slices, observer=(calls := Calls()))
    assert max(error(found, on_axis(METHODS["ring"], full, slices)).values()) < 1e-4

    keys = ROWS * TOKENS * HEADS * DIM * 4
    hops = 3 * ranks - 2  # of our blocks: c-1 forward, c-1 and c backward
    for rank in range(ranks):
        sent = Counter((call.op, call.payload_bytes) for call in calls.by_rank[rank])
        assert sent == {(op, keys): 2 * hops for op in ("send", "recv")}
