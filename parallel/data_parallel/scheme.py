"""Data parallelism as a scheme: what its words (`reference.features.data_parallel`) replace of a strategy.

Without any of them a strategy is left as it is: one flat sum of all gradients (`parallel.training.step`).
"""

from dataclasses import replace

from parallel.data_parallel.buffers import Buckets
from parallel.data_parallel.calls import shard_axis
from parallel.data_parallel.gathered import Shards
from parallel.data_parallel.parity import with_parity
from parallel.data_parallel.scaling import LossScaling
from parallel.data_parallel.together import Together
from parallel.model.strategy import Step, Strategy
from reference.case import Case

AFTER = ("context", "experts", "latent", "pipeline", "prediction")


def applied(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the gradients, the optimizer and the comparisons of replicas of this case."""
    return with_parity(_with_shared_gradients(strategy, case), case)


def _with_shared_gradients(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the gradients and the optimizer of this case's data parallelism; itself without any word."""
    if not case.shares_gradients:
        return strategy

    def step(case: Case, plain: Step) -> Step:
        gradients: Shards | Buckets | Together = Shards(case) if case.zero >= 2 else Buckets(case)
        if isinstance(gradients, Buckets) and strategy.apart:
            gradients = Together({case.data_axis: gradients, **{axis: Buckets(case, axis) for axis in strategy.apart}})
        return _held_by(gradients, case, strategy.step(case, plain))

    return replace(
        strategy, norm_axes=(*strategy.norm_axes, shard_axis(case)) if case.zero else strategy.norm_axes, step=step
    )


def _held_by(gradients: Shards | Buckets | Together, case: Case, plain: Step) -> Step:
    """A step whose gradients lie in these buckets or shards, and whose optimizer steps what they give it."""
    return replace(
        plain,
        loss_scale=None if case.scaler == "none" else LossScaling(case),
        prepare=lambda rank: gradients.prepare(plain.prepare(rank)),
        reductions={**plain.reductions, "data": gradients.reduce, "trained": gradients.hand_over},
        partial=lambda _rank: gradients.gradients(),
        afterwards=gradients.afterwards,
    )
