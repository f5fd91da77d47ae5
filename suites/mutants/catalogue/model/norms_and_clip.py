"""The gradient norm and clipping: what is counted, over which ranks, and who is clipped (bugs.md 6d)."""

from __future__ import annotations

from suites.mutants.mutant import Change, Mutant, Words, everywhere

__all__ = ["NORMS_AND_CLIP"]

CLIPPED: Words = {"lr": 1.0, "optimizer": "sgd", "clip": 0.05}
"""What the property of a binding clip fixes."""
LOOSE: Words = {"lr": 0.1, "optimizer": "sgd", "clip": 1000.0}
"""What the property of a clip that does not bind fixes."""
_COUNTED = "axis.name in places[name].axes"
_NORM = "    for axis in axes:\n        total = all_reduce(total, axis)\n    return total.sqrt()"
_CLIP = "sync.clip(gradients.values(), norm, case.clip)"
_WHEN = "step|grad_sync"


def _counting(words: str) -> tuple[Change, ...]:
    return (Change(module="parallel.communication.gradients", old=_COUNTED, new=words),)


def _clipping(new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.training.loop", old=_CLIP, new=new),)


NORMS_AND_CLIP = (
    Mutant(
        name="norm-counts-replicas",
        stands_for="B-46: NeMo-RL #3788, ROCm TE #715, a norm inflated 1.52 times because replicas count on every rank",
        modes=everywhere(),
        changes=_counting("True"),
        kills="gradient_norm",
        alone=True,
        phase=_WHEN,
        region="",
        cause="norm_counts_replicas",
    ),
    Mutant(
        name="norm-omits-split-biases",
        stands_for="B-45, B-44: Megatron #7452-8 and #5916, split one-dimensional parameters without the tag",
        modes=everywhere(),
        condition="bias=true",
        changes=_counting(f'({_COUNTED} and not name.endswith("bias"))'),
        kills="gradient_norm",
        alone=True,
        phase=_WHEN,
        region="",
        cause="norm_counts_few",
    ),
    Mutant(
        name="norm-misses-a-renamed-weight",
        stands_for="B-50: InternEvo 9445faf, tags by a stale list of names",
        modes=everywhere(),
        condition="fuse_mlp=true",
        changes=_counting(f'({_COUNTED} and "w13" not in name)'),
        kills="gradient_norm",
        alone=True,
        phase=_WHEN,
        region="",
        cause="norm_counts_few",
    ),
    Mutant(
        name="norm-of-one-rank",
        stands_for="B-47: torchtitan #649, gpt-neox #297, a norm that is not reduced over the ranks",
        modes=everywhere(),
        changes=(Change(module="parallel.communication.gradients", old=_NORM, new="    return total.sqrt()"),),
        kills="replicas",
        phase=_WHEN,
        region="",
        cause="missing_call|norm_counts_few",
    ),
    Mutant(
        name="norm-rooted-before-the-sum",
        stands_for="B-26: PyTorch #163193, a norm taken of partial sums before they are reduced",
        modes=everywhere(),
        changes=(
            Change(
                module="parallel.communication.gradients",
                old=_NORM,
                new=_NORM.replace("for", "total = total.sqrt()\n    for", 1).replace('total.sqrt()"', 'total"'),
            ),
        ),
        kills="gradient_norm",
        alone=True,
        phase=_WHEN,
        region="",
        cause="norm_of_norms",
    ),
    Mutant(
        name="norm-of-an-earlier-step",
        stands_for="B-51: ColossalAI d99b2c961, a cached norm reused",
        modes=everywhere(),
        changes=(
            Change(
                module="parallel.training.loop",
                old='outcome[f"grad_norm/{step}"] = norm',
                new='norm = outcome[f"grad_norm/{step}"] = outcome.get("grad_norm/0", norm)',
            ),
        ),
        kills="gradient_norm",
        alone=True,
        phase=_WHEN,
        region="",
        cause="stale",
    ),
    Mutant(
        name="clipped-on-the-first-rank-only",
        stands_for="B-49: BLOOM-176B, DeepSpeed #1801, clipping on some ranks: norms drift for 15 days unseen",
        modes=everywhere(),
        suite=CLIPPED,
        changes=_clipping(
            _CLIP.replace(
                "gradients.values()", "[] if rank.mesh.axis(strategy.weight_axis).rank else gradients.values()"
            )
        ),
        kills="update|replicas",
        phase="step",
        region="*",
        cause="clipped_otherwise",
    ),
    Mutant(
        name="clipped-by-own-norm",
        stands_for="bugs.md 7-38: clipping by the norm of one rank's own gradients",
        modes=everywhere(),
        suite=CLIPPED,
        changes=_clipping(
            _CLIP.replace("norm,", "torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt(),")
        ),
        kills="update|replicas",
        phase="step",
        region="*",
        cause="clipped_otherwise",
    ),
    Mutant(
        name="clip-scales-up",
        stands_for="clip-only bugs (DeepSpeed #5411, #8154): a norm below the threshold is scaled as well",
        modes=everywhere(),
        suite=LOOSE,
        changes=(
            Change(
                module="parallel.communication.gradients",
                old="factor = (largest / (total + 1e-6)).clamp(max=1.0)",
                new="factor = largest / (total + 1e-6)",
            ),
        ),
        kills="update",
        phase="step",
        region="*",
        cause="clip_scales_up",
    ),
)
