"""The loss, further terms of it that modules add, and the metric.

The loss is the cross entropy of logits whose vocabulary is split over an axis. It equals that of whole logits; padded
columns, which lie behind the V true ones, take no part. With x = logits - max, Z = sum exp(x), t the label, a the label
smoothing and b = a/(V-1) it is for each token

    loss = log Z - (1 - a - b) x_t - b sum_j x_j        gradient_j = exp(x_j)/Z - (1 - a - b) [j = t] - b

Only forward issues collectives over the axis (`LOSS`), in float32 (float64 for float64 logits): unfused MAX, SUM x_t,
SUM Z and with smoothing SUM x_j, each of one number a token; fused all sums in one call. Sources: Megatron-Core
`vocab_parallel_cross_entropy` and its fused form. There smoothing takes the number of classes and the mean of one
partition; here both are those of the whole vocabulary (modes.md 4.6, decision S1).

A term is a scalar that a module adds to the summed loss of its micro-batch, on any pipeline stage. The module attaches
it to a tensor that the loss depends on: forward returns the tensor, and backward gives the term the gradient 1. So no
module returns a term, and no stage sends one. The loss of an outcome is that of the logits alone, without terms.
Source: Megatron-Core `MoEAuxLossAutoScaler`, `MTPLossAutoScaler`.

The metric (metric=true) is accuracy, perplexity and loss by dataset of every micro-batch. Its collectives over tp
(`metric_rows`) are issued in phase metric, before the backward of the micro-batch; whole logits need none. The calls
and their order are those of InternEvo's `AccPerplex` with one dataset (modes.md 3.4). A token is right when no logit
exceeds its label's; padded columns take no part, and tokens count as in the loss (mask and label). The outcome holds
the sums over the run, `metric/<name>`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.parallel.communication.collectives import all_reduce, own_slice
from shardproof.parallel.communication.expectation import STAGES, CallRow
from shardproof.parallel.communication.layout import Axis, Placement
from shardproof.parallel.layers.block import wide

IGNORED = -100
"""The label of a token that does not count in the loss."""


class _CrossEntropy(torch.autograd.Function):
    """Per-token loss from this rank's columns; backward needs no collective."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, vocab: int, smoothing: float, fused: bool
    ) -> Tensor:
        columns = logits.shape[-1]
        first = axis.rank * columns
        real = max(0, min(columns, vocab - first))
        x = logits.to(wide(logits.dtype), copy=True)
        x[..., real:] = -torch.inf
        x -= all_reduce(x.amax(-1), axis, op="max")[..., None]

        place = labels - first
        elsewhere = (place < 0) | (place >= real)
        place = place.masked_fill(elsewhere, 0)[..., None]
        hit = x.gather(-1, place)[..., 0].masked_fill(elsewhere, 0)
        every = x[..., :real].sum(-1)
        share = x.exp_()
        terms = [hit, share.sum(-1), every] if smoothing else [hit, share.sum(-1)]
        terms = _sum_terms(terms, axis, fused)

        spread = smoothing / (vocab - 1) if smoothing else 0.0
        loss = terms[1].log() - (1 - smoothing - spread) * terms[0]
        if smoothing:
            loss = loss - spread * terms[2]
        share /= terms[1][..., None]
        ctx.save_for_backward(share, place, elsewhere)
        ctx.real, ctx.peak, ctx.spread, ctx.dtype = real, 1 - smoothing - spread, spread, logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        share, place, elsewhere = ctx.saved_tensors
        slope = share.clone()
        slope[..., : ctx.real] -= ctx.spread
        slope.scatter_add_(-1, place, -ctx.peak * (~elsewhere)[..., None].to(slope.dtype))
        return (slope * grad[..., None]).to(ctx.dtype), None, None, None, None, None


def _sum_terms(terms: list[Tensor], axis: Axis, fused: bool) -> list[Tensor]:
    """The sum of every term over the axis, in one call or in one call each."""
    if fused:
        return list(all_reduce(torch.stack(terms), axis))
    return [all_reduce(term, axis) for term in terms]


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, axis: Axis, *, vocab: int, smoothing: float = 0.0, fused: bool = False
) -> Tensor:
    """The loss of every token, [...], from this rank's columns [..., V/p] of the logits.

    Labels [...] outside 0..vocab-1 (IGNORED) give a finite number, to which `token_weights` gives the weight 0.
    """
    loss: Tensor = _CrossEntropy.apply(logits, labels, axis, vocab, smoothing, fused)
    return loss


def token_weights(labels: Tensor, loss_mask: Tensor) -> Tensor:
    """The weight of every token in the loss: its loss mask, and 0 if the label is IGNORED."""
    return loss_mask * (labels != IGNORED)


def _loss(op: str, elements: str, why: str, when: str) -> CallRow:
    split = 'last and head in ("parallel", "exchange")'
    return CallRow(STAGES, "loss", op, elements, why, dtype="loss", when=f"{split} and {when}")


LOSS = (
    _loss("all_reduce max", "slice_tokens", "largest logit of every token", "True"),
    _loss("all_reduce", "slice_tokens", "logit of the label", 'cross_entropy == "unfused"'),
    _loss("all_reduce", "slice_tokens", "sum of exp", 'cross_entropy == "unfused"'),
    _loss("all_reduce", "slice_tokens", "sum of logits", 'cross_entropy == "unfused" and label_smoothing'),
    _loss("all_reduce", "2 * slice_tokens", "both sums", 'cross_entropy == "fused" and not label_smoothing'),
    _loss("all_reduce", "3 * slice_tokens", "all three sums", 'cross_entropy == "fused" and label_smoothing'),
)
"""The calls of the loss of logits whose vocabulary is split over tp."""
LOGITS = (
    CallRow("head", "forward", "all_gather", "slice_tokens * padded_vocab", "logits", when='head == "gather"'),
    *LOSS,
)
"""The calls after a head that splits the vocabulary over tp: of gathering its logits, or of the split loss."""


class _Attached(torch.autograd.Function):
    """Forward returns the tensor. Backward returns the tensor's gradient, and 1 as that of the term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor) -> Tensor:
        ctx.save_for_backward(term)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (term,) = ctx.saved_tensors
        return grad, torch.ones_like(term)


def _identity(loss: Tensor) -> Tensor:
    return loss


class Terms:
    """The terms of one rank. `scale_loss` multiplies them by the loss scale, as the loss (`Step.loss_scale`)."""

    def __init__(self) -> None:
        self.scale_loss: Callable[[Tensor], Tensor] = _identity

    def attach(self, x: Tensor, term: Tensor) -> Tensor:
        """Return `x`, on which the loss must depend, with a scalar term that is added to this micro-batch's loss."""
        attached: Tensor = _Attached.apply(x, self.scale_loss(term))
        return attached


DATASETS = 1
"""The number of datasets: a case has one corpus."""
_VOCABULARY = 2
"""Dim of logits [.., .., V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSums:
    """Sums over the tokens that count; `right_of` and `loss_of` have one number a dataset. The counts are int64."""

    right: Tensor
    tokens: Tensor
    log_likelihood: Tensor
    right_of: Tensor
    loss_of: Tensor

    def __add__(self, other: "MetricSums") -> "MetricSums":
        return MetricSums(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


class Metric(nn.Module):
    """Measures micro-batches and adds their sums up in `total`. It has no parameters and is called with gradients off.

    `place` says how logits lie on `axis`: split along the vocabulary, along the sequence, or whole.
    """

    def __init__(self, place: Placement, axis: Axis, *, vocab: int, sequence_dim: int) -> None:
        super().__init__()
        alone = Axis(name="", ranks=axis.ranks[axis.rank : axis.rank + 1], rank=0, group=None)
        dims = [cut.dim for cut in place.cuts]
        self.columns = axis if _VOCABULARY in dims else alone
        self.rows = axis if dims and _VOCABULARY not in dims else alone
        self.counts = axis if dims else alone
        self.vocab, self.sequence_dim = vocab, sequence_dim
        self.total: MetricSums | None = None

    def forward(self, logits: Tensor, labels: Tensor, weights: Tensor) -> MetricSums:
        """The sums of this micro-batch. Labels and weights (1 or 0) are those of all its tokens, in the layout of the
        strategy.
        """
        tokens = weights.sum().long()
        labels, weights = (own_slice(x, self.rows, dim=self.sequence_dim) for x in (labels, weights))
        measured = self._measure(logits, labels, weights, tokens)
        self.total = measured if self.total is None else self.total + measured
        return measured

    def _measure(self, logits: Tensor, labels: Tensor, weights: Tensor, tokens: Tensor) -> MetricSums:
        x, place, elsewhere = self._own(logits, labels)
        largest = all_reduce(x.amax(-1), self.columns, op="max")
        hit = x.gather(-1, place[..., None])[..., 0]
        right = (((hit >= largest) & ~elsewhere) * weights).sum().long()
        right_of = all_reduce(right.expand(DATASETS), self.counts)
        right = all_reduce(right, self.counts)

        hit = all_reduce((hit - largest).masked_fill(elsewhere, 0), self.columns)
        total = all_reduce((x - largest[..., None]).exp().sum(-1), self.columns)
        log_likelihood = all_reduce(((hit - total.log()) * weights).sum(), self.rows)
        losses = vocabulary_cross_entropy(logits, labels, self.columns, vocab=self.vocab)
        return MetricSums(
            right=right,
            tokens=tokens,
            log_likelihood=log_likelihood,
            right_of=right_of,
            loss_of=all_reduce((losses * weights).sum().expand(DATASETS), self.rows),
        )

    def _own(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's logits with padded columns at -inf, every label's column, and whether it lies on another rank."""
        first = self.columns.rank * logits.shape[-1]
        real = max(0, min(logits.shape[-1], self.vocab - first))
        x = logits.to(wide(logits.dtype), copy=True)
        x[..., real:] = -torch.inf
        elsewhere = (labels < first) | (labels >= first + real)
        return x, (labels - first).masked_fill(elsewhere, 0), elsewhere


def metric_rows(place: Placement | None) -> tuple[CallRow, ...]:
    """The calls of a metric over logits with this placement; none if the logits are whole, or their place unknown."""
    if place is None or not place.cuts:
        return ()
    split = _SPLIT if place.cuts[0].dim == _VOCABULARY else _SLICED
    return (*_COUNTS, *split)


def _calls(op: str, elements: str, why: str, *, dtype: str = "loss") -> CallRow:
    return CallRow(STAGES, "metric", op, elements, why, dtype=dtype, when="metric and last")


_COUNTS = (
    _calls("all_reduce", str(DATASETS), "right tokens of every dataset", dtype="int64"),
    _calls("all_reduce", "1", "right tokens", dtype="int64"),
)
_SPLIT = (
    _calls("all_reduce max", "tokens", "largest logit"),
    _calls("all_reduce", "tokens", "logit of the label"),
    _calls("all_reduce", "tokens", "sum of exp"),
    _calls("all_reduce max", "tokens", "largest logit, of the loss"),
    _calls("all_reduce", "tokens", "logit of the label, of the loss"),
    _calls("all_reduce", "tokens", "sum of exp, of the loss"),
)
"""For logits split along the vocabulary."""
_SLICED = (_calls("all_reduce", "1", "log-likelihood"), _calls("all_reduce", str(DATASETS), "loss of every dataset"))
"""For logits split along the sequence."""
