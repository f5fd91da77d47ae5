"""The optimizer, the training loop and what a run returns (bugs.md 6j); with those that one check alone can see."""

from __future__ import annotations

from suites.mutants.catalogue.model.norms_and_clip import CLIPPED
from suites.mutants.mutant import TENSOR, Change, Mutant, Words, everywhere

__all__ = ["OPTIMIZER_AND_LOOP"]

ADAMW: Words = {"optimizer": "adamw", "lr": 0.01}
"""What the property of AdamW fixes."""
_MADE = "list(rank.updated.values())"
_STEP = "optimizer.step()"
_RETURN = "return outcome | {"
_LOGITS = "boxes += rows("


def _step(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.training.step", old=old, new=new),)


def _training(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.training.loop", old=old, new=new),)


_COUNT_RUNS = "    run = train.__dict__.setdefault(mesh.rank, [])\n    run.append(1)\n"

OPTIMIZER_AND_LOOP = (
    Mutant(
        name="optimizer-made-before-the-split",
        stands_for="B-106: accelerate #2665, the optimizer holds parameters that the model does not use any more",
        modes=everywhere(),
        changes=_step(
            _MADE,
            "[p.detach().clone().requires_grad_() for p in rank.updated.values()]",
        ),
        kills="update",
        phase="step",
        region="",
        cause="never_updated",
    ),
    Mutant(
        name="gradient-sync-bypassed",
        stands_for="B-107: the wrapper is bypassed, data ranks train alone",
        modes=everywhere("dp>1", TENSOR) | {"isp": "wdp>1"},
        changes=_step("for axis in rank.strategy.data_axes:", "for axis in ():"),
        kills="replicas",
        phase="grad_sync",
        region="*",
        cause="missing_call|not_summed",
    ),
    Mutant(
        name="last-step-not-taken",
        stands_for="B-115, B-92: the parameters of the last step are not complete when they are read",
        modes=everywhere(),
        changes=_training(_STEP, f"if step < case.steps - 1:\n            {_STEP}"),
        kills="update",
        alone=True,
        phase="step",
        region="*",
        cause="step_missing",
    ),
    Mutant(
        name="weight-decay-forgotten",
        stands_for="torchtitan #1341: equal under Adam, different under AdamW",
        modes=everywhere(),
        suite=ADAMW,
        changes=_step(
            "torch.optim.AdamW(parameters, lr=case.lr, weight_decay=_WEIGHT_DECAY)",
            "torch.optim.AdamW(parameters, lr=case.lr, weight_decay=0.0)",
        ),
        kills="update",
        phase="step",
        region="",
        cause="decay_missing",
    ),
    Mutant(
        name="gradients-returned-without-a-copy",
        stands_for="B-97: TE #1723, a reference is kept where a copy is needed: clipping changes it",
        modes=everywhere(),
        suite=CLIPPED,
        changes=_training("rank.value(kept(grad), places[name])", "rank.value(grad, places[name])"),
        kills="parameter_gradients",
        alone=True,
        phase="backward|grad_sync|step",
        region="*",
        cause="constant_factor",
    ),
    Mutant(
        name="last-micro-batch-not-returned",
        stands_for="B-84: Megatron 714c24a7e8, a part of what is written is dropped",
        modes=everywhere(),
        changes=_step(_LOGITS, f"boxes += [] if micro == case.micro - 1 else {_LOGITS[9:]}"),
        kills="merge",
        alone=True,
        phase="forward",
        region="",
        cause="layout",
    ),
    Mutant(
        name="names-of-a-wrapper",
        stands_for="B-73, B-84: names that a wrapper has changed: nothing is recognised, nothing would be compared",
        modes=everywhere(),
        changes=(
            Change(
                module="parallel.subject",
                old="return train(case, deviating(strategy_of(case), case), Mesh.of(case), device)",
                new="wrapped = train(case, deviating(strategy_of(case), case), Mesh.of(case), device)\n"
                '        return {f"module.{name}": value for name, value in wrapped.items()}',
            ),
            Change(
                module="parallel.subject",
                old="place = strategy.activation(case, module)\n",
                new='place = strategy.activation(case, f"module.{module}")\n',
            ),
        ),
        kills="coverage",
        alone=True,
        cause="uncheckable",
    ),
    Mutant(
        name="another-last-bit-in-every-run",
        stands_for="B-87: InternEvo 6682f5d, uninitialised memory: every run differs a little",
        modes=everywhere(),
        changes=_training(
            "    rank = set_up(case, strategy, mesh, device)\n",
            f"{_COUNT_RUNS}    rank = set_up(case, strategy, mesh, device)\n"
            "    with torch.no_grad():\n        rank.model.final_norm.weight.mul_(1 + 2**-48 * len(run))\n",
        ),
        kills="determinism",
        alone=True,
        cause="not_deterministic",
    ),
    Mutant(
        name="another-last-bit-in-the-first-run",
        stands_for="B-51, B-92: what a first run leaves behind is used by the next ones",
        modes=everywhere(),
        changes=_training(
            "    rank = set_up(case, strategy, mesh, device)\n",
            f"{_COUNT_RUNS}    rank = set_up(case, strategy, mesh, device)\n"
            "    with torch.no_grad():\n        rank.model.final_norm.weight.mul_(1 + 2**-48 * (len(run) == 1))\n",
        ),
        kills="recording",
        alone=True,
        cause="recording",
    ),
)
