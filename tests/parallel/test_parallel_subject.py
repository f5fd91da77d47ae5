"""The whole subject against the dense reference: losses, logits, gradients, norms, parameters, activations.

Everything is merged outside of the ranks and compared in float64 to 1e-9 of the largest element; replicas must have
the same bits, which the merging checks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel.registry import MODES
from parallel.subject import subject
from reference.case import Case
from tests.parallel.ranks import CPU, on_ranks


def test_the_outcome_holds_shards_where_the_case_splits_and_no_padding() -> None:
    case = Case.parse("mode=tp tp=4 kv_heads=4 layers=1 vocab=257")
    outcomes = on_ranks(4, lambda rank: subject(case, CPU))
    held = [[tuple(box.local.shape) for box in outcome["grad/embedding.tokens.weight"]] for outcome in outcomes]
    assert held == [[(128, 64)], [(128, 64)], [(1, 64)], []]
    logits = [[tuple(box.local.shape) for box in outcome["logits/0"]] for outcome in outcomes]
    assert logits == [[(2, 32, 128)] * 2, [(2, 32, 128)] * 2, [(2, 32, 1)] * 2, []]
    assert isinstance(outcomes[0]["grad/final_norm.weight"], Tensor)
    assert [box.local.shape[0] for box in outcomes[1]["param/layers.0.mlp.w1.weight"]] == [64]


def test_too_large_logits_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("mode=tp tp=2 layers=1 steps=1")
    elements = case.dp * case.micro * case.tokens * case.vocab
    for limit, kept in ((elements, True), (elements - 1, False)):
        monkeypatch.setattr("parallel.training.step.LARGEST_LOGITS", limit)
        (first, _) = on_ranks(2, lambda rank: set(subject(case, CPU)))
        assert ("logits/0" in first) is kept


def test_a_mode_that_is_not_offered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("mode=tp tp=2")
    monkeypatch.setattr("parallel.subject.MODES", {"isp": MODES["isp"]})

    def program(rank: int) -> str:
        with pytest.raises(ValueError, match="mode=tp: is not offered here; legal: isp"):
            subject(case, CPU)
        return "raised"

    assert on_ranks(2, program) == ["raised", "raised"]


def test_modules_without_a_dense_counterpart_are_not_comparable() -> None:
    case = Case.parse("mode=tp tp=2")
    for module in ("", "embedding.tokens", "layers", "layers.0.attention.core"):
        assert subject.activations(case, 0, module, torch.zeros(2, 2, 2)) is None
