"""Memory does not grow with the number of runs: what runs have freed in pieces goes back to the system."""

from __future__ import annotations

import sys

import pytest
import torch

from harness.engines.threads import heap
from harness.engines.threads.heap import Heap, resident_bytes
from harness.engines.threads.inproc import InprocEngine

PIECE_BYTES = 2**16
"""Below what glibc maps one by one and gives back by itself."""
pytestmark = pytest.mark.skipif(
    not hasattr(heap._C, "malloc_trim"), reason="this C library keeps no holes to give back"
)


def holes(mib: int) -> torch.Tensor:
    """Allocate and free so much, all but the last piece, which holds the heap's end where it is."""
    pieces = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in range(mib * 2**20 // PIECE_BYTES)]
    return pieces[-1]


def test_a_run_gives_back_what_was_freed_in_pieces() -> None:
    with InprocEngine() as engine:
        heap._C.malloc_trim(0)  # holes of earlier tests would be filled first
        before = resident_bytes()
        engine._heap = Heap(slack_bytes=2**24, every=1)
        kept = holes(64)
        assert resident_bytes() - before > 50 * 2**20, "glibc itself gives nothing back while the last piece lives"
        engine.run(lambda rank: None, world_size=2)
        assert resident_bytes() - before < 20 * 2**20
    assert kept.sum() == PIECE_BYTES


def test_what_is_in_use_is_not_asked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, trimmed = [100], list[int]()
    monkeypatch.setattr(heap, "resident_bytes", lambda: seen[0])
    monkeypatch.setattr(heap, "_C", type("C", (), {"malloc_trim": trimmed.append}))
    kept = Heap(slack_bytes=50, every=1)
    for now, times in ((150, 0), (151, 1), (200, 1), (201, 1), (202, 2), (100, 2)):
        seen[0] = now
        kept.settle()
        assert len(trimmed) == times, now


def test_a_small_run_does_not_pay_for_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(100))
    monkeypatch.setattr(heap, "resident_bytes", lambda: next(looks))
    kept = Heap(every=3)
    for _ in range(7):
        kept.settle()
    assert next(looks) == 3, "one at the beginning, one after the third and one after the sixth run"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_system_that_does_not_tell_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resident_bytes() > 2**20
    monkeypatch.setattr(heap, "_STATM", heap._STATM.with_name("no-such-file"))
    assert resident_bytes() == 0
    Heap().settle()
