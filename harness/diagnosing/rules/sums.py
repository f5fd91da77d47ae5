"""Sums gone wrong: gradients that count micro-batches or data ranks otherwise, norms that count too much or too little.

A gradient is fitted by the dense model's share of every micro-batch of every data rank (`Evidence.shares`): weights of
1 everywhere are right, and which ones are not 1 tells the mistake. A norm is built again from the truth's gradients.
Tested on numbers: a fit that leaves an error tells nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.checking.evidence import Evidence, split_axes
from harness.checking.tolerance import kind_of
from harness.diagnosing.rules.causes import Cause
from harness.diagnosing.rules.places import blocks_of

__all__ = ["from_counts", "from_losses", "from_norms", "from_shares"]

CLOSE = 1e-3
"""Weights and norms are taken for equal within this share of themselves."""
LEFT = 1e-2
"""A fit explains a wrong tensor when it leaves less than this share of its error."""
MOST = 4096
"""Elements of one tensor that a fit looks at."""


def from_shares(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """Which micro-batches or data ranks the wrong gradients count otherwise."""
    names = [name for name in wrong if kind_of(name) == "grad" and name in evidence.shares]
    if not names or evidence.shares["tokens"].numel() == 1:
        return []
    whole = [name for name in names if name in evidence.merged.tensors]
    tokens = evidence.shares["tokens"]
    if whole:
        weights = _fitted(evidence, [(name, evidence.merged.tensors[name], ()) for name in whole])
        cause = None if weights is None else _told(weights, tokens)
        return [cause] if cause else []
    return _by_rank(evidence, names, tokens)


def _by_rank(evidence: Evidence, names: Sequence[str], tokens: Tensor) -> list[Cause]:
    """The same for gradients that differ between ranks: every rank's own is fitted."""
    weights: dict[int, Tensor] = {}
    for rank in range(len(evidence.outcomes)):
        blocks = [(name, b.local, b.region) for name in names for b in blocks_of(evidence, name).get(rank, ())]
        found = _fitted(evidence, blocks)
        if found is None:
            return []
        weights[rank] = found
    rows = {rank: _place_on(evidence, "dp", rank) for rank in weights}
    own = torch.stack([w.mean() * tokens[rows[rank]].sum() / tokens.sum() for rank, w in weights.items()])
    scales = torch.stack([w.mean() for w in weights.values()])
    if all(_alike(w.flatten()) for w in weights.values()) and _local(own, len(tokens)) and not _alike(scales):
        words = "every data rank divides by the tokens that it counted itself, not by those of all data ranks"
        return [Cause(id="local_count", words=words)]
    if len(tokens) > 1 and all(bool((_others(w, rows[rank]).abs() < CLOSE).all()) for rank, w in weights.items()):
        words = "each data rank's own micro-batches alone are in it: it was never summed over dp"
        return [Cause(id="not_summed", words=words)]
    cause = _told(weights[0], tokens)
    return [cause] if cause else []


def _others(weights: Tensor, row: int) -> Tensor:
    return torch.cat([weights[:row], weights[row + 1 :]])


def _place_on(evidence: Evidence, axis: str, rank: int) -> int:
    return next((ranks.index(rank) for ranks in evidence.case.axes.get(axis, ()) if rank in ranks), 0)


Part = tuple[str, Tensor, tuple[tuple[int, int], ...]]
"""(name, values, their region in the full tensor; () for all of it)."""


def _fitted(evidence: Evidence, parts: Sequence[Part]) -> Tensor | None:
    """The weights [dp, micro] whose sum of shares these values are; None when they are no such sum."""
    grid = evidence.shares["tokens"].shape
    rows, values, truths = [], [], []
    for name, value, region in parts:
        cut = tuple(slice(a, b) for a, b in region)
        rows.append(evidence.shares[name][(slice(None), slice(None), *cut)].flatten(0, 1).flatten(1)[:, :MOST])
        values.append(value.double().flatten()[:MOST])
        truths.append(evidence.truth[name].double()[cut].flatten()[:MOST])
    if not rows:
        return None
    shares, x, t = torch.cat(rows, 1).t(), torch.cat(values), torch.cat(truths)
    if len(x) < 2 * shares.shape[1] or not bool(torch.isfinite(x).all()):
        return None
    weights = torch.linalg.lstsq(shares, x[:, None], driver="gelsd").solution[:, 0]
    explained = float((shares @ weights - x).norm()) <= max(LEFT * float((x - t).norm()), 1e-9 * float(x.norm()))
    return weights.unflatten(0, grid) if explained else None


def _alike(values: Tensor) -> bool:
    return bool((values - values.mean()).abs().max() <= CLOSE * values.abs().max())


def _local(shares: Tensor, count: int) -> bool:
    """Whether each of `count` parts was divided by its own tokens; or that, and their mean taken for their sum."""
    return any(bool(((shares - right).abs() <= CLOSE * right).all()) for right in (1.0, 1.0 / count))


def _told(weights: Tensor, tokens: Tensor) -> Cause | None:
    """What weights [dp, micro] other than 1 mean; None when all are alike, which a factor tells."""
    if _alike(weights.flatten()):
        return None
    if _local((weights * tokens / tokens.sum()).flatten(), tokens.numel()):
        return Cause(id="local_count", words="every micro-batch is divided by its own tokens, not by those of the step")
    if _local(weights.mean(1) * tokens.sum(1) / tokens.sum(), len(tokens)) and all(_alike(row) for row in weights):
        words = "every data rank divides by the tokens that it counted itself, not by those of all data ranks"
        return Cause(id="local_count", words=words)
    missing = weights.abs() < CLOSE
    if bool(missing.all(0).any()):
        lost = [str(m) for m in range(weights.shape[1]) if bool(missing[:, m].all())]
        words = f"micro-batch {', '.join(lost)} of {weights.shape[1]} is missing in it: overwritten, or added too late"
        return Cause(id="micro_missing", words=words)
    if bool(missing.all(1).any()):
        kept = [str(d) for d in range(weights.shape[0]) if not bool(missing[d].all())]
        return Cause(id="not_summed", words=f"only data rank {', '.join(kept)} of {weights.shape[0]} is in it")
    if bool(missing.any()):
        return Cause(id="micro_missing", words="some micro-batches of some data ranks are missing in it")
    counted = ", ".join(f"{weight:.3g}" for weight in weights.flatten().tolist())
    return Cause(id="unequal_shares", words=f"its micro-batches count {counted} times instead of once each")


def from_losses(evidence: Evidence, name: str) -> list[Cause]:
    """Which micro-batches or data ranks the first loss counts, and by whose tokens it is divided, when gradients do not
    tell: a loss that is only reported wrong.
    """
    if name != "loss/0" or "loss" not in evidence.shares or evidence.shares["tokens"].numel() == 1:
        return []
    tokens, losses = evidence.shares["tokens"], evidence.shares["loss"]
    found = {_place_on(evidence, "dp", rank): float(by[0].local) for rank, by in blocks_of(evidence, name).items()}
    means, rows = losses * tokens.sum() / tokens, losses.sum(1) * tokens.sum() / tokens.sum(1)
    everyone = torch.ones_like(rows)
    rules = (
        ("local_count", "each data rank's own, over its own tokens", rows),
        ("not_summed", "each data rank's own part of the sum over all", losses.sum(1)),
        ("local_count", "the mean of what data ranks have over their own tokens", rows.mean() * everyone),
        ("local_count", "the mean of what micro-batches have over their own tokens", means.mean() * everyone),
        ("local_count", "the sum of what micro-batches have over their own tokens", means.sum() * everyone),
        ("micro_missing", "that of the last micro-batch alone", losses[:, -1].sum() * everyone),
        ("micro_missing", "that of the first micro-batch alone", losses[:, 0].sum() * everyone),
        ("micro_missing", "the mean of the last micro-batch alone", means[:, -1].mean() * everyone),
    )
    right = float(evidence.truth[name])
    for known, words, by_row in rules:
        fits = all(math.isclose(value, float(by_row[row]), rel_tol=CLOSE**2) for row, value in found.items())
        if found and fits and not all(math.isclose(float(x), right, rel_tol=CLOSE) for x in by_row):
            return [Cause(id=known, words=f"the loss is {words}")]
    return []


def from_counts(evidence: Evidence, name: str) -> list[Cause]:
    """Which micro-batches or data ranks the number of tokens of the first step leaves out."""
    if name != "tokens/0" or "tokens" not in evidence.shares or evidence.shares["tokens"].numel() == 1:
        return []
    tokens = evidence.shares["tokens"]
    found = {_place_on(evidence, "dp", rank): float(by[0].local) for rank, by in blocks_of(evidence, name).items()}
    everyone = torch.ones(len(tokens), dtype=torch.float64)
    rules = (
        ("not_summed", "each data rank's own: never summed over dp", tokens.sum(1)),
        ("micro_missing", "that of the last micro-batch alone", tokens[:, -1].sum() * everyone),
        ("micro_missing", "that of the first micro-batch alone", tokens[:, 0].sum() * everyone),
        ("micro_missing", "each data rank's own last micro-batch", tokens[:, -1]),
    )
    right = float(evidence.truth[name])
    for known, words, by_row in rules:
        if found and right != float(by_row[0]) and all(value == float(by_row[row]) for row, value in found.items()):
            return [Cause(id=known, words=f"the number of tokens is {words}")]
    return []


def from_norms(evidence: Evidence, name: str) -> list[Cause]:
    """What the norm of the first step counts too often or leaves out."""
    squares = {n: float(t.double().square().sum()) for n, t in evidence.truth.items() if kind_of(n) == "grad"}
    if name != "grad_norm/0" or not squares:
        return []
    value = evidence.merged.tensors.get(name)
    if value is None:
        return _own_norms(evidence, name)
    if _norms_added(evidence, float(value)):
        words = "it is the sum of the norms of the ranks' parts: the root is taken before the sum of the squares"
        return [Cause(id="norm_of_norms", words=words)]
    whole = sum(square for n, square in squares.items() if _held_whole(evidence, n))
    split, found = sum(squares.values()) - whole, float(value) ** 2
    if said := _counted_by_axis(evidence, found, whole, split):
        return said
    left_out = whole + split - found
    for square, what in (
        (whole, "what every rank holds whole"),
        (split, "what is split over ranks"),
        *((square, name) for name, square in squares.items()),
    ):
        if math.isclose(left_out, square, rel_tol=CLOSE**2):
            return [Cause(id="norm_counts_few", words=f"it leaves out {what}")]
    others = {f"{name} beyond the first rank's part": square for name, square in _beyond_first(evidence).items()}
    return _several_left_out({**squares, **others}, left_out, evidence.case.dtype)


def _counted_by_axis(evidence: Evidence, found: float, whole: float, split: float) -> list[Cause]:
    """Whether squares are counted once a rank of an axis, or divided by its ranks: all of them, or one kind alone."""
    all_of_it = "what every rank holds whole", "what is split over ranks", "everything"
    for axis, size in split_axes(evidence.case).items():
        counts = ((size, 1), (1, size), (size, size))
        for (of_whole, of_split), what in zip(counts, all_of_it, strict=True):
            if math.isclose(found, whole * of_whole + split * of_split, rel_tol=CLOSE**2):
                return [Cause(id="norm_counts_replicas", words=f"it counts {what} once a rank, {axis}={size}")]
            if math.isclose(found, whole / of_whole + split / of_split, rel_tol=CLOSE**2):
                return [Cause(id="norm_counts_few", words=f"it counts 1 of {size} ranks of {axis} in {what}")]
    return []


def _norms_added(evidence: Evidence, value: float) -> bool:
    """Whether this is a sum of norms over the ranks of a group, what every rank holds whole counted by the first."""
    for groups in evidence.case.axes.values():
        ranks = groups[0] if groups else ()
        norms = []
        for place, rank in enumerate(ranks):
            names = [n for n in evidence.outcomes[rank] if kind_of(n) == "grad"]
            counted = [n for n in names if place == 0 or not _held_whole(evidence, n)]
            blocks = [block.local.double() for n in counted for block in evidence.outcomes[rank][n]]
            norms.append(math.sqrt(sum(float(block.square().sum()) for block in blocks)))
        if len(norms) > 1 and math.isclose(sum(norms), value, rel_tol=CLOSE**2):
            return True
    return False


def _beyond_first(evidence: Evidence) -> dict[str, float]:
    """Split gradients -> the squares of all parts but the first rank's."""
    found: dict[str, float] = {}
    for name in evidence.truth:
        first = blocks_of(evidence, name).get(0, ()) if kind_of(name) == "grad" else ()
        if first and not _held_whole(evidence, name):
            mine = sum(float(block.local.double().square().sum()) for block in first)
            found[name] = float(evidence.truth[name].double().square().sum()) - mine
    return found


def _several_left_out(squares: Mapping[str, float], left_out: float, dtype: str) -> list[Cause]:
    """The fewest kinds of parameters, each in all layers, whose squares are what is missing."""
    kinds: dict[str, float] = {}
    for name, square in squares.items():
        kind = re.sub(r"\.\d+\.", ".*.", name)
        kinds[kind] = kinds.get(kind, 0.0) + square
    if dtype != "float64" or left_out <= 0:  # so many sums that one of them comes near by chance
        return []
    for count in range(1, 5):
        for some in itertools.combinations(kinds, count):
            if math.isclose(sum(kinds[kind] for kind in some), left_out, rel_tol=1e-9):
                return [Cause(id="norm_counts_few", words=f"it leaves out {', '.join(some)}")]
    return []


def _held_whole(evidence: Evidence, name: str) -> bool:
    return all(
        sum(part.local.numel() for part in parts) == math.prod(parts[0].global_shape)
        for parts in blocks_of(evidence, name).values()
    )


def _own_norms(evidence: Evidence, name: str) -> list[Cause]:
    """Whether every rank's norm is that of its own parts alone."""
    for rank, by in blocks_of(evidence, name).items():
        mine = [b for n, parts in evidence.outcomes[rank].items() if kind_of(n) == "grad" for b in parts]
        square = sum(float(block.local.double().square().sum()) for block in mine)
        if not math.isclose(float(by[0].local) ** 2, square, rel_tol=CLOSE):
            return []
    return [Cause(id="norm_counts_few", words="each rank's norm is that of its own parts: it was never summed")]
