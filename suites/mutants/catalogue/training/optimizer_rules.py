"""Rules of an optimizer that are not the dense model's: moments, decay, momentum, clipping (bugs.md 6d, 6j)."""

from __future__ import annotations

from suites.mutants.catalogue.model.norms_and_clip import CLIPPED
from suites.mutants.catalogue.training.optimizer_and_loop import ADAMW
from suites.mutants.mutant import TENSOR, Change, Mutant, everywhere

__all__ = ["OPTIMIZER_RULES"]

_ADAMW = "torch.optim.AdamW(parameters, lr=case.lr, weight_decay=_WEIGHT_DECAY)"
_SGD = "torch.optim.SGD(parameters, lr=case.lr)"
_ZERO = "        optimizer.zero_grad()\n"
_STEP = "        optimizer.step()\n        if rank.proves:"
_CLIP = "sync.clip(gradients.values(), norm, case.clip)"
_MADE = "optimizer = rank.step.optimizer(rank)"


def _step(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.training.step", old=old, new=new),)


def _training(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.training.loop", old=old, new=new),)


OPTIMIZER_RULES = (
    Mutant(
        name="moments-begin-anew-in-every-step",
        stands_for="Megatron #7452-12, transformers #48569: the optimizer's state is not loaded, and begins anew",
        modes=everywhere(),
        suite=ADAMW,
        changes=_training(_ZERO, f"{_ZERO}        optimizer.state.clear()\n"),
        kills="update",
        phase="step",
        region="",
        cause="moments_reset",
    ),
    Mutant(
        name="sgd-that-decays-its-weights",
        stands_for="torchtitan #1341's kin: a weight decay that one of two configurations has",
        modes=everywhere(),
        condition="optimizer=sgd",
        changes=_step(_SGD, "torch.optim.SGD(parameters, lr=case.lr, weight_decay=0.01)"),
        kills="update",
        phase="step",
        region="",
        cause="decay_added",
    ),
    Mutant(
        name="adamw-with-a-decay-of-a-tenth",
        stands_for="torchtitan #1341's kin: two defaults of one library, 0.01 and 0.1",
        modes=everywhere(),
        suite=ADAMW,
        changes=_step("_WEIGHT_DECAY = 0.01", "_WEIGHT_DECAY = 0.1"),
        kills="update",
        phase="step",
        region="",
        cause="decay_added",
    ),
    Mutant(
        name="decay-that-joins-the-gradient",
        stands_for="Loshchilov & Hutter 2019: the decay is added to the gradient and goes through the moments",
        modes=everywhere(),
        suite=ADAMW,
        changes=_step(_ADAMW, _ADAMW.replace("AdamW", "Adam")),
        kills="update",
        phase="step",
        region="",
        cause="decay_in_gradient",
    ),
    Mutant(
        name="decay-that-spares-vectors",
        stands_for="Megatron get_param_groups: parameters of one dim are in a group without weight decay",
        modes=everywhere(),
        suite=ADAMW,
        changes=_training(
            _MADE,
            f"{_MADE}\n    optimizer.param_groups[0]['params'] = [p for p in rank.parameters.values() if p.dim() > 1]\n"
            "    optimizer.add_param_group(\n"
            "        {'params': [p for p in rank.parameters.values() if p.dim() < 2], 'weight_decay': 0.0}\n    )",
        ),
        kills="update",
        phase="step",
        region="*",
        cause="decay_missing",
    ),
    Mutant(
        name="second-beta-of-gpt-3",
        stands_for="0.95 of GPT-3's recipe where torch's default 0.999 is meant",
        modes=everywhere(),
        suite=ADAMW,
        changes=_step(_ADAMW, _ADAMW.replace("lr=case.lr", "lr=case.lr, betas=(0.9, 0.95)")),
        kills="update",
        phase="step",
        region="",
        cause="other_beta",
    ),
    Mutant(
        name="first-beta-of-one-half",
        stands_for="Adam with beta 0.5, as generative adversarial networks are trained",
        modes=everywhere(),
        suite=ADAMW,
        changes=_step(_ADAMW, _ADAMW.replace("lr=case.lr", "lr=case.lr, betas=(0.5, 0.999)")),
        kills="update",
        phase="step",
        region="",
        cause="other_beta",
    ),
    Mutant(
        name="adamw-epsilon-for-half-precision",
        stands_for="1e-5, an epsilon for half precision, where 1e-8 is meant",
        modes=everywhere(),
        suite=ADAMW,
        changes=_step(_ADAMW, _ADAMW.replace("lr=case.lr", "lr=case.lr, eps=1e-5")),
        kills="update",
        phase="step",
        region="*",
        cause="other_epsilon",
    ),
    Mutant(
        name="every-step-corrected-as-the-first",
        stands_for="a resumed run whose moments are loaded and whose step count is not",
        modes=everywhere(),
        suite=ADAMW,
        changes=_training(
            _ZERO, f"{_ZERO}        for kept in optimizer.state.values():\n            kept['step'].zero_()\n"
        ),
        kills="update",
        phase="step",
        region="",
        cause="bias_correction",
    ),
    Mutant(
        name="sgd-with-momentum-of-nine-tenths",
        stands_for="a default of the optimizer's constructor that nobody has set to 0",
        modes=everywhere(),
        condition="optimizer=sgd",
        changes=_step(_SGD, "torch.optim.SGD(parameters, lr=case.lr, momentum=0.9)"),
        kills="update",
        phase="step",
        region="",
        cause="momentum_added",
    ),
    Mutant(
        name="elements-clipped-one-by-one",
        stands_for="clip_grad_value_ where clip_grad_norm_ is meant",
        modes=everywhere(),
        suite=CLIPPED,
        changes=_training(_CLIP, "torch.nn.utils.clip_grad_value_(list(rank.parameters.values()), case.clip / 100)"),
        kills="update",
        phase="step",
        region="*",
        cause="clipped_otherwise",
    ),
    Mutant(
        name="tensors-clipped-one-by-one",
        stands_for="bugs.md 7-38's kin: every parameter is clipped by the norm of its own gradient",
        modes=everywhere("", TENSOR),
        suite=CLIPPED,
        changes=_training(
            _CLIP,
            "for one in gradients.values():\n                sync.clip([one], one.square().sum().sqrt(), case.clip)",
        ),
        kills="update",
        phase="step",
        region="*",
        cause="clipped_otherwise",
    ),
)
