"""Prediction of further tokens: layers behind the decoder, each for the token one place ahead. Words and rules.

Depth k = 1..D embeds the tokens k places ahead and joins them with the hidden states of depth k - 1 (0: the decoder).
Then it predicts the token k + 1 places ahead with the model's own embedding and head. The loss has the term

    weight / D * sum over k of (sum of mask_k * loss_k over all tokens of the step) / (sum of mask_k over the same)

where mask and labels of depth k are those k places ahead in the same document. Both sums are over all micro-batches,
data and context ranks. Sources: DeepSeek-V3 (arXiv:2412.19437) 2.2; Megatron-Core 0.16.1 `MultiTokenPredictionBlock`
(experts.md 24), which divides by the tokens that one rank counts, or by those of the main loss.
"""

import math
from collections.abc import Iterator

from shardproof.reference.language.core import Core
from shardproof.reference.language.words import Problem, not_default, word


class FurtherTokens(Core):
    """A case that may predict further tokens."""

    prediction_depth: int = word(
        0,
        "further tokens that are predicted, by a layer each (multi-token prediction); 0: none",
        legal="0, or at least 1",
        domain=(0, 1, 2),
        after="qk_norm",
        part=True,
    )
    prediction_weight: float = word(
        0.3,
        "weight of the mean loss of further tokens (prediction_depth)",
        legal="0 or a positive number",
        domain=(0.3, 1.0),
    )

    @property
    def block_count(self) -> int:
        """The number of layers, those of the prediction depths among them."""
        return super().block_count + self.prediction_depth

    @property
    def blocks(self) -> dict[str, int]:
        """The layers, with that of every depth, which is like the decoder's last."""
        depths = range(self.prediction_depth)
        return {**super().blocks, **{f"prediction.{depth}.layer": self.layers - 1 for depth in depths}}

    @property
    def behind_decoder(self) -> tuple[str, ...]:
        """The features after the decoder."""
        return (*super().behind_decoder, *(("prediction",) if self.prediction_depth else ()))

    @property
    def units_behind(self) -> tuple[str, ...]:
        """The modules after the decoder that recompute=full computes again as a unit: every depth."""
        return (*super().units_behind, *(f"prediction.{depth}" for depth in range(self.prediction_depth)))

    @property
    def embeds_behind(self) -> bool:
        """Whether something after the decoder embeds tokens: every depth does."""
        return super().embeds_behind or self.prediction_depth > 0

    def problems(self) -> Iterator[Problem]:
        """Every broken rule: its word, the rule and a legal value."""
        depth, weight = self.prediction_depth, self.prediction_weight
        if depth < 0:
            yield "prediction_depth", "must not be negative", "prediction_depth=0"
        if not weight >= 0 or not math.isfinite(weight):
            yield "prediction_weight", "must be 0 or a positive number", "prediction_weight=0.3"
        if not depth:
            for key, legal in not_default(FurtherTokens, self):
                yield key, "weighs the loss of further tokens, and prediction_depth=0 predicts none", legal
            return
        if self.system.system != "Megatron-Core":
            yield (
                "prediction_depth",
                f"mode={self.mode} predicts no further tokens (mode=tp|tp-sp)",
                "prediction_depth=0",
            )
        if depth >= self.seq:
            yield "prediction_depth", f"must be below seq={self.seq}", f"prediction_depth={max(self.seq - 1, 0)}"
        if self.pipeline_axes and self.positions == "learned":
            rule = "predicts on the last pipeline stage, and the table of positions is on the first"
            yield "prediction_depth", rule, "positions=rope"
