"""Gradients of weights that are fused or deferred, layers reduced once a step or gathered ahead, and parity.

Sources: experts.md 26, around.md 15.4 and 19, bugs.md 6h and 6i, field.md.
"""

from __future__ import annotations

from suites.mutants.mutant import Change, Mutant, Words, everywhere

__all__ = ["GRADIENTS"]

_DATA = everywhere("dp>1", ("tp", "tp-sp"))
FUSED: Words = {"bucket": 700, "wgrad": "fused", "lr": 0.1}
DEFERRED: Words = {"bucket": 700, "wgrad": "deferred", "lr": 0.1}
AHEAD: Words = {"zero": 3, "prefetch": True, "recompute": "none", "layers": 3, "lr": 0.1}
ONCE: Words = {"zero": 2, "no_sync": True, "lr": 0.1}
PARITY: Words = {"parity": 1, "lr": 0.1}
_SYNCED = "backward|grad_sync"
_LATER = "forward|step|grad_sync|backward|loss"
_FLUSH = """        for deferred in self._later:
            self._multiply(*deferred)
        self._later.clear()
"""
_STARTED = """        for under in self._under:
            if under.pending is None:
                self._start(under)
"""


def _change(module: str, old: str, new: str) -> tuple[Change, ...]:
    return (Change(module=f"parallel.data_parallel.{module}", old=old, new=new),)


GRADIENTS = (
    Mutant(
        name="summed-before-the-deferred-products",
        stands_for="Megatron #1012: deferred weight gradients are computed after the sum over data ranks has begun",
        modes=_DATA,
        suite=DEFERRED,
        changes=_change("buffers", _FLUSH + _STARTED, _STARTED + _FLUSH),
        kills="replicas",
        phase=_LATER,
        region="*",
        cause="not_summed|zero|stale|unequal_shares|micro_missing|summed_twice|replicas_drift",
    ),
    Mutant(
        name="deferred-products-overwrite",
        stands_for="TE #1976, #2142: backward_dw writes the gradient of the last micro-batch over the others",
        modes=_DATA,
        condition="micro>1",
        suite=DEFERRED,
        changes=_change("buffers", "beta=float(begun)", "beta=0.0"),
        kills="parameter_gradients",
        phase=_SYNCED,
        region="*",
        cause="micro_missing|unequal_shares",
    ),
    Mutant(
        name="deferred-bucket-starts-in-backward",
        stands_for="experts.md 26: the bucket of a deferred weight is sent when autograd's placeholder arrives",
        modes=_DATA,
        suite=DEFERRED,
        changes=_change("buffers", ' and not (taken and self._case.wgrad == "deferred")', ""),
        kills="ledger",
        phase=_LATER,
        region="*",
        cause="wrong_place|not_summed|extra_call|zero|stale|unequal_shares|micro_missing|summed_twice|missing_call",
    ),
    Mutant(
        name="placeholder-added",
        stands_for="Megatron gradient_accumulation_fusion: the dummy gradient, never written, is added to main_grad",
        modes=_DATA,
        suite=FUSED,
        changes=_change("buffers", "if not taken or name == TABLE:", "if True:"),
        kills="parameter_gradients",
        phase=_LATER,
        region="*",
        cause="nan",
    ),
    Mutant(
        name="placeholder-of-a-tied-table-not-zeroed",
        stands_for="Megatron zero_out_wgrad: the dummy of a shared embedding, uninitialised, is added to the lookup's",
        modes=everywhere("dp>1 tied=true", ("tp", "tp-sp")),
        suite=FUSED,
        changes=_change("buffers", "0.0 if name == TABLE else torch.nan", "torch.nan"),
        kills="parameter_gradients",
        phase=_LATER,
        region="*",
        cause="nan",
    ),
    Mutant(
        name="zero1-stale-range",
        stands_for="around.md 19 zero1-stale-range: the gradient is read where it holds this rank's own sum alone",
        modes=_DATA,
        suite={"zero": 1, "bucket": 700, "lr": 0.1},
        changes=_change("buffers", "under.flat[own.start : own.stop].copy_(summed)", "pass"),
        kills="parameter_gradients",
        phase=_SYNCED,
        region="*",
        cause="not_summed|micro_missing|unequal_shares|one_shard",
    ),
    Mutant(
        name="last-micro-batch-alone-reduced",
        stands_for="verl #7493, around.md 15: under no_sync only the last micro-batch's gradient is reduced",
        modes=_DATA,
        condition="micro>1",
        suite=ONCE,
        changes=_change(
            "gathered",
            "for kept, one in zip(self._wholes, wide, strict=True)] if self._wholes else wide",
            "for kept, one in ()] or wide",
        ),
        kills="parameter_gradients",
        phase=_SYNCED,
        region="*",
        cause="micro_missing|unequal_shares",
    ),
    Mutant(
        name="no-sync-without-effect",
        stands_for="accelerate #2665 and its kind: no_sync is entered and every micro-batch is reduced all the same",
        modes=_DATA,
        condition="micro>1",
        suite=ONCE,
        changes=_change("gathered", "if self._case.no_sync:", "if False:"),
        kills="ledger",
        phase=_SYNCED,
        region="*",
        cause="extra_call",
    ),
    Mutant(
        name="prefetched-layer-not-awaited",
        stands_for="B-90: DeepSpeed #7965, a prefetched parameter is used before its gather has arrived",
        modes=_DATA,
        condition="overlap=true",
        suite=AHEAD,
        changes=_change("gathered", "self._coming.wait().view", "self._coming.finish().view"),
        kills="waits",
        phase="forward|backward|recompute|loss",
        region="*",
        cause="not_waited|nan",
    ),
    Mutant(
        name="first-layer-prefetched-for-the-next-step",
        stands_for="B-92: InternEvo bb20142, a layer gathered ahead of the update is used after it",
        modes=_DATA,
        suite=AHEAD,
        changes=_change("gathered", "root.following = layers[0]", "root.following = layers[-1].following = layers[0]"),
        kills="ledger",
        phase="forward|backward|step|loss",
        region="*",
        cause="missing_call|extra_call|stale|wrong_place",
    ),
    Mutant(
        name="prefetch-from-the-wrong-side",
        stands_for="torchtitan's backward prefetch by forward order: a layer that is done is gathered once more",
        modes=_DATA,
        suite=AHEAD,
        changes=_change("gathered", "ctx.unit.preceding.start()", "(ctx.unit.following or ctx.unit.preceding).start()"),
        kills="ledger",
        phase="backward|forward",
        region="*",
        cause="extra_call|wrong_place|missing_call",
    ),
    Mutant(
        name="parity-over-weights-alone",
        stands_for="run_realtime_tests of the seed: one of its two groups is left out",
        modes=_DATA,
        suite=PARITY,
        changes=_change("parity", "in self._replicated.items():", "in [*self._replicated.items()][:1]:"),
        kills="ledger",
        phase="grad_sync",
        region="",
        cause="missing_call",
    ),
    Mutant(
        name="parity-of-no-norm",
        stands_for="Megatron's check of q/k norms alone: what is compared is less than what is replicated",
        modes=_DATA,
        suite=PARITY,
        changes=_change("parity", "for one in names])", 'for one in names if "final_norm" not in one])'),
        kills="ledger",
        phase="grad_sync",
        region="",
        cause="wrong_payload|missing_call|raised",
    ),
)
