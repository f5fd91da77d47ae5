"""Large tensors are compared in blocks, and held once: what comes of it is what comes of comparing them at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.checking.measures import distance as measured
from harness.checking.measures.distance import Distance, distance
from harness.outcome.blocks import localize
from harness.outcome.merging import held_once, merge
from harness.shard import Shard
from reference.case import Case
from reference.model.parameters import drawn, full, shapes


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


TRUTH = noise(37, 29, seed=0)
RIGHT = TRUTH * (1 + 1e-6 * noise(37, 29, seed=1))


def one_row_doubled() -> Tensor:
    wrong = RIGHT.clone()
    wrong[36] *= 2
    return wrong


def not_finite(number: float) -> Tensor:
    wrong = RIGHT.clone()
    wrong[20, 3] = number
    return wrong


VALUES: dict[str, Callable[[], Tensor]] = {
    "right": lambda: RIGHT,
    "float32": RIGHT.float,
    "the same": lambda: TRUTH,
    "a wrong factor": lambda: 1.5 * RIGHT,
    "one row doubled": one_row_doubled,
    "nan": lambda: not_finite(torch.nan),
    "infinite": lambda: not_finite(-torch.inf),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("truth", [TRUTH, torch.zeros_like(TRUTH), 1e-200 * TRUTH], ids=["noise", "zero", "tiny"])
@pytest.mark.parametrize("own", [0.0, 1e-6])
@pytest.mark.parametrize("slack", [None, 1e-7 * TRUTH.abs()], ids=["no slack", "slack"])
def test_blocks_measure_what_the_whole_does(
    value: Callable[[], Tensor], truth: Tensor, own: float, slack: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> list[Distance]:
        return [distance(value(), truth, least, own, slack) for least in (0.0, 0.5)]

    at_once = found()
    monkeypatch.setattr(measured, "BLOCK", 100)
    for one, other in zip(at_once, found(), strict=True):
        for name in measured.MEASURES:
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-10, abs=1e-16), name


def test_complex_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = noise(11, 13, seed=2, dtype=torch.complex128)
    value = truth * (1 + 1e-3j)
    at_once = distance(value, truth)
    monkeypatch.setattr(measured, "BLOCK", 20)
    assert distance(value, truth).frobenius == pytest.approx(at_once.frobenius, rel=1e-10)


def test_large_shards_become_views_of_the_merged_tensor() -> None:
    rows = noise(4, 2**15, seed=3)
    small = noise(8, seed=4)
    ranks = [
        localize({"grad/w": Shard(rows[2 * r : 2 * r + 2].clone(), (2 * r, 0), (4, 2**15)), "grad/b": small.clone()})
        for r in range(2)
    ]
    merged = merge(ranks)
    for rank, (before, after) in enumerate(zip(ranks, held_once(ranks, merged), strict=True)):
        (own,), (view,) = before["grad/w"], after["grad/w"]
        assert torch.equal(own.local, view.local) and own.offsets == view.offsets
        assert view.local.untyped_storage().data_ptr() == merged.tensors["grad/w"].untyped_storage().data_ptr()
        assert after["grad/b"] is before["grad/b"], rank


def test_a_weight_is_drawn_once_and_every_caller_may_write_to_its_own() -> None:
    case = Case.parse("mode=tp tp=2 seed=5")
    name = next(iter(shapes(case)))
    assert drawn(case, name) is drawn(Case.parse("mode=tp-sp tp=2 dp=2 seed=5"), name)
    own = full(case, name)
    own.zero_()
    assert drawn(case, name).any() and torch.equal(full(case, name), drawn(case, name))
    assert not torch.equal(drawn(case.but(seed=6), name), drawn(case, name))
