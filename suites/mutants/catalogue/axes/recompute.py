"""What backward computes again: units, their inputs, where they end (around.md 16 and 19; bugs.md 6h)."""

from __future__ import annotations

from suites.mutants.mutant import TENSOR, Change, Mutant, Words, everywhere

__all__ = ["RECOMPUTE"]

_FULL: Words = {"recompute": "full", "layers": 2}
_SHARED: Words = {**_FULL, "distribute_saved": True}
_BLOCK: Words = {"recompute": "full", "recompute_method": "block", "layers": 3}
_HOLDS = ("tp", "mtp")
"""Modes that can share the saved inputs."""
_GATHERED = "all_gather(part, axis, dim=0)"


def _change(module: str, old: str, new: str) -> tuple[Change, ...]:
    return (Change(module=f"parallel.{module}", old=old, new=new),)


RECOMPUTE = (
    Mutant(
        name="block-recomputes-every-layer",
        stands_for="Megatron's recompute_method=block taken as uniform: as many layers as there are, right numbers",
        modes=everywhere("", TENSOR),
        suite=_BLOCK,
        changes=_change(
            "model.transformer",
            "self.units = units(case, [int(layer) for layer in self.layers])",
            "self.units = units(case, [int(layer) for layer in self.layers])\n"
            "        self.units = tuple((int(layer),) for layer in self.layers) if self.units else ()",
        ),
        kills="ledger",
        phase="recompute|backward",
        region="layers.*",
        cause="extra_call",
    ),
    Mutant(
        name="saved-input-not-gathered",
        stands_for="Megatron distribute_saved_activations: a rank computes a unit again from its own part alone",
        modes=everywhere("", _HOLDS),
        suite=_SHARED,
        changes=_change("layers.recompute", _GATHERED, "part.repeat(axis.size)"),
        kills="ledger",
        phase="recompute|backward",
        region="layers.*",
        cause="missing_call",
    ),
    Mutant(
        name="saved-parts-in-another-order",
        stands_for="Megatron distribute_saved_activations: parts are gathered in another order than they were cut in",
        modes=everywhere("", _HOLDS),
        suite=_SHARED,
        changes=_change("layers.recompute", _GATHERED, f"{_GATHERED}.roll(part.numel())"),
        kills="parameter_gradients",
        phase="backward|recompute",
        region="layers.*",
    ),
    Mutant(
        name="saved-input-of-the-first-micro-batch",
        stands_for="B-97: TE #1723, a unit is computed again from a buffer that an earlier micro-batch filled",
        modes=everywhere("micro>1", _HOLDS),
        suite=_SHARED,
        changes=_change(
            "layers.recompute",
            "axis, dim=0).clone()",
            "axis, dim=0).clone()\n"
            "        saved = computed_later_again.__dict__.setdefault((axis.rank, unit.args[0]), saved)",
        ),
        kills="parameter_gradients",
        phase="backward|recompute",
        region="*",
        cause="",
    ),
    Mutant(
        name="prefetch-of-a-block-that-is-gathered-whole",
        stands_for="B-93: InternEvo PR #366, with a share of blocks recomputed one linear is gathered twice",
        modes={"isp": "overlap=true fuse_weights=false"},
        suite=_BLOCK,
        changes=_change(
            "weights.prefetch", "not self.plan.by_block(before[0].block)", "not self.plan.by_block(seat.block)"
        ),
        kills="ledger",
        phase="recompute|backward",
        region="layers.*",
        cause="extra_call|wrong_place",
    ),
)
