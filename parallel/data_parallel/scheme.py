"""Data parallelism as a scheme: what its words (`reference.features.data_parallel`) replace of a strategy.

Without any of them a strategy is left as it is: one flat sum of all gradients (`parallel.training`).

With `parity=N` ranks that hold the same parameters compare hashes of them inside the program. Before every N-th step's
update, that of the first step included, after its last backward:

    over the weight axis   the parameters that are whole on it
    over the data axes     all parameters; with zero=2|3, and zero=1 with masters, only those that shard= replicates
    over `embedding`       a tied token table, of which the first and the last stage of a pipeline have a copy

A parity check is an all_gather of int64, a number a parameter that the rank holds, over each axis that has any. A hash
that differs ends the run with the parameter and the ranks. Outside of the ranks the check `replicas` compares the same
tensors bit for bit. Source: Megatron-Core `SelfAttention.run_realtime_tests`, which gathers q/k norms' weights in every
forward.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardproof.parallel.communication.collectives import all_gather
from shardproof.parallel.communication.expectation import CallPlace, CallRow
from shardproof.parallel.communication.layout import axis_size
from shardproof.parallel.communication.schedules import TABLE, stages_by_rank
from shardproof.parallel.data_parallel.buckets import Buckets, BucketsByAxis
from shardproof.parallel.data_parallel.fsdp import REPLICAS, Shards, shard_axis
from shardproof.parallel.model.loss_scale import LossScaling
from shardproof.parallel.model.strategy import Rank, Step, Strategy
from shardproof.reference.case import Case

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integers that its bits are."""


def with_parity(strategy: Strategy, case: Case) -> Strategy:
    """The strategy whose ranks compare their replicas; itself with parity=0."""
    if not case.parity:
        return strategy
    replicated = _replicas_by_axis(strategy, case)

    def step(case: Case, plain: Step) -> Step:
        before = strategy.step(case, plain)
        return replace(before, reductions={"parity": _Parity(case, replicated), **before.reductions})

    return replace(strategy, rows=(*strategy.rows, *_rows(replicated)), step=step)


def _rows(replicated: Mapping[str, Sequence[str]]) -> Iterator[CallRow]:
    """Calls of a parity check, a row for each axis."""
    why, times = "hashes of parameters that its ranks hold alike", "-(-steps // parity)"
    for axis, names in replicated.items():
        where = partial(_hashes, axis, frozenset(names))
        yield CallRow(where, "grad_sync", "all_gather", "hashes", why, axis=axis, dtype="int64", times=times)


def _hashes(axis: str, names: frozenset[str], case: Case) -> Iterator[CallPlace]:
    """Every rank of a pipeline that holds any of the parameters."""
    ranks = 2 if axis == "embedding" else axis_size(case, axis)
    for own in stages_by_rank(case):
        if count := sum(any(stage.holds(name) for stage in own) for name in names):
            yield CallPlace(at=own[0].at, values={"hashes": count * ranks})


def _replicas_by_axis(strategy: Strategy, case: Case) -> dict[str, Sequence[str]]:
    """Axis -> the parameters that its ranks hold alike."""
    places = strategy.placements(case)
    sharded = case.zero >= 2 or (case.zero == 1 and case.master != "none")
    data: Sequence[str] = (
        ((REPLICAS,) if case.shard else ()) if sharded else (*strategy.data_axes, *strategy.expert_data_axes)
    )
    dense = [name for name in places if case.data_axis_of(name) not in strategy.expert_data_axes]
    whole = [name for name in dense if strategy.weight_axis not in places[name].axes]
    copied = {"embedding": [TABLE]} if case.table_is_copied else {}
    replicated = {
        axis: [name for name in places if case.data_axis_of(name) == axis] for axis in strategy.expert_data_axes
    }
    return {strategy.weight_axis: whole, **{axis: replicated.get(axis, dense) for axis in data}, **copied}


class _Parity:
    """The comparisons of one rank; called once a step."""

    def __init__(self, case: Case, replicated: Mapping[str, Sequence[str]]) -> None:
        self._every, self._replicated, self._steps = case.parity, replicated, 0

    def __call__(self, rank: Rank) -> None:
        """Raises RuntimeError for a parameter whose replicas differ."""
        step, self._steps = self._steps, self._steps + 1
        if step % self._every:
            return
        for name, replicated in self._replicated.items():
            names = [one for one in replicated if one in rank.parameters]
            if not names or rank.mesh.axis(name).size == 1:
                continue
            axis = rank.mesh.axis(name)
            hashes = torch.stack([bits_hash(rank.parameters[one]) for one in names])
            every = all_gather(hashes, axis, dim=0).view(axis.size, -1)
            if rank.has_numbers and not bool((every == every[0]).all()):
                self._differ(names, axis.ranks, every, step)

    def _differ(self, names: Sequence[str], ranks: Sequence[int], every: Tensor, step: int) -> None:
        place = int((every != every[0]).any(0).nonzero()[0])
        odd = [ranks[int(index)] for index in (every[:, place] != every[0, place]).nonzero()]
        raise RuntimeError(f"parity: before step {step} {names[place]} of ranks {odd} is not that of rank {ranks[0]}")


def bits_hash(tensor: Tensor) -> Tensor:
    """A number [] of the tensor's bits and their places, int64: another one if a single element differs."""
    words = tensor.detach().contiguous().flatten().view(_WORDS[tensor.element_size()]).long()
    odd = 2 * torch.arange(len(words), device=words.device) + 1
    return (words * odd * 6364136223846793005).sum()


AFTER = ("context", "experts", "latent", "pipeline", "prediction")


def apply(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the gradients, the optimizer and the comparisons of replicas of this case."""
    return with_parity(_with_shared_gradients(strategy, case), case)


def _with_shared_gradients(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the gradients and the optimizer of this case's data parallelism; itself without any word."""
    if not case.shares_gradients:
        return strategy

    def step(case: Case, plain: Step) -> Step:
        gradients: Shards | Buckets | BucketsByAxis = Shards(case) if case.zero >= 2 else Buckets(case)
        if isinstance(gradients, Buckets) and strategy.expert_data_axes:
            gradients = BucketsByAxis(
                {case.data_axis: gradients, **{axis: Buckets(case, axis) for axis in strategy.expert_data_axes}}
            )
        return _held_by(gradients, case, strategy.step(case, plain))

    return replace(
        strategy, norm_axes=(*strategy.norm_axes, shard_axis(case)) if case.zero else strategy.norm_axes, step=step
    )


def _held_by(gradients: Shards | Buckets | BucketsByAxis, case: Case, plain: Step) -> Step:
    """A step whose gradients lie in these buckets or shards, and whose optimizer steps what they give it."""
    return replace(
        plain,
        loss_scale=None if case.scaler == "none" else LossScaling(case),
        prepare=lambda rank: gradients.prepare(plain.prepare(rank)),
        reductions={**plain.reductions, "data": gradients.reduce, "trained": gradients.hand_over},
        partial=lambda _rank: gradients.gradients(),
        afterwards=gradients.afterwards,
    )
