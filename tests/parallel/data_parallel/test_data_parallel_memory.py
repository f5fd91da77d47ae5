"""What a rank keeps falls as ZeRO says: states, then gradients and parameters; hooks of a program are counted."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from harness.engines.shapes.dry import DryEngine
from harness.predicting.clusters import PRESETS
from harness.predicting.figures import EQUAL, Forecast, mixed_adamw
from harness.predicting.forecast import forecast
from harness.recording.measures import SavedActivations
from parallel.communication.layout import local_shape
from parallel.communication.mesh import coordinates
from parallel.data_parallel.buckets import bucketed
from parallel.schemes.tensor import placements
from parallel.subject import subject
from reference.case import Case

WORDS = "mode=tp-sp tp=2 dp=4 heads=4 kv_heads=2 hidden=32 ffn=72 vocab=389 seq=8 dtype=bfloat16 micro=2"


@cache
def predicted(zero: int) -> Forecast:
    with DryEngine() as engine:
        case = Case.parse(f"{WORDS} zero={zero}")
        return forecast(case, subject, PRESETS["8xH100-NVLink-IB400"], engine, states=mixed_adamw("bfloat16"))


def elements() -> dict[str, int]:
    """Of every parameter on a rank, padding of the vocabulary included."""
    case = Case.parse(WORDS)
    return {name: math.prod(local_shape(place, coordinates(case, 0))) for name, place in placements(case).items()}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_by_part(zero: int) -> None:
    told, whole = predicted(zero), sum(elements().values())
    part = whole
    if zero == 1:  # rank 0's part of the one bucket, without the padding between parameters
        (bucket,) = bucketed(elements(), ranks=4, sharded=True)
        part = sum(
            min(slot.end, bucket.size // 4) - slot.start for slot in bucket.slots if slot.start < bucket.size // 4
        )
    elif zero > 1:  # every row count of this case is a multiple of four
        part = whole // 4
    kept = part if zero > 1 else whole
    assert told.ledger == EQUAL
    assert (told.memory.parameters, told.memory.gradients, told.memory.optimizer) == (2 * kept, 4 * kept, 12 * part)


def test_the_peak_falls_with_every_stage() -> None:
    peaks = [predicted(zero).memory.peak for zero in (0, 1, 2, 3)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def test_what_a_programs_own_hooks_keep_is_counted() -> None:
    weight, saved = torch.ones(8, 8, dtype=torch.float64, requires_grad=True), SavedActivations()
    dropped: list[torch.Tensor] = []

    def marked(tensor: torch.Tensor) -> torch.Tensor | int:
        dropped.append(tensor)
        return len(dropped) - 1 if tensor.shape == (5, 8) else tensor

    def found(kept: torch.Tensor | int) -> torch.Tensor:
        return dropped[kept] if isinstance(kept, int) else kept

    with saved.on_rank(0), torch.autograd.graph.saved_tensors_hooks(marked, found):
        first = torch.ones(4, 8, dtype=torch.float64) @ weight
        second = torch.ones(5, 8, dtype=torch.float64) @ weight  # keeps a number in place of its input
        (first.sum() + second.sum()).backward()
    assert saved.peak_bytes(0) == 4 * 8 * 8
    assert weight.grad is not None
    assert weight.grad.sum() == 9 * 8 * 8
