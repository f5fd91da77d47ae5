"""Replicas that differ between ranks which must hold the same: not finite, one partial sum each, apart by rounding.

They may be each its own, where their mean is the truth.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardproof.harness.diagnosing.causes.cause import Cause, claimed
from shardproof.harness.diagnosing.causes.hypothesis import OF_TOKENS, STATE, VALUES, Failure, Hypothesis
from shardproof.harness.diagnosing.causes.places import blocks_of
from shardproof.harness.diagnosing.causes.proofs import Explained, Near, NotFinite, last_bits
from shardproof.harness.diagnosing.hypotheses.patterns import CLOSE, NOT_FINITE
from shardproof.harness.errors import ranks_text
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.protocols import Axes

LITTLE = 1e-9
"""A tensor below this share of the largest of its kind is rounding, and shows no cause."""


def from_replicas(failure: Failure) -> list[Cause]:
    """The causes of the first torn tensor whose truth is more than rounding beside the others of its kind."""
    evidence = failure.evidence
    axes = {axis: evidence.axes[axis] for axis in split_axes(evidence.case) if axis in evidence.axes}
    torn = [name for name in failure.alike if name not in evidence.merged.tensors] if failure.torn else []
    sizes = {name: float(evidence.truth[name].double().norm()) for name in torn}
    for name in torn:
        truth, blocks = evidence.truth[name], blocks_of(evidence, name)
        mine = {rank: _placed(by, truth) for rank, by in blocks.items()}
        terms = {rank: _placed(by, torch.zeros_like(truth)) for rank, by in blocks.items()}
        causes = not_finite(mine, truth, name) or drift(mine, truth, name)
        causes = causes or partial_sums(terms, truth, axes, name) or own_means(mine, truth, axes, name)
        if causes or sizes[name] > LITTLE * max(sizes.values()):
            return causes
    return []


def _placed(blocks: Sequence[Block], around: Tensor) -> Tensor:
    """The values of a rank in their place in a full tensor, whose other elements are those `around` them."""
    first = blocks[0]
    if first.whole or first.global_shape != tuple(around.shape):
        return first.local
    full = around.to(first.local.dtype, copy=True)
    for block in blocks:
        block.part_of(full).copy_(block.local)
    return full


def _same_in_rows(rest: Tensor, true: Tensor) -> bool:
    """Whether this is the same in every row, and not just small: what ranks added to their terms (bias, positions)."""
    if rest.dim() < 2 or rest.shape[0] < 2:
        return False
    return float((rest - rest[:1]).norm()) <= 1e-6 * float(true.norm()) < float((true - true[:1]).norm())


def own_means(locals_by_rank: Mapping[int, Tensor], truth: Tensor, axes: Axes, name: str = "") -> list[Cause]:
    """Whether replicas that differ are, in every group of an axis, values whose mean was not taken."""
    values, true = {rank: local.double() for rank, local in locals_by_rank.items()}, truth.double()
    near = max([1e-6, *(last_bits(local) for local in locals_by_rank.values())])
    for axis, lists in axes.items():
        groups = [ranks for ranks in lists if len(ranks) > 1 and values.keys() & {*ranks}]
        members = [rank for ranks in groups for rank in ranks]
        if not members or any(rank not in values or values[rank].shape != true.shape for rank in members):
            continue
        apart = torch.stack([torch.stack([values[rank] for rank in ranks]) for ranks in groups])
        rest = apart.mean(1) - true
        if float(rest.abs().max()) <= near * float(true.abs().max()):
            words = f"each rank's is its own, and their mean over {axis}={len(groups[0])} is the truth"
            proof = Explained(
                value=apart, truth=true.expand_as(apart), guess=apart - rest[:, None], left=CLOSE, names=(name,)
            )
            return claimed("not_averaged", f"{words}: never averaged over {axis}", proof)
    return []


def partial_sums(locals_by_rank: Mapping[int, Tensor], truth: Tensor, axes: Axes, name: str = "") -> list[Cause]:
    """Whether replicas that differ are, in every group of an axis, the terms of a sum that was not taken."""
    terms_of, true = {rank: local.double() for rank, local in locals_by_rank.items()}, truth.double()
    if any(local.shape != truth.shape for local in terms_of.values()):
        return []
    for axis, lists in axes.items():
        groups = [ranks for ranks in lists if len(ranks) > 1 and terms_of.keys() & {*ranks}]
        if not groups or any(rank not in terms_of for ranks in groups for rank in ranks):
            continue
        terms = torch.stack([torch.stack([terms_of[rank] for rank in ranks]) for ranks in groups])
        rest = terms.sum(1) - true
        left = torch.stack([one - one[:1] if _same_in_rows(one, true) else one for one in rest])
        if max(float(one.norm()) for one in left) <= 1e-6 * float(true.norm()):
            words = f"the ranks' values add up to the truth over {axis}={len(groups[0])}"
            words += ": each holds one partial sum, never reduced"
            guess = terms - left[:, None] / len(groups[0])  # one of them may hold the whole sum, and the others nothing
            explained = Explained(value=terms, truth=true.expand_as(terms), guess=guess, left=CLOSE, names=(name,))
            return claimed("not_summed", words, explained)
    return []


def not_finite(locals_by_rank: Mapping[int, Tensor], truth: Tensor, name: str) -> list[Cause]:
    """Whether replicas differ because some of them hold what is no number."""
    bad = {rank: local for rank, local in locals_by_rank.items() if not bool(torch.isfinite(local).all())}
    words = f"on rank{'s' if len(bad) > 1 else ''} {ranks_text([*bad])} it is {NOT_FINITE}"
    return claimed("nan", words, *(NotFinite(value=local, truth=truth, names=(name,)) for local in bad.values()))


def drift(locals_by_rank: Mapping[int, Tensor], truth: Tensor, name: str) -> list[Cause]:
    """Whether replicas that differ all are right but for their last bits."""
    words = "every rank's is right but for its last bits"
    return claimed("replicas_drift", words, Near(values=[*locals_by_rank.values()], truth=truth, names=(name,)))


HYPOTHESES = (
    Hypothesis(
        predicts="every replica is a partial sum of the truth, not finite, or right but for its last bits; "
        "or their mean is the truth",
        causes=from_replicas,
        kinds=VALUES | {OF_TOKENS, "tokens", "grad_norm", STATE},
    ),
)
