"""A dense model that is another one in float32 than in float64 fails as that; rounding, large or odd, does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import shardproof
from harness.engines.threads.inproc import InprocEngine
from tests.harness import own_words
from tests.harness.own_words import Network, trained


class Drawn(Network):
    """Draws weights in the case's dtype in part: in another than float64 its loss is off by about this share."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def weights(self, case: Any) -> tuple[Tensor, Tensor]:
        """Weights that are others in each dtype."""
        w1, w2 = own_words.weights(case)
        return (w1, w2) if case.dtype == "float64" else (w1 * (1 + self.share / 4), w2 * (1 + self.share / 4))

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        """Dense training from them."""
        return trained(case, *self.weights(case))


class Seeded(Drawn):
    """Draws all weights in the case's dtype: the same seed gives others."""

    def weights(self, case: Any) -> tuple[Tensor, Tensor]:
        """As torch draws them."""
        generator = torch.Generator().manual_seed(case.seed)
        drawn = torch.randn(2, own_words.INNER, case.width, generator=generator, dtype=getattr(torch, case.dtype))
        return drawn[0].mul(0.3), drawn[1].mul(0.3).T.contiguous()


def told(engine: InprocEngine, subject: Network, case: str, truth: str = "") -> dict[str, Any]:
    result = shardproof.prove(case, subject, engine, truth=truth)
    first = result.diagnosis
    assert first is None or first.check != "truth" or [cause.id for cause in first.causes] == ["other_model"]
    return {verdict.check: verdict for verdict in result.verdicts if verdict.verdict != "pass"}


@pytest.mark.parametrize("truth", ["", "alone"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("share", [1e-2, 1e-3, 1e-4])
def test_another_function_in_float32_fails_with_that_as_its_cause(
    engine: InprocEngine, share: float, dtype: str, truth: str
) -> None:
    failed = told(engine, Drawn(share), f"tp=2 act=tanh dtype={dtype}", truth)
    assert "truth" in failed and failed["truth"].verdict == "fail"
    what, _, error, _, causes, _ = failed["truth"].message.splitlines()
    assert "the dense model computes another function in float32 than in float64" in what
    assert "rounding to float32 explains" in error and "drawn in the case's dtype" in causes
    assert 0.2 * share < failed["truth"].worst.error < 5 * share


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_of_the_same_seed_in_another_dtype_are_another_function(engine: InprocEngine, dtype: str) -> None:
    assert told(engine, Seeded(0.0), f"tp=2 dtype={dtype}")["truth"].verdict == "fail"
    assert told(engine, Seeded(0.0), "tp=2") == {}, "one model in float64 alone"


@pytest.mark.parametrize("case", [*own_words.CASES, "tp=2 width=96 dtype=float32", "tp=2 act=tanh dtype=float16"])
def test_a_dense_model_that_rounds_what_it_drew_is_one_function(engine: InprocEngine, case: str) -> None:
    result = shardproof.prove(case, Network(), engine)
    verdicts = {verdict.check: verdict.verdict for verdict in result.verdicts}
    assert verdicts.get("truth") == (None if "dtype" not in case else "pass")


class Cancelling(Network):
    """Its loss is what is left of two large numbers: rounding is amplified, in whatever order sums are taken."""

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        """The output beside dense training."""
        w1, w2 = own_words.weights(case)
        x = own_words.samples(case, 0, 0, 0)
        y = (x @ w1.T) @ w2.T
        return {"output/0": (y + 1e4 * (x @ w1.T).sum()) - 1e4 * (x @ w1.T).sum(), **trained(case, w1, w2)}

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        return {**super().__call__(case, device), "output/0": self.truth(case, device)["output/0"]}


class Choosing(Cancelling):
    """A router's choice that falls otherwise in float32 for one row of many."""

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        """The chosen rows beside dense training."""
        x = own_words.samples(case, 0, 0, 0)
        chosen = torch.arange(len(x)) % 2 == 0
        chosen[3] = case.dtype == "float64"
        w1, w2 = own_words.weights(case)
        return {"output/0": torch.where(chosen[:, None], x, -2 * x), **trained(case, w1, w2)}


@pytest.mark.parametrize("subject", [Cancelling(), Choosing()])
def test_amplified_rounding_and_a_choice_that_falls_otherwise_are_no_other_function(
    engine: InprocEngine, subject: Network
) -> None:
    assert "truth" not in told(engine, subject, "tp=2 act=tanh dtype=float32")
