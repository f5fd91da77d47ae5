"""What counts how often, and what is moved: more of bugs.md 6c, 6d and 6h, in other places of the code."""

from __future__ import annotations

from suites.mutants.catalogue.model.norms_and_clip import CLIPPED
from suites.mutants.mutant import TENSOR, Change, Mutant, everywhere

__all__ = ["SHARES_AND_UPDATES"]

_BACK = "summed.backward()"
_SUM = "summed = (losses * weights).sum()"
_TOKENS = "tokens += weights.sum()"
_DIVIDED = "gradient.div_(tokens * shares)"
_NORM = "total = torch.stack(squares).sum()"
_CLIP = "sync.clip(gradients.values(), norm, case.clip)"
_STEP = "        optimizer.step()\n        rank.step.afterwards(rank)"
_ZERO = "        optimizer.zero_grad()\n"
_DATA = "    for axis in rank.strategy.data_axes:\n"
_SGD = "torch.optim.SGD(parameters, lr=case.lr)"
_LOSS = 'outcome[f"loss/{step}"], norm, outcome[f"tokens/{step}"] = _synchronise(rank, loss, tokens)'
_SYNCED = "backward|grad_sync"
_WHEN = "step|grad_sync"
_LAST = "head|final_norm|embedding.*|layers.*"


def _step(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.training.step", old=old, new=new),)


def _training(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.training.loop", old=old, new=new),)


SHARES_AND_UPDATES = (
    Mutant(
        name="first-micro-batch-counted-twice",
        stands_for="B-89's kin: a micro-batch that is added before the buffer is cleared and again after it",
        modes=everywhere(),
        changes=_step(_BACK, "(summed * (1 + (micro == 0))).backward()"),
        kills="parameter_gradients",
        phase=_SYNCED + "|backward",
        region=f"{_LAST}|",
        cause="unequal_shares|constant_factor",
    ),
    Mutant(
        name="one-data-rank-alone-in-the-sum",
        stands_for="verl #7493: gradients of the other data ranks never reach the sum",
        modes=everywhere(),
        condition="dp>1",
        changes=_step(
            _DATA,
            "    for gradient in gradients.values():\n        gradient.mul_(mesh.axis('dp').rank == 0)\n" + _DATA,
        ),
        kills="parameter_gradients",
        phase=_SYNCED,
        region=_LAST,
        cause="not_summed|micro_missing",
    ),
    Mutant(
        name="divided-by-micro-batches-again",
        stands_for="accelerate, transformers 4.46: the loss is divided by the steps of accumulation that it counts",
        modes=everywhere(),
        changes=_step(_BACK, "(summed / case.micro).backward()"),
        kills="activation_gradients",
        phase="backward",
        region="head|",
        cause="constant_factor",
    ),
    Mutant(
        name="every-row-has-its-own-mean",
        stands_for="verl, TRL: the mean of the means of sequences where the mean of tokens is meant",
        modes=everywhere(),
        condition="packed=false",
        changes=(
            *_step(
                _SUM,
                "means = (losses * weights).sum(strategy.sequence_dim) / weights.sum(strategy.sequence_dim)\n"
                "        summed = means.sum()",
            ),
            *_step(_TOKENS, "tokens += len(means)"),
        ),
        kills="forward",
        phase="loss",
        region="",
        cause="local_count",
    ),
    Mutant(
        name="embedding-gradient-times-two",
        stands_for="B-83's kin: one parameter whose gradient is added for each of two names, tied or not",
        modes=everywhere(),
        changes=_training(
            _DIVIDED,
            f"{_DIVIDED}\n    rank.gradients()['embedding.tokens.weight'].mul_(2)",
        ),
        kills="parameter_gradients",
        phase=_SYNCED,
        region="embedding*|head",
        cause="constant_factor",
    ),
    Mutant(
        name="gradient-of-a-weight-never-computed",
        stands_for="B-94's kin: a custom backward that returns zeros for a weight",
        modes=everywhere("", TENSOR),
        changes=(
            Change(
                module="parallel.layers.linear",
                old="weight_gradient(ctx.holder, grad, total.wait())",
                new="0 * weight_gradient(ctx.holder, grad, total.wait())",
            ),
        ),
        kills="parameter_gradients",
        phase="backward",
        region="*",
        cause="zero|tied_part",
    ),
    Mutant(
        name="divided-by-no-tokens-on-some-ranks",
        stands_for="Megatron #7452-3's kin: a rank whose tokens are all masked divides by zero",
        modes=everywhere(),
        changes=_training(_DIVIDED, "gradient.div_(tokens * shares * (mesh.axis(strategy.weight_axis).rank == 0))"),
        kills="parameter_gradients|replicas",
        phase=_SYNCED,
        region="*",
        cause="nan",
    ),
    Mutant(
        name="loss-of-the-step-before-reported",
        stands_for="a log that is one step late",
        modes=everywhere(),
        changes=_training(
            _LOSS,
            f'{_LOSS}\n        now = outcome[f"loss/{{step}}"]\n'
            '        outcome[f"loss/{step}"], rank.model.late = getattr(rank.model, "late", now), now',
        ),
        kills="forward",
        alone=True,
        phase="loss",
        region="",
        cause="stale",
    ),
    Mutant(
        name="clipped-by-the-squared-norm",
        stands_for="a norm whose root is taken where it is reported and not where it is used",
        modes=everywhere(),
        suite=CLIPPED,
        changes=_training(_CLIP, _CLIP.replace("norm,", "norm**2,")),
        kills="update",
        phase="step",
        region="*",
        cause="clipped_otherwise",
    ),
    Mutant(
        name="norm-counts-a-tied-table-twice",
        stands_for="B-46's kin: a shared parameter counts once for each of its names",
        modes=everywhere(),
        changes=(
            Change(
                module="parallel.communication.gradients",
                old=_NORM,
                new="squares += squares[:1]\n    " + _NORM,
            ),
        ),
        kills="gradient_norm",
        alone=True,
        phase=_WHEN,
        region="",
        cause="norm_counts_replicas",
    ),
    Mutant(
        name="biases-learn-at-half-the-rate",
        stands_for="layer-wise rates: a group of parameters with a rate of its own",
        modes=everywhere(),
        condition="optimizer=sgd bias=true",
        changes=_step(
            _SGD,
            "torch.optim.SGD([{'params': [p], 'lr': case.lr / (1 + (p.dim() == 1))} for p in parameters], lr=case.lr)",
        ),
        kills="update",
        phase="step",
        region="*",
        cause="constant_factor",
    ),
    Mutant(
        name="norms-keep-their-gradients",
        stands_for="B-91: a list of parameters whose gradients are cleared, made before some were added",
        modes=everywhere(),
        changes=_training(
            _ZERO,
            "        for name, parameter in rank.parameters.items():\n            if 'norm' not in name:\n"
            "                parameter.grad = None\n",
        ),
        kills="gradient_norm|update",
        phase="step|grad_sync|backward",
        region="*",
        cause="not_zeroed",
    ),
    Mutant(
        name="step-taken-on-the-first-rank-alone",
        stands_for="B-49's kin: a step behind the condition that only one rank meets",
        modes=everywhere(),
        changes=_training(
            _STEP,
            "        optimizer.step() if rank.mesh.axis(strategy.weight_axis).rank == 0 else None\n"
            "        rank.step.afterwards(rank)",
        ),
        kills="update|replicas",
        phase="step",
        region="*",
        cause="never_updated",
    ),
    Mutant(
        name="gradients-summed-in-float32",
        stands_for="B-98's kin: a communication hook that compresses what is sent",
        modes=everywhere(),
        condition="dp>1",
        changes=(
            Change(
                module="parallel.communication.gradients",
                old="summed = all_reduce(torch.cat([gradient.flatten() for gradient in group]), axis, op=op)",
                new="summed = all_reduce(torch.cat([gradient.flatten() for gradient in group]).float(), axis, op=op)",
            ),
        ),
        kills="ledger",
        phase=_SYNCED,
        region="*",
        cause="wrong_payload",
    ),
)
