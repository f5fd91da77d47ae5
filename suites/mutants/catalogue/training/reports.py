"""Numbers that are only reported, and what a loss or a gradient is multiplied by or rounded to (bugs.md 6c, 6d, 6f)."""

from __future__ import annotations

from suites.mutants.catalogue.model.norms_and_clip import CLIPPED
from suites.mutants.catalogue.model.vocabulary_and_loss import PARALLEL
from suites.mutants.mutant import Change, Mutant, everywhere

__all__ = ["REPORTS"]

_INTERNEVO = ("mtp", "msp", "fsp", "isp")
"""Modes of the system whose metric this is."""
_TOTAL = "self.total = measured if self.total is None else self.total + measured"
_NORM = "total = torch.stack(squares).sum()"
_BACK = "summed.backward()"
_DIVIDED = "gradient.div_(tokens * shares)"
_SPREAD = "spread = smoothing / (vocab - 1) if smoothing else 0.0"
_CLIP = "sync.clip(gradients.values(), norm, case.clip)"
_WHEN = "step|grad_sync"
_LAST = "head|final_norm|embedding.*|layers.*"


def _change(module: str, old: str, new: str) -> Change:
    return Change(module=f"parallel.{module}", old=old, new=new)


REPORTS = (
    Mutant(
        name="metric-that-keeps-the-newest-alone",
        stands_for="a log of the last micro-batch alone, called that of the step",
        modes=everywhere("metric=true", _INTERNEVO),
        changes=(_change("layers.metric", _TOTAL, "self.total = measured"),),
        kills="forward",
        alone=True,
        phase="metric",
        region="",
        cause="micro_missing",
    ),
    Mutant(
        name="metric-that-keeps-the-oldest-alone",
        stands_for="a metric that is measured once and cached",
        modes=everywhere("metric=true", _INTERNEVO),
        changes=(_change("layers.metric", _TOTAL, "self.total = measured if self.total is None else self.total"),),
        kills="forward",
        alone=True,
        phase="metric",
        region="",
        cause="micro_missing",
    ),
    Mutant(
        name="norm-whose-root-is-not-taken",
        stands_for="a norm that is handed on before its root is taken",
        modes=everywhere(),
        changes=(_change("communication.gradients", "return total.sqrt()", "return total"),),
        kills="gradient_norm",
        alone=True,
        phase=_WHEN,
        region="",
        cause="norm_kind",
    ),
    Mutant(
        name="norm-that-is-the-largest-gradient",
        stands_for="an infinity norm where the Euclidean one is meant (norm_type of clip_grad_norm_)",
        modes=everywhere(),
        changes=(
            _change("communication.gradients", "gradient.to(dtype).square().sum()", "gradient.to(dtype).abs().max()"),
            _change("communication.gradients", _NORM, _NORM.replace("sum()", "max()")),
            _change(
                "communication.gradients",
                "total = all_reduce(total, axis)",
                'total = all_reduce(total, axis, op="max")',
            ),
            _change("communication.gradients", "return total.sqrt()", "return total"),
        ),
        kills="ledger",
        phase=_WHEN,
        region="",
        cause="norm_kind|wrong_op",
    ),
    Mutant(
        name="norm-of-what-clipping-left",
        stands_for="a log of the norm that is written after the gradients were scaled",
        modes=everywhere(),
        suite=CLIPPED,
        changes=(
            _change(
                "training.loop", _CLIP, f'{_CLIP}\n        outcome[f"grad_norm/{{step}}"] = norm.clamp(max=case.clip)'
            ),
        ),
        kills="gradient_norm",
        alone=True,
        phase=_WHEN,
        region="",
        cause="norm_after_clip",
    ),
    Mutant(
        name="smoothing-that-keeps-a-share-for-the-label",
        stands_for="torch's label_smoothing, a share of which the label keeps, where Megatron's is meant",
        modes=PARALLEL,
        condition="label_smoothing>0",
        suite={"label_smoothing": 0.1},
        changes=(_change("layers.loss", _SPREAD, _SPREAD.replace("(vocab - 1)", "vocab")),),
        kills="forward",
        phase="loss",
        region="",
        cause="smoothing_over_all",
    ),
    Mutant(
        name="backward-of-half-the-loss",
        stands_for="B-35, B-37: a factor of the loss that no group has",
        modes=everywhere(),
        changes=(_change("training.step", _BACK, "(summed / 2).backward()"),),
        kills="activation_gradients",
        phase="backward",
        region="head|",
        cause="constant_factor",
    ),
    Mutant(
        name="gradients-divided-by-four",
        stands_for="B-34, pytorch #160285: a divide factor that is four by default",
        modes=everywhere(),
        changes=(_change("training.loop", _DIVIDED, _DIVIDED.replace("shares)", "shares * 4)")),),
        kills="parameter_gradients",
        phase="backward|grad_sync",
        region=_LAST,
        cause="constant_factor",
    ),
    Mutant(
        name="gradients-rounded-to-bfloat16",
        stands_for="B-98: DeepSpeed #5170, gradients in the run dtype where an accumulator is meant",
        modes=everywhere(),
        changes=(_change("training.loop", _DIVIDED, f"{_DIVIDED}\n        gradient.copy_(gradient.bfloat16())"),),
        kills="parameter_gradients",
        phase="backward|grad_sync",
        region=_LAST,
        cause="shorter_dtype",
    ),
    Mutant(
        name="parameters-rounded-to-float32",
        stands_for="masters that are stored in the run dtype between steps",
        modes=everywhere(),
        changes=(
            _change(
                "training.loop",
                "        optimizer.step()\n        rank.step.afterwards(rank)",
                "        optimizer.step()\n        for kept in rank.parameters.values():\n"
                "            kept.data.copy_(kept.data.float())\n        rank.step.afterwards(rank)",
            ),
        ),
        kills="update",
        phase="step",
        region="",
        cause="shorter_dtype",
    ),
)
