"""What a step of the optimizer, a count or a report does wrong, by a factor, a part or a term (bugs.md 6c, 6j)."""

from __future__ import annotations

from suites.mutants.catalogue.model.norms_and_clip import CLIPPED
from suites.mutants.mutant import Change, Mutant, everywhere

__all__ = ["STEPS_AND_COUNTS"]

_CLIP = "sync.clip(gradients.values(), norm, case.clip)"
_STEP = "        optimizer.step()\n        rank.step.afterwards(rank)"
_LR = "torch.optim.SGD(parameters, lr=case.lr)"


def _step(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.training.step", old=old, new=new),)


def _training(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.training.loop", old=old, new=new),)


STEPS_AND_COUNTS = (
    Mutant(
        name="limit-of-the-norm-never-used",
        stands_for="a limit on the norm that is in the configuration and never reaches the step",
        modes=everywhere(),
        condition="clip>0",
        suite=CLIPPED,
        changes=_training(_CLIP, "pass"),
        kills="update",
        phase="step",
        region="",
        cause="unclipped",
    ),
    Mutant(
        name="warm-up-without-an-end",
        stands_for="a warm-up of the learning rate that never ends",
        modes=everywhere(),
        condition="optimizer=sgd",
        changes=_step(_LR, "torch.optim.SGD(parameters, lr=case.lr * 0.7)"),
        kills="update",
        phase="step",
        region="",
        cause="constant_factor",
    ),
    Mutant(
        name="objective-maximised",
        stands_for="a maximised objective's switch that is left on",
        modes=everywhere(),
        condition="optimizer=sgd",
        changes=_step(_LR, "torch.optim.SGD(parameters, lr=case.lr, maximize=True)"),
        kills="update",
        phase="step",
        region="",
        cause="sign",
    ),
    Mutant(
        name="norm-weights-in-no-parameter-group",
        stands_for="parameter groups that are made by names, with some parameters in none of them",
        modes=everywhere(),
        changes=_step(
            "list(rank.updated.values())",
            "[p for n, p in rank.updated.items() if not n.endswith('norm.weight')]",
        ),
        kills="update",
        phase="step|grad_sync",
        region="*",
        cause="never_updated",
    ),
    Mutant(
        name="finite-step-skipped",
        stands_for="an overflow check of mixed precision that skips a step whose gradients are finite",
        modes=everywhere(),
        condition="steps>1",
        changes=_training(_STEP, "        optimizer.step() if step != 1 else None\n        rank.step.afterwards(rank)"),
        kills="update",
        phase="step",
        region="*",
        cause="step_missing",
    ),
    Mutant(
        name="loss-kept-of-the-last-micro-batch-alone",
        stands_for="a report of the last micro-batch's loss alone, over the tokens of all",
        modes=everywhere(),
        changes=_step("loss += summed.detach()", "loss = summed.detach()"),
        kills="forward",
        phase="loss",
        region="",
        cause="micro_missing",
    ),
    Mutant(
        name="divisor-kept-of-the-last-micro-batch-alone",
        stands_for="a divisor that counts the tokens of the last micro-batch alone",
        modes=everywhere(),
        changes=_step("tokens += weights.sum()", "tokens = weights.sum()"),
        kills="tokens",
        phase="loss|grad_sync",
        region="",
        cause="micro_missing",
    ),
    Mutant(
        name="loss-told-in-bits",
        stands_for="a report in another unit than that of the loss that is trained on",
        modes=everywhere(),
        changes=_training("return (loss / tokens).to(exact)", "return (loss / tokens / math.log(2)).to(exact)"),
        kills="forward",
        alone=True,
        phase="loss",
        region="",
        cause="constant_factor",
    ),
    Mutant(
        name="fused-norm-without-its-bias",
        stands_for="a fused norm that takes no bias, with none added behind it",
        modes=everywhere(),
        condition="norm=layernorm",
        changes=(Change(module="parallel.layers.norm", old="self.bias.to(exact), EPSILON", new="None, EPSILON"),),
        kills="activations",
        phase="forward",
        region="*norm",
        cause="bias_missing",
    ),
    Mutant(
        name="fused-loss-without-smoothing",
        stands_for="a fused loss that ignores the smoothing of the unfused one",
        modes=everywhere(),
        condition="label_smoothing>0",
        suite={"label_smoothing": 0.1},
        changes=(
            Change(
                module="parallel.layers.loss",
                old="spread = smoothing / (vocab - 1) if smoothing else 0.0",
                new="smoothing = spread = 0.0",
            ),
        ),
        kills="forward",
        phase="loss",
        region="",
        cause="smoothing_missing",
    ),
)
