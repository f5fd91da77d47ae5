"""Wrong sums: gradients, losses and counts of tokens in which micro-batches or data ranks have wrong weights.

A gradient is fitted by the dense model's gradients of each micro-batch of each data rank (`Search.shares`). Weights of
1 everywhere are right; others show the mistake. A fit that leaves an error shows nothing.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.records import Evidence, Search, Truth
from shardproof.harness.diagnosing.causes.cause import Cause, claim_cause
from shardproof.harness.diagnosing.causes.hypothesis import OF_TOKENS, Failure, Hypothesis
from shardproof.harness.diagnosing.causes.places import blocks_of
from shardproof.harness.diagnosing.causes.proofs import SINGLE, Explained, share_left
from shardproof.harness.mesh_axes import place_of_rank
from shardproof.harness.verdicts.facts import state_fact

CLOSE = 1e-3
"""Weights are equal within this share of themselves, losses within its square."""
LEFT = 1e-2
"""A fit explains a wrong tensor when it leaves less than this share of its error."""
MOST = 4096
"""The most elements of one tensor that a fit uses."""
_FOR_EACH = 8
"""The fewest elements for each fitted weight, so that no weights fit by chance."""


def from_shares(evidence: Evidence, wrong: Sequence[str], before: str = "") -> list[Cause]:
    """Which micro-batches or data ranks have wrong weights in the wrong gradients.

    `before`: a wrong gradient of an activation that backward computes earlier. If it fits, it is explained as well.
    """
    names = [name for name in wrong if kind_of(name) == "grad" and name in evidence.search.shares]
    if not names or evidence.search.shares["tokens"].numel() == 1:
        return []
    whole = [name for name in names if name in evidence.run.tensors]
    tokens = evidence.search.shares["tokens"]
    if whole:
        fit = _fit_weights(evidence.truth, evidence.search, [(name, evidence.run.tensors[name], ()) for name in whole])
        # gradients may be kept in a wider dtype
        dtypes = (getattr(torch, evidence.run.dtype_of(name)) for name in whole)
        near = max(CLOSE, *(share_left(torch.empty(0, dtype=dtype)) for dtype in dtypes))
        if fit is None:
            return _own_in_part(evidence, whole)
        if _are_alike(fit[0].flatten(), near):
            return []
        return _of_weights(fit[0], tokens, fit[1], *_of_activation(evidence, fit[0], before))
    return _by_rank(evidence, names, tokens)


def _of_activation(evidence: Evidence, weights: Tensor, name: str) -> list[Explained]:
    """The gradient of an activation, of one micro-batch of every data rank, if these weights explain it; else empty."""
    value, true = evidence.run.tensors.get(name), evidence.truth.tensors.get(name)
    step, micro = evidence.search.observed
    if value is None or true is None or kind_of(name) != "act_grad" or not true.dim():
        return []
    if step or true.shape[0] % len(weights):  # the weights are those of the first step
        return []
    rows = true.double().chunk(len(weights))
    guess = torch.cat([weight * own for weight, own in zip(weights[:, micro], rows, strict=True)])
    explained = Explained(value=value, truth=true, guess=guess, left=LEFT, names=(name,))
    return [explained] if explained.holds else []


def _own_in_part(evidence: Evidence, names: Sequence[str]) -> list[Cause]:
    """Whether every wrong element of these gradients is one data rank's own sum."""
    parts = []
    for name in names:
        x, t = evidence.run.tensors[name].double(), evidence.truth.tensors[name].double()
        either = torch.cat([t[None], evidence.search.shares[name].sum(1)])
        nearest = (either - x).abs().argmin(0, keepdim=True)
        parts.append(Explained(value=x, truth=t, guess=either.gather(0, nearest)[0], names=(name,)))
    own = state_fact("own_sum_in_part")
    return claim_cause("not_summed", own, *parts) if len(evidence.search.shares["tokens"]) > 1 else []


def _by_rank(evidence: Evidence, names: Sequence[str], tokens: Tensor) -> list[Cause]:
    """Causes of gradients that differ between ranks; each rank's own gradient is fitted."""
    weights: dict[int, Tensor] = {}
    fits = []
    for rank in range(len(evidence.run.outcomes)):
        blocks = [(name, b.local, b.region) for name in names for b in blocks_of(evidence.run, name).get(rank, ())]
        found = _fit_weights(evidence.truth, evidence.search, blocks)
        if found is None:
            return []
        weights[rank] = found[0]
        fits.append(found[1])
    value, truth, guess = (torch.cat([getattr(fit, part) for fit in fits]) for part in ("value", "truth", "guess"))
    spoken = tuple(dict.fromkeys(name for each in fits for name in each.names))
    taken = sum(each.fitted for each in fits)  # one proof for all ranks: some may be right
    fit = Explained(value=value, truth=truth, guess=guess, left=LEFT, names=spoken, fitted=taken)
    rows = {rank: place_of_rank(evidence.claims.axes, "dp", rank) for rank in weights}
    own = torch.stack([w.mean() * tokens[rows[rank]].sum() for rank, w in weights.items()])
    scales = torch.stack([w.mean() for w in weights.values()])
    if all(_are_alike(w.flatten()) for w in weights.values()) and _are_alike(own) and not _are_alike(scales):
        return claim_cause("unequal_shares", state_fact("own_tokens"), fit)
    others = [torch.cat([w[: rows[rank]], w[rows[rank] + 1 :]]) for rank, w in weights.items()]
    if len(tokens) > 1 and all(bool((other.abs() < CLOSE).all()) for other in others):
        return claim_cause("not_summed", state_fact("own_micro_batches"), fit)
    return _of_weights(weights[0], tokens, fit)


Part = tuple[str, Tensor, tuple[tuple[int, int], ...]]
"""(name, values, their region in the full tensor; () for all of it)."""


def _fit_weights(truth: Truth, search: Search, parts: Sequence[Part]) -> tuple[Tensor, Explained] | None:
    """Weights [dp, micro] with which the shares add up to these values, and the proof; None if no weights do.

    Equal weights are preferred. Others are tried only if the shares are linearly independent, and so determine them.
    """
    grid = search.shares["tokens"].shape
    rows, values, truths = [], [], []
    for name, value, region in parts:
        cut = tuple(slice(a, b) for a, b in region)
        rows.append(search.shares[name][(slice(None), slice(None), *cut)].flatten(0, 1).flatten(1)[:, :MOST])
        values.append(value.double().flatten()[:MOST])
        truths.append(truth.tensors[name].double()[cut].flatten()[:MOST])
    if not rows:
        return None
    shares, x, t = torch.cat(rows, 1).t(), torch.cat(values), torch.cat(truths)
    if len(x) < 2 * shares.shape[1] or not bool(torch.isfinite(x).all()):
        return None
    solved, total = torch.linalg.lstsq(shares, x[:, None], driver="gelsd"), shares.sum(1)
    equal = torch.full_like(shares[0], float(x @ total) / max(float(total @ total), 1e-300))
    for weights in (equal, solved.solution[:, 0])[: 1 + (int(solved.rank) == len(equal))]:
        guess = shares @ weights
        if float((guess - x).norm()) <= max(LEFT * float((x - t).norm()), 1e-9 * float(x.norm())):
            spoken = tuple(dict.fromkeys(name for name, _, _ in parts))
            fit = Explained(value=x, truth=t, guess=guess, left=LEFT, names=spoken, fitted=len(weights.unique()))
            return weights.unflatten(0, grid), fit
    return None


def _are_alike(values: Tensor, near: float = CLOSE) -> bool:
    return bool((values - values.mean()).abs().max() <= near * values.abs().max())


def _of_weights(weights: Tensor, tokens: Tensor, *fit: Explained) -> list[Cause]:
    """Causes of weights [dp, micro] other than 1. Empty if all weights are alike, since that is a factor."""
    if _are_alike(weights.flatten()):
        return []
    missing = weights.abs() < CLOSE
    if bool(missing.all(1).any()):
        kept = [d for d in range(weights.shape[0]) if not bool(missing[d].all())]
        return claim_cause("not_summed", state_fact("some_data_ranks", kept=kept, of=weights.shape[0]), *fit)
    fact = state_fact("counted_times", weights=weights.flatten().tolist())
    if bool(missing.all(0).any()):
        lost = [m for m in range(weights.shape[1]) if bool(missing[:, m].all())]
        fact = state_fact("micro_batches_missing", lost=lost, of=weights.shape[1])
    elif bool(missing.any()):
        fact = state_fact("some_missing")
    elif _by_own_tokens(weights, tokens):
        fact = state_fact("micro_batch_tokens")
    elif all(_are_alike(row) for row in weights) and _by_own_tokens(weights.mean(1), tokens.sum(1)):
        fact = state_fact("own_tokens")
    return claim_cause("unequal_shares", fact, *fit)


def _by_own_tokens(weights: Tensor, tokens: Tensor) -> bool:
    """Whether each part was divided by its own tokens, and then summed, or averaged over the parts."""
    return _are_alike((weights * tokens).flatten())


def _guess_sums(failure: Failure) -> list[Cause]:
    """Causes in the sums of the wrong gradients; before that in all sums, if ranks disagree on the first wrong one."""
    evidence, wrong = failure.evidence, failure.of_kind("grad")
    every = [name for name in evidence.truth.tensors if kind_of(name) == "grad"] if failure.torn else []
    return from_shares(evidence, every) or from_shares(evidence, wrong, failure.first)


def from_own_gradients(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """The axis over which gradients, as backward leaves them, get equal weights although the truth weighs them.

    The weights must be the same in all gradients that are a mean of ranks, and explain the truth of all of them.
    """
    names = [name for name in wrong if kind_of(name) == "grad" and name in evidence.run.tensors]
    for axis, lists in evidence.claims.axes.items():
        means = {name: parts for name in names if (parts := _mean_of_ranks(evidence, name, lists))}
        if not means or len({len(own) for _, _, own in means.values()}) != 1:
            continue
        value, truth = (torch.cat([parts[place] for parts in means.values()]) for place in (0, 1))
        own = torch.cat([parts[2] for parts in means.values()], 1).t()
        solved, total = torch.linalg.lstsq(own, truth[:, None], driver="gelsd"), own.sum(1)
        weights, each = solved.solution[:, 0], _share_of(value.double(), total)
        unsure = len(value) < _FOR_EACH * own.shape[1] or int(solved.rank) < own.shape[1]
        if unsure or _are_alike(weights) or not math.isclose(float(weights.mean()), each, rel_tol=SINGLE):
            continue
        alike = Explained(value=value, truth=truth, guess=each * total, names=tuple(means), fitted=1)
        guess, left = own @ weights, share_left(value)
        weighed = Explained(value=truth, truth=value, guess=guess, left=left, fitted=len(weights))
        fact = state_fact("averaged_alike", axis=axis, weights=(weights / weights.sum()).tolist())
        if found := claim_cause("unequal_shares", fact, alike, weighed):
            return found
    return []


def _mean_of_ranks(
    evidence: Evidence, name: str, lists: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """A gradient that is a mean over the ranks of an axis: its values, the truth's, and each rank's own.

    None if it is no mean of what is known as their gradients. These may be of a parameter with the same first values.
    """
    parts = [found for ranks in lists if (found := _own_parts(evidence, name, ranks))]
    if len(parts) < len(lists):
        return None
    value, truth, own = (torch.cat([part[place] for part in parts], -1) for place in range(3))
    total = own.sum(0)
    left = float((value.double() - _share_of(value.double(), total) * total).norm())
    return (value, truth, own) if left <= share_left(value) * float(value.double().norm()) else None


def _own_parts(evidence: Evidence, name: str, ranks: Sequence[int]) -> tuple[Tensor, Tensor, Tensor] | None:
    """For the part of a gradient that these ranks hold: its values, the truth's, and each rank's own before any sum.

    None if they hold different parts, or if the gradient of one of them is not known.
    """
    given, parameter = evidence.search.before_sums, name.removeprefix("grad/")
    held = [part for rank in ranks if rank < len(given) and (part := given[rank].get(parameter)) is not None]
    value, truth = evidence.run.tensors[name], evidence.truth.tensors[name]
    if len(held) < max(len(ranks), 2) or len({part.region for part in held}) > 1 or truth.is_complex():
        return None
    if not held[0].global_shape == tuple(truth.shape) == tuple(value.shape) or not held[0].local.numel():
        return None
    x, t = (held[0].part_of(tensor).flatten()[:MOST] for tensor in (value, truth))
    own = torch.stack([part.local.double().flatten()[:MOST] for part in held])
    return (x, t.double(), own) if bool(torch.isfinite(torch.cat([x[None].double(), t[None], own])).all()) else None


def _share_of(value: Tensor, total: Tensor) -> float:
    """The factor with which a sum is nearest to a value."""
    return float(value @ total) / max(float(total @ total), 1e-300)


HYPOTHESES = (
    Hypothesis(
        predicts="every gradient is the mean of what ranks have, which the truth weighs",
        causes=lambda failure: from_own_gradients(failure.evidence, failure.of_kind("grad")),
        kinds=frozenset({"loss", "grad"}),
    ),
    Hypothesis(
        predicts="every gradient is a sum of micro-batches and data ranks that count otherwise",
        causes=_guess_sums,
        kinds=frozenset({"loss", OF_TOKENS, "act_grad", "grad"}),
    ),
)
