"""Data parallelism as a scheme: what its words (`reference.features.data_parallel`) replace in a strategy.

Without any of these words a strategy keeps its one flat sum of all gradients (`parallel.training`).

With `parity=N` ranks that hold the same parameters compare hashes of them inside the program. They do so in the first
step and in every N-th step after it, between the last backward and the update:

    over the weight axis   the parameters that are whole on it
    over the data axes     all parameters; with zero=2|3, and zero=1 with masters, only those that shard= replicates
    over `embedding`       a tied token table, of which the first and the last stage of a pipeline have a copy

A parity check is one all_gather over each axis with such parameters, of an int64 hash for each one that the rank holds.
A hash that differs ends the run, with an error that names the parameter and the ranks. The check `replicas` compares
the same tensors bit for bit after the run. Source: Megatron-Core `SelfAttention.run_realtime_tests`, which gathers q/k
norms' weights in every forward.
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
"""Bytes of an element -> the integer dtype of the same size."""


def with_parity(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with a parity check before updates; unchanged with parity=0."""
    if not case.parity:
        return strategy
    replicated = _replicas_by_axis(strategy, case)

    def step(case: Case, plain: Step) -> Step:
        before = strategy.step(case, plain)
        return replace(before, reductions={"parity": _Parity(case, replicated), **before.reductions})

    return replace(strategy, rows=(*strategy.rows, *_rows(replicated)), step=step)


def _rows(replicated: Mapping[str, Sequence[str]]) -> Iterator[CallRow]:
    """The calls of parity checks: a row for each axis."""
    why, times = "hashes of parameters that its ranks hold alike", "-(-steps // parity)"
    for axis, names in replicated.items():
        where = partial(_hashes, axis, frozenset(names))
        yield CallRow(where, "grad_sync", "all_gather", "hashes", why, axis=axis, dtype="int64", times=times)


def _hashes(axis: str, names: frozenset[str], case: Case) -> Iterator[CallPlace]:
    """The hashes of each rank of a pipeline that holds any of the parameters."""
    ranks = 2 if axis == "embedding" else axis_size(case, axis)
    for own in stages_by_rank(case):
        if count := sum(any(stage.holds(name) for stage in own) for name in names):
            yield CallPlace(at=own[0].at, values={"hashes": count * ranks})


def _replicas_by_axis(strategy: Strategy, case: Case) -> dict[str, Sequence[str]]:
    """Axis -> the parameters that are equal on all its ranks."""
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
    """The parity check of one rank; called once a step."""

    def __init__(self, case: Case, replicated: Mapping[str, Sequence[str]]) -> None:
        self._every, self._replicated, self._steps = case.parity, replicated, 0

    def __call__(self, rank: Rank) -> None:
        """Raises RuntimeError for a parameter that differs between ranks."""
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
    """An int64 hash [] of the tensor's bits and their places: it changes whenever one element changes."""
    words = tensor.detach().contiguous().flatten().view(_WORDS[tensor.element_size()]).long()
    odd = 2 * torch.arange(len(words), device=words.device) + 1
    return (words * odd * 6364136223846793005).sum()


AFTER = ("context", "experts", "latent", "pipeline", "prediction")


def apply(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with this case's data parallelism and its parity checks."""
    return with_parity(_with_shared_gradients(strategy, case), case)


def _with_shared_gradients(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with this case's way to sum gradients and to step; unchanged if the case names none."""
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
    """A step with gradients in buckets or shards, which give the optimizer the tensors to step."""
    return replace(
        plain,
        loss_scale=None if case.scaler == "none" else LossScaling(case),
        prepare=lambda rank: gradients.prepare(plain.prepare(rank)),
        reductions={**plain.reductions, "data": gradients.reduce, "trained": gradients.hand_over},
        partial=lambda _rank: gradients.gradients(),
        afterwards=gradients.afterwards,
    )
