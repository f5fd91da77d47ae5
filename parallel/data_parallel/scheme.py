"""Data parallelism as a scheme: what its words (`reference.features.data_parallel`) replace of a strategy.

Without any of them a strategy is left as it is: one flat sum of all gradients (`parallel.training.step`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from shardproof.parallel.data_parallel.buffers import Buckets
from shardproof.parallel.data_parallel.calls import shard_axis
from shardproof.parallel.data_parallel.gathered import Shards
from shardproof.parallel.data_parallel.parity import with_parity
from shardproof.parallel.model.loss_scale import LossScaling
from shardproof.parallel.model.strategy import Rank, Step, Strategy
from shardproof.reference.case import Case

_Held = TypeVar("_Held")


class Together:
    """Buffers of parameters whose copies lie on different ranks, as one: experts' and all others'.

    `buckets` are the buffers by the mesh axis over which their parameters have copies.
    """

    def __init__(self, buckets: Mapping[str, Buckets]) -> None:
        self._buckets = buckets

    def prepare(self, rank: Rank) -> Rank:
        """Each lays out its parameters, and has the optimizer step what it shall."""
        made = {axis: buckets.prepare(rank.of(axis)) for axis, buckets in self._buckets.items()}

        def merged(part: Callable[[Rank], Mapping[str, _Held]]) -> dict[str, _Held]:
            return {name: part(made[rank.case.data_axis_of(name)])[name] for name in rank.parameters}

        return replace(
            rank,
            parameters=merged(lambda one: one.parameters),
            places=merged(lambda one: one.places),
            updated=merged(lambda one: one.updated),
            updated_places=merged(lambda one: one.updated_places),
        )

    def reduce(self, rank: Rank) -> None:
        """The sums over the ranks with copies are complete."""
        for axis, buckets in self._buckets.items():
            buckets.reduce(rank.of(axis))

    def gradients(self) -> Mapping[str, Tensor]:
        """Every parameter's place in its buffer."""
        return {name: place for buckets in self._buckets.values() for name, place in buckets.gradients().items()}

    def hand_over(self, rank: Rank) -> None:
        """Give the optimizer's tensors their gradients, in their dtype."""
        for axis, buckets in self._buckets.items():
            buckets.hand_over(rank.of(axis))

    def afterwards(self, rank: Rank) -> None:
        """Round masters into the parameters, and gather what ranks share."""
        for axis, buckets in self._buckets.items():
            buckets.afterwards(rank.of(axis))


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
