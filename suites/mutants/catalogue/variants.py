"""The variants as rows of the kill matrix: known deviations of real systems, chosen by a word and not planted.

What each replaces stands in `parallel.variants`, where it comes from in `reference.case.variants`.
"""

from __future__ import annotations

from reference.case.variants import VARIANTS, words
from suites.mutants.mutant import Mutant, everywhere

__all__ = ["VARIANT_ROWS"]

_TOLD: dict[str, tuple[str, str, str, str]] = {
    "norm-average": ("parameter_gradients", "backward|grad_sync", "final_norm", "averaged"),
    "isp-average": ("parameter_gradients", "backward|grad_sync", "*", "averaged"),
    "scrambled-embedding": ("parameter_gradients", "backward", "embedding|embedding.tokens", "flat_dim"),
    "gathered-logits-loss": ("forward", "loss", "", "more_classes"),
    "flat-dim1": ("activations", "forward", "layers.0.attention*", "flat_dim"),
    "label-smoothing-local": ("replicas", "loss", "", "loss_by_parts"),
    "decoder-layer-thirds": ("forward", "forward", "layers.0.attention*", "rows_permuted|fused_cut"),
    "context-heads-repeated": (
        "ledger",
        "forward|backward",
        "layers.?.attention",
        "wrong_payload|missing_call|extra_call",
    ),
    "dropped-heads": ("merge", "forward", "layers.0.attention*", "layout"),
    "two-stage-swap": ("activation_gradients", "forward|backward", "", ""),
    "ckpt-early-stop": ("ledger", "recompute|backward", "layers.*.mlp.w2", "missing_call"),
    "ddp-rebuild": ("ledger", "backward|grad_sync", "*", "missing_call|extra_call|wrong_payload|wrong_place"),
    "pp-scale-missing": ("activation_gradients", "backward", "head|", "constant_factor"),
    "tied-no-sync": ("replicas", "grad_sync", "embedding.tokens", "missing_call|not_summed"),
    "tied-bucket-misaligned": ("merge", "grad_sync", "embedding.tokens", "layout"),
}
"""Variant -> the check that must fail, phase, region and cause."""

VARIANT_ROWS: tuple[Mutant, ...] = tuple(
    Mutant(
        name=name,
        stands_for=VARIANTS[name].source,
        modes=everywhere("", VARIANTS[name].modes),
        changes=(),
        suite=words(name),
        kills=kills,
        phase=phase,
        region=region,
        cause=cause,
    )
    for name, (kills, phase, region, cause) in _TOLD.items()
)
"""One row a variant."""
