"""Replicas that differ although ranks must hold the same tensor.

Either each holds a term of a sum or mean that was never taken, or some are not finite, or all differ in last bits only.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from shardproof.harness.diagnosing.causes.cause import Cause, claim_cause
from shardproof.harness.diagnosing.causes.hypothesis import OF_TOKENS, STATE, VALUES, Failure, Hypothesis
from shardproof.harness.diagnosing.causes.places import blocks_of
from shardproof.harness.diagnosing.causes.proofs import (
    FEWEST_OF_A_FACTOR,
    Explained,
    Near,
    NotFinite,
    count_independent,
    share_left,
)
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.protocols import Axes
from shardproof.harness.verdicts.facts import state_fact

LITTLE = 1e-9
"""A tensor below this share of the largest of its kind is rounding, and shows no cause."""
_NEAR = 1e-6
"""With few numbers, their sum or mean must be the truth within this share; with more, within their rounding."""


def from_replicas(failure: Failure) -> list[Cause]:
    """The causes of the first torn tensor whose truth is not mere rounding beside others of its kind."""
    evidence = failure.evidence
    axes = {axis: evidence.claims.axes[axis] for axis in split_axes(evidence.run.case) if axis in evidence.claims.axes}
    torn = [name for name in failure.alike if name not in evidence.run.tensors] if failure.torn else []
    sizes = {name: float(evidence.truth.tensors[name].double().norm()) for name in torn}
    for name in torn:
        truth, blocks = evidence.truth.tensors[name], blocks_of(evidence.run, name)
        causes = _not_finite(blocks, truth, name) or _guess_drift(blocks, truth, name)
        causes = causes or never_reduced(blocks, truth, axes, name)
        if causes or sizes[name] > LITTLE * max(sizes.values()):
            return causes
    return []


def never_reduced(blocks: Mapping[int, Sequence[Block]], truth: Tensor, axes: Axes, name: str = "") -> list[Cause]:
    """Whether the ranks' values of an element add up to its truth, or average to it, in every group of an axis.

    The axes are tried one by one, then all ranks together.
    """
    for axis, lists in {**axes, "all ranks": (tuple(blocks),)}.items():
        groups = [members for ranks in lists if (members := [rank for rank in ranks if rank in blocks])]
        rows = [row for ranks in groups for row in _beside_sums([blocks[rank] for rank in ranks], truth)]
        value, true, total, count = (torch.cat(part) for part in zip(*rows, strict=True))
        if int(count.max()) < 2:
            continue
        over = axis if axis not in axes else f"{axis}={max(map(len, groups))}"
        local = blocks[groups[0][0]][0].local
        explained = partial(
            Explained,
            value=value,
            truth=true,
            left=share_left(local) if count_independent([true]) >= FEWEST_OF_A_FACTOR else _NEAR,
            names=(name,),
        )
        sums = state_fact("partial_sums", over=over)
        if causes := claim_cause("not_summed", sums, explained(guess=value - (total - true) / count)):
            return causes
        own = state_fact("never_averaged", over=over, axis=axis)
        if causes := claim_cause("not_averaged", own, explained(guess=value - (total / count - true))):
            return causes
    return []


def _beside_sums(ranks: Sequence[Sequence[Block]], truth: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each block of these ranks: its values, its truth, the sum of all ranks' values, and how many ranks hold the
    element.
    """
    total = torch.zeros(truth.shape, dtype=torch.float64)
    count = torch.zeros_like(total)
    for block in itertools.chain(*ranks):
        block.part_of(total).add_(block.local.double())
        block.part_of(count).add_(1)
    for block in itertools.chain(*ranks):
        true, added, often = (block.part_of(full).double().flatten() for full in (truth, total, count))
        yield block.local.double().flatten(), true, added, often


def _not_finite(blocks: Mapping[int, Sequence[Block]], truth: Tensor, name: str) -> list[Cause]:
    """Whether replicas differ because some of them are not finite."""
    bad = {rank: block.local for rank, of in blocks.items() for block in of if not bool(block.local.isfinite().all())}
    proofs = (NotFinite(value=local, truth=truth, names=(name,)) for local in bad.values())
    return claim_cause("nan", state_fact("not_finite_on", ranks=[*bad]), *proofs)


def _guess_drift(blocks: Mapping[int, Sequence[Block]], truth: Tensor, name: str) -> list[Cause]:
    """Whether all differing replicas are right except for their last bits."""
    parts = [(block.local, block.part_of(truth)) for of in blocks.values() for block in of if block.local.numel()]
    size = float(truth.double().abs().max()) if truth.numel() else 0.0
    near = (Near(value=local, truth=true, size=size, names=(name,)) for local, true in parts)
    return claim_cause("replicas_drift", state_fact("last_bits"), *near)


HYPOTHESES = (
    Hypothesis(
        predicts="every replica is a term of the truth, not finite, or right but for its last bits",
        causes=from_replicas,
        kinds=VALUES | {OF_TOKENS, "tokens", "grad_norm", STATE},
    ),
)
