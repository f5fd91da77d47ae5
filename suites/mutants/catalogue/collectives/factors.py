"""Factors: a scale that does not follow the data, a mean where a sum belongs, a sum counted twice (bugs.md 6c)."""

from __future__ import annotations

from suites.mutants.mutant import SPLIT, WHOLE, Change, Mutant, everywhere

__all__ = ["FACTORS"]

_SUM = "summed = (losses * weights).sum()"
_BACK = "summed.backward()"
_TOKENS = "tokens += weights.sum()"
_SYNCED = "backward|grad_sync"
_LAST = "head|final_norm|embedding.*|layers.*"
"""Whichever parameter comes last: a factor on all gradients begins with it."""


def _step(old: str, new: str) -> Change:
    return Change(module="parallel.training.step", old=old, new=new)


def _training(old: str, new: str) -> Change:
    return Change(module="parallel.training.loop", old=old, new=new)


FACTORS = (
    Mutant(
        name="weight-gradients-averaged",
        stands_for="B-31: InternEvo 76be8c2, the reduction of weight gradients mixed up SUM and AVG (decision G2)",
        modes={"isp": ""},
        changes=(
            Change(
                module="parallel.weights.prefetch",
                old="return start_reduce_scatter(full, self.gathers.axis, dim=0)",
                new='return start_reduce_scatter(full, self.gathers.axis, dim=0, op="avg")',
            ),
            Change(
                module="parallel.weights.flat",
                old="own = reduce_scatter(buffer.flatten(), axis, dim=0)",
                new='own = reduce_scatter(buffer.flatten(), axis, dim=0, op="avg")',
            ),
        ),
        kills="parameter_gradients",
        phase="backward",
        region="layers.*",
        cause="averaged",
    ),
    Mutant(
        name="divided-by-data-ranks-again",
        stands_for="B-33, B-32: DeepSpeed #4957 and #5555, gradients scaled in the hook and in the reduction",
        modes=everywhere(),
        condition="dp>1",
        changes=(_training("for axis in strategy.mean_axes)", 'for axis in (*strategy.mean_axes, "dp"))'),),
        kills="parameter_gradients",
        phase=_SYNCED,
        region=_LAST,
        cause="averaged",
    ),
    Mutant(
        name="loss-scaled-by-a-group-that-shares-data",
        stands_for="B-35: Megatron #906 and #673, the loss is scaled by a group and the mean does not know of it",
        modes=everywhere(),
        changes=(_step(_BACK, '(summed * rank.mesh.axis("tp").size).backward()'),),
        kills="activation_gradients",
        phase="backward",
        region="head|",
        cause="summed_twice",
    ),
    Mutant(
        name="divided-by-own-tokens",
        stands_for="B-34: DeepSpeed #6546, torchtitan #1551, the divisor follows the group and not the data",
        modes=everywhere(),
        condition="dp>1",
        changes=(
            Change(
                module="parallel.communication.gradients",
                old="return pair[0], pair[1]",
                new="return pair[0], tokens.double()",
            ),
        ),
        kills="replicas",
        phase="loss|grad_sync",
        region="",
        cause="local_count",
    ),
    Mutant(
        name="mean-of-means",
        stands_for="Megatron #7452-3, torchtitan #2206: micro-batches of uneven valid tokens count alike",
        modes=everywhere(),
        changes=(_step(_SUM, f"{_SUM} / weights.sum()"), _step(_TOKENS, "tokens += 1")),
        kills="forward",
        phase="loss",
        region="",
        cause="unequal_shares|local_count",
    ),
    Mutant(
        name="accumulated-gradient-rescaled",
        stands_for="B-38: torchtitan #1732, the scale is applied to the accumulator and not to the increment",
        modes=everywhere(),
        changes=(
            _step(
                _BACK,
                f"{_BACK}\n        for parameter in rank.parameters.values():\n"
                "            parameter.grad.div_(case.micro)",
            ),
        ),
        kills="parameter_gradients",
        phase=_SYNCED,
        region=_LAST,
        cause="unequal_shares",
    ),
    Mutant(
        name="partial-gradients-averaged",
        stands_for="B-41: gpt-neox 651e24eb, InternEvo (decision G1): partial sums of norms are averaged",
        modes=everywhere("", (*SPLIT, "isp")) | everywhere("qk_norm=true", WHOLE),
        changes=(_step("op=strategy.partial_op)", 'op="avg")'),),
        kills="parameter_gradients",
        phase=_SYNCED,
        region="final_norm|layers.*.attention.?_norm",
        cause="averaged",
    ),
    Mutant(
        name="unscaled-without-a-scale",
        stands_for="B-42: DeepSpeed #7839, the step divides by a loss scale that nobody multiplied",
        modes=everywhere(),
        changes=(
            _training(
                "sync.clip(gradients.values(), norm, case.clip)",
                "sync.clip(gradients.values(), norm, case.clip)\n        for gradient in gradients.values():\n"
                "            gradient.div_(65536)",
            ),
        ),
        kills="update",
        phase="step",
        region="",
        cause="scaled_down",
    ),
    Mutant(
        name="reported-loss-summed-again",
        stands_for="B-40: SkyRL #1420, a metric that is complete already is summed over the group once more",
        modes=everywhere(),
        changes=(_training("return (loss / tokens)", "return (loss * mesh.axis(strategy.weight_axis).size / tokens)"),),
        kills="forward",
        alone=True,
        phase="loss",
        region="",
        cause="summed_twice",
    ),
    Mutant(
        name="each-data-rank-reports-its-own-loss",
        stands_for="B-40, torchtitan #1750: metric groups and gradient groups mixed up, ranks report unequal losses",
        modes=everywhere(),
        condition="dp>1",
        changes=(
            _training(
                "return (loss / tokens).to(exact)",
                "return (loss / tokens * (1 + mesh.axis('dp').rank * 2**-50)).to(exact)",
            ),
        ),
        kills="replicas",
        alone=True,
        phase="loss",
        region="",
        cause="replicas_drift",
    ),
)
