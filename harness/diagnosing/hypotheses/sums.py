"""Sums gone wrong: gradients, losses and counts of tokens that count micro-batches or data ranks otherwise.

A gradient is fitted by the dense model's share of every micro-batch of every data rank (`Evidence.shares`). Weights of
1 everywhere are right; others show the mistake. Tested on numbers: a fit that leaves an error shows nothing.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.diagnosing.causes.cause import Cause, claimed, of_rule
from shardproof.harness.diagnosing.causes.hypothesis import OF_TOKENS, Failure, Hypothesis
from shardproof.harness.diagnosing.causes.places import blocks_of
from shardproof.harness.diagnosing.causes.proofs import Explained, share_left
from shardproof.harness.diagnosing.hypotheses.what_ifs import predictions
from shardproof.harness.mesh_axes import place_of_rank

CLOSE = 1e-3
"""Weights are taken for equal within this share of themselves, losses within its square."""
LEFT = 1e-2
"""A fit explains a wrong tensor when it leaves less than this share of its error."""
_COUNTS = "ignored_learned", "mask_ignored"
"""What-ifs that a count of tokens may follow alone: the sum of losses that it divides need not."""
MOST = 4096
"""Elements of one tensor that a fit looks at."""


def from_shares(evidence: Evidence, wrong: Sequence[str], before: str = "") -> list[Cause]:
    """Which micro-batches or data ranks the wrong gradients count otherwise.

    `before`: a wrong gradient of an activation that comes before them, and may be explained too.
    """
    names = [name for name in wrong if kind_of(name) == "grad" and name in evidence.shares]
    if not names or evidence.shares["tokens"].numel() == 1:
        return []
    whole = [name for name in names if name in evidence.merged.tensors]
    tokens = evidence.shares["tokens"]
    if whole:
        fit = _fitted(evidence, [(name, evidence.merged.tensors[name], ()) for name in whole])
        dtypes = (getattr(torch, evidence.dtype_of(name)) for name in whole)  # gradients may be kept in a wider dtype
        near = max(CLOSE, *(share_left(torch.empty(0, dtype=dtype)) for dtype in dtypes))
        if fit is None:
            return _own_in_part(evidence, whole)
        if _alike(fit[0].flatten(), near):
            return []
        return _of_weights(fit[0], tokens, fit[1], *_of_activation(evidence, fit[0], before))
    return _by_rank(evidence, names, tokens)


def _of_activation(evidence: Evidence, weights: Tensor, name: str) -> list[Explained]:
    """The gradient of an activation, which is that of every data rank's first micro-batch, by these weights."""
    value, truth = evidence.merged.tensors.get(name), evidence.truth.get(name)
    if value is None or truth is None or kind_of(name) != "act_grad" or not truth.dim():
        return []
    if truth.shape[0] % len(weights):
        return []
    rows = truth.double().chunk(len(weights))
    guess = torch.cat([weight * own for weight, own in zip(weights[:, 0], rows, strict=True)])
    explained = Explained(value=value, truth=truth, guess=guess, left=LEFT, names=(name,))
    return [explained] if explained.holds else []


def _own_in_part(evidence: Evidence, names: Sequence[str]) -> list[Cause]:
    """Whether every element that is wrong in these gradients is one data rank's own sum."""
    parts = []
    for name in names:
        x, t = evidence.merged.tensors[name].double(), evidence.truth[name].double()
        either = torch.cat([t[None], evidence.shares[name].sum(1)])
        nearest = (either - x).abs().argmin(0, keepdim=True)
        parts.append(Explained(value=x, truth=t, guess=either.gather(0, nearest)[0], names=(name,)))
    words = "what is wrong in it is one data rank's own sum"
    return claimed("not_summed", words, *parts) if len(evidence.shares["tokens"]) > 1 else []


def _by_rank(evidence: Evidence, names: Sequence[str], tokens: Tensor) -> list[Cause]:
    """Causes of gradients that differ between ranks: every rank's own is fitted."""
    weights: dict[int, Tensor] = {}
    fits = []
    for rank in range(len(evidence.outcomes)):
        blocks = [(name, b.local, b.region) for name in names for b in blocks_of(evidence, name).get(rank, ())]
        found = _fitted(evidence, blocks)
        if found is None:
            return []
        weights[rank] = found[0]
        fits.append(found[1])
    value, truth, guess = (torch.cat([getattr(fit, part) for fit in fits]) for part in ("value", "truth", "guess"))
    spoken = tuple(dict.fromkeys(name for each in fits for name in each.names))
    taken = sum(each.fitted for each in fits)  # one proof for all ranks: some may be right
    fit = Explained(value=value, truth=truth, guess=guess, left=LEFT, names=spoken, fitted=taken)
    rows = {rank: place_of_rank(evidence.axes, "dp", rank) for rank in weights}
    own = torch.stack([w.mean() * tokens[rows[rank]].sum() / tokens.sum() for rank, w in weights.items()])
    scales = torch.stack([w.mean() for w in weights.values()])
    if all(_alike(w.flatten()) for w in weights.values()) and _local(own, len(tokens)) and not _alike(scales):
        words = "every data rank divides by the tokens that it counted itself, not by those of all data ranks"
        return claimed("local_count", words, fit)
    others = [torch.cat([w[: rows[rank]], w[rows[rank] + 1 :]]) for rank, w in weights.items()]
    if len(tokens) > 1 and all(bool((other.abs() < CLOSE).all()) for other in others):
        words = "each data rank's own micro-batches alone are in it"
        return claimed("not_summed", words, fit)
    return _of_weights(weights[0], tokens, fit)


Part = tuple[str, Tensor, tuple[tuple[int, int], ...]]
"""(name, values, their region in the full tensor; () for all of it)."""


def _fitted(evidence: Evidence, parts: Sequence[Part]) -> tuple[Tensor, Explained] | None:
    """Weights [dp, micro] whose weighted sum of the shares is these values, and the proof; None when none fit.

    Equal weights win; where shares hang together, other weights would be some of many.
    """
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
    solved, total = torch.linalg.lstsq(shares, x[:, None], driver="gelsd"), shares.sum(1)
    equal = torch.full_like(shares[0], float(x @ total) / max(float(total @ total), 1e-300))
    for weights in (equal, solved.solution[:, 0])[: 1 + (int(solved.rank) == len(equal))]:
        guess = shares @ weights
        if float((guess - x).norm()) <= max(LEFT * float((x - t).norm()), 1e-9 * float(x.norm())):
            spoken = tuple(dict.fromkeys(name for name, _, _ in parts))
            fit = Explained(value=x, truth=t, guess=guess, left=LEFT, names=spoken, fitted=len(weights.unique()))
            return weights.unflatten(0, grid), fit
    return None


def _alike(values: Tensor, near: float = CLOSE) -> bool:
    return bool((values - values.mean()).abs().max() <= near * values.abs().max())


def _local(shares: Tensor, count: int) -> bool:
    """Whether each of `count` parts was divided by its own tokens, and then summed, or averaged over the parts."""
    return any(bool(((shares - right).abs() <= CLOSE * right).all()) for right in (1.0, 1.0 / count))


def _of_weights(weights: Tensor, tokens: Tensor, *fit: Explained) -> list[Cause]:
    """Causes of weights [dp, micro] other than 1; nothing when all are alike, which is a factor's case."""
    if _alike(weights.flatten()):
        return []
    if _local((weights * tokens / tokens.sum()).flatten(), tokens.numel()):
        return claimed("local_count", "every micro-batch is divided by its own tokens, not by those of the step", *fit)
    if _local(weights.mean(1) * tokens.sum(1) / tokens.sum(), len(tokens)) and all(_alike(row) for row in weights):
        words = "every data rank divides by the tokens that it counted itself, not by those of all data ranks"
        return claimed("local_count", words, *fit)
    missing = weights.abs() < CLOSE
    if bool(missing.all(0).any()):
        lost = [str(m) for m in range(weights.shape[1]) if bool(missing[:, m].all())]
        words = f"micro-batch {', '.join(lost)} of {weights.shape[1]} is missing in it"
        return claimed("micro_missing", words, *fit)
    if bool(missing.all(1).any()):
        kept = [str(d) for d in range(weights.shape[0]) if not bool(missing[d].all())]
        return claimed("not_summed", f"only data rank {', '.join(kept)} of {weights.shape[0]} is in it", *fit)
    if bool(missing.any()):
        return claimed("micro_missing", "some micro-batches of some data ranks are missing in it", *fit)
    counted = ", ".join(f"{weight:.3g}" for weight in weights.flatten().tolist())
    return claimed("unequal_shares", f"its micro-batches count {counted} times instead of once each", *fit)


def from_losses(evidence: Evidence, name: str) -> list[Cause]:
    """Causes of a wrong first loss: micro-batches or data ranks that it leaves out, tokens that divide it.

    Gradients do not show a loss that is only reported wrong.
    """
    if name != "loss/0" or "loss" not in evidence.shares or evidence.shares["tokens"].numel() == 1:
        return []
    tokens, losses = evidence.shares["tokens"], evidence.shares["loss"]
    found = _by_data_rank(evidence, name)
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
        if found and fits and (causes := claimed(known, f"the loss is {words}", _by_row(name, found, right, by_row))):
            return causes
    return []


def _by_data_rank(evidence: Evidence, name: str) -> dict[int, float]:
    """The number of this name on every data rank; none where ranks of one disagree."""
    numbers: dict[int, float] = {}
    for rank, by in blocks_of(evidence, name).items():
        place, number = place_of_rank(evidence.axes, "dp", rank), float(by[0].local)
        if not math.isclose(numbers.setdefault(place, number), number, rel_tol=CLOSE**2):
            return {}
    return numbers


def _by_row(name: str, counts: Mapping[int, float], right: float, by_row: Tensor) -> Explained:
    """The proof that each data rank's number is its entry of `by_row`, where `right` is right for all."""
    value, guess = torch.tensor([*counts.values()]).double(), by_row[[*counts]].double()
    return Explained(value=value, truth=torch.full_like(value, right), guess=guess, left=CLOSE, names=(name,))


def from_counts(evidence: Evidence, name: str) -> list[Cause]:
    """Which tokens of the first step their number leaves out, or counts although they do not count."""
    if name != "tokens/0" or "tokens" not in evidence.shares:
        return []
    tokens, logits = evidence.shares["tokens"], evidence.truth.get("logits/0")
    if not (counts := _by_data_rank(evidence, name)):
        return []
    everyone = torch.ones(len(tokens), dtype=torch.float64)
    rules = [
        ("not_summed", "each data rank's own", tokens.sum(1)),
        ("micro_missing", "that of the last micro-batch alone", tokens[:, -1].sum() * everyone),
        ("micro_missing", "that of the first micro-batch alone", tokens[:, 0].sum() * everyone),
        ("micro_missing", "each data rank's own last micro-batch", tokens[:, -1]),
    ]
    for data_rank in range(len(tokens)):
        left = (tokens.sum() - tokens[data_rank].sum()) * everyone
        rules.append(("micro_missing", f"that of all data ranks but {data_rank}", left))
    if logits is not None:
        all_of_them = float(math.prod(logits.shape[:-1]))
        words = "that of all tokens, whether masked or without a label"
        rules.append(("constant_factor", words, all_of_them * everyone))
    right, causes = float(evidence.truth[name]), list[Cause]()
    for known, words, by_row in rules:
        if _counts_so(counts, by_row):
            causes += claimed(known, f"the number of tokens is {words}", _by_row(name, counts, right, by_row))
    for rule, count in (pair for id in _COUNTS for pair in predictions(evidence, id, name)):
        if _counts_so(counts, by_row := count * everyone):
            proof = _by_row(name, counts, right, by_row)
            causes += of_rule(rule, f"the number of tokens is what it is {rule.words}", proof)
    single = {cause.id: cause for cause in reversed(causes)}
    return [*single.values()] * (len(single) == 1)


def _counts_so(counts: Mapping[int, float], by_row: Tensor) -> bool:
    """Whether every data rank counted just these tokens."""
    return all(value == float(by_row[row]) for row, value in counts.items())


def _sums(failure: Failure) -> list[Cause]:
    """Causes in the sums of the wrong gradients; of all of them first, where ranks disagree on the first wrong one."""
    evidence, wrong = failure.evidence, failure.of_kind("grad")
    every = [name for name in evidence.truth if kind_of(name) == "grad"] if failure.torn else []
    return from_shares(evidence, every) or from_shares(evidence, wrong, failure.first)


HYPOTHESES = (
    Hypothesis(
        predicts="every gradient is a sum of micro-batches and data ranks that count otherwise",
        causes=_sums,
        kinds=frozenset({"loss", OF_TOKENS, "act_grad", "grad"}),
    ),
    Hypothesis(
        predicts="the loss of some micro-batches or data ranks, or over other tokens",
        causes=lambda failure: from_losses(failure.evidence, failure.first),
        kinds=frozenset({"loss", OF_TOKENS}),
    ),
    Hypothesis(
        predicts="the number of tokens of some micro-batches or data ranks, or of tokens that do not count",
        causes=lambda failure: from_counts(failure.evidence, "tokens/0") if "tokens/0" in failure.numbers else [],
        kinds=frozenset({"tokens", OF_TOKENS}),
    ),
)
