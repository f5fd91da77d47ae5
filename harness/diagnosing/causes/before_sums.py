"""Gradients as backward leaves them, before any sum over ranks: whether only what follows can be wrong.

If the ranks' gradients of one part add up to the truth over the ranks of some axes, or equal it on each rank, backward
is right, and what follows is wrong. A subject may scale its loss and divide its gradients later: then these sums are
the truth times a number, and that number is the same for gradients that are right in the end.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.causes.places import blocks_of
from shardproof.harness.diagnosing.causes.proofs import SINGLE, share_left
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.protocols import TermLike

Axes = tuple[str, ...]
"""Names of axes; empty if the gradient is right on every rank without a sum."""
_LEFT = 0.1
"""Backward left a gradient right if it differs by at most this share of the final error."""
_ENOUGH = 8
"""The common factor is taken from this many right gradients, the smallest ones."""


def find_summed_axes(evidence: Evidence, name: str, wrong: Collection[str]) -> Axes | None:
    """The fewest axes over which the ranks' gradients, before any sum, add up to the truth; None if there are none."""
    true = evidence.truth.tensors[name]
    given = [block.local for blocks in blocks_of(evidence.run, name).values() for block in blocks]
    if any(tensor.is_complex() for tensor in (true, *given)):
        return None  # sums are compared as real numbers
    true = true.double()
    errors = (
        float((block.local.double() - block.part_of(true)).norm())
        for blocks in blocks_of(evidence.run, name).values()
        for block in blocks
        if block.global_shape == tuple(true.shape)
    )
    near = _LEFT * max(errors, default=0.0) / max(float(true.norm()), 1e-300)
    found = list(_sums_before(evidence, name, near))
    plain = next((axes for axes, factor in found if math.isclose(factor, 1, rel_tol=SINGLE)), None)
    if plain is not None or not found:
        return plain
    truths = evidence.truth.tensors
    right = [other for other in truths if kind_of(other) == "grad" and other not in wrong]
    right.sort(key=lambda other: truths[other].numel())
    usual = [factor for other in right[:_ENOUGH] for _, factor in itertools.islice(_sums_before(evidence, other), 1)]
    scaled = (axes for axes, factor in found if any(math.isclose(factor, one, rel_tol=SINGLE) for one in usual))
    return next(scaled, None)


def is_sum_due(evidence: Evidence, name: str, axes: Axes) -> bool:
    """Whether the expectation has a call behind backward that may sum this gradient over these axes.

    True if there is no expectation, and for a call of which it does not state phase, axis or payload. A payload that
    has fewer elements than a rank's share of the gradient, as a norm's has, holds no gradient.
    """
    claims, share = evidence.claims, evidence.truth.tensors[name].numel() / max(evidence.run.case.world_size, 1)
    summed = [{*ranks} for axis in axes for ranks in claims.axes[axis]]

    def may_sum(term: TermLike) -> bool:
        phase, axis, payload = (getattr(term, field, None) for field in ("phase", "axis", "payload_bytes"))
        width = getattr(torch, getattr(term, "dtype", None) or "int8").itemsize
        over = claims.axes.get(axis, ()) if axis else summed
        joins = any(len(own & {*ranks}) > 1 for own in summed for ranks in over)
        return phase in (None, "grad_sync") and joins and (payload is None or payload >= share * width)

    return claims.expectation is None or any(map(may_sum, claims.expectation))


def is_left_wrong(evidence: Evidence, name: str) -> bool:
    """Whether backward left this gradient wrong: what it left adds up to the returned one, and not to the truth."""
    value, true = evidence.run.tensors.get(name), evidence.truth.tensors[name]
    if value is None or value.is_complex() or true.is_complex() or value.shape != true.shape:
        return False
    return any(_sums_before(evidence, name, of=value)) and not any(_sums_before(evidence, name))


def _sums_before(
    evidence: Evidence, name: str, near: float = math.inf, of: Tensor | None = None
) -> Iterator[tuple[Axes, float]]:
    """Axes over which the ranks' gradients add up to a multiple of the truth on every rank, and the factor.

    They must do so within the rounding of their dtype, and within `near` of the truth's size. If all ranks of an axis
    have the same numbers, this shows no sum, since each may hold only a part. `of` is a tensor in place of the truth.
    """
    true = (evidence.truth.tensors[name] if of is None else of).double()
    parts = [given.get(name.removeprefix("grad/")) for given in evidence.search.before_sums]
    held = {rank: part for rank, part in enumerate(parts) if part is not None and part.local.numel()}
    whole = all(part.global_shape == tuple(true.shape) for part in held.values())
    # If some ranks are missing, the others may hold a part of the sum only.
    if not held or not whole or not {*blocks_of(evidence.run, name)} <= {*held}:
        return
    axes = [axis for axis in split_axes(evidence.run.case) if axis in evidence.claims.axes]
    for over in itertools.chain.from_iterable(itertools.combinations(axes, count) for count in range(len(axes) + 1)):
        lists = [evidence.claims.axes[axis] for axis in over]
        factors = [_factor_of_sum(rank, held, lists, true, near) for rank in held]
        if factors[0] is not None and all(one and math.isclose(one, factors[0], rel_tol=SINGLE) for one in factors):
            yield over, factors[0]


def _factor_of_sum(
    rank: int, held: Mapping[int, Block], axes: Sequence[Sequence[Sequence[int]]], truth: Tensor, near: float
) -> float | None:
    """The factor by which the sum over these axes is a multiple of the truth's part; None if it is none."""
    part, ranks = held[rank], {rank}
    for lists in axes:
        ranks |= {other for members in lists for other in members if ranks & {*members}}
    parts = [held[other].local.double() for other in ranks if other in held and held[other].region == part.region]
    own = part.part_of(truth)
    power = float(own.square().sum())
    if not power or (axes and (len(parts) < 2 or all(torch.equal(one, parts[0]) for one in parts))):
        return None
    total = torch.stack(parts).sum(0)
    factor = float((total * own).sum()) / power
    left = float((total - factor * own).norm())
    return factor if left <= min(share_left(part.local), near) * abs(factor) * math.sqrt(power) else None
