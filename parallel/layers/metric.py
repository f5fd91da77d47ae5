"""Accuracy, perplexity and loss by dataset of every micro-batch, measured beside training (metric=true).

Collectives over tp (`metric_rows`) are issued in phase metric, before the backward of the micro-batch; whole logits
need none. Calls and order are those of InternEvo's `AccPerplex` with the types of one dataset (modes.md 3.4). The
numbers do not depend on the split. A token is right when no logit exceeds its label's, padded columns take no part, and
tokens count as in the loss (mask and label). No gradient flows. The outcome holds their sums over the run,
`metric/<name>`.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from shardproof.parallel.communication.collectives import all_reduce, own_slice
from shardproof.parallel.communication.expectation import STAGES, CallRow
from shardproof.parallel.communication.layout import Placement
from shardproof.parallel.communication.mesh import Axis
from shardproof.parallel.layers.loss import vocabulary_cross_entropy
from shardproof.parallel.layers.norm import wide

DATASETS = 1
"""Number of datasets: a case has one corpus."""
_VOCABULARY = 2
"""Dim of logits [.., .., V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSums:
    """Sums over tokens that count: `right` and `tokens` int64 [], `log_likelihood` [], and by dataset int64 `right_of`
    and `loss_of` [datasets]."""

    right: Tensor
    tokens: Tensor
    log_likelihood: Tensor
    right_of: Tensor
    loss_of: Tensor

    def __add__(self, other: "MetricSums") -> "MetricSums":
        return MetricSums(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


class Metric(nn.Module):
    """Measures micro-batches and adds them up in `total`. A metric has no parameters and is called with gradients off.

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
        """This micro-batch; labels and weights (1 or 0, see `loss.counted`) are of all its tokens, as laid out."""
        tokens = weights.sum().long()
        labels, weights = (own_slice(x, self.rows, dim=self.sequence_dim) for x in (labels, weights))
        measured = self._measured(logits, labels, weights, tokens)
        self.total = measured if self.total is None else self.total + measured
        return measured

    def _measured(self, logits: Tensor, labels: Tensor, weights: Tensor, tokens: Tensor) -> MetricSums:
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
        """This rank's logits with padded columns out of reach, every label's column, and whether it lies elsewhere."""
        first = self.columns.rank * logits.shape[-1]
        real = max(0, min(logits.shape[-1], self.vocab - first))
        x = logits.to(wide(logits.dtype), copy=True)
        x[..., real:] = -torch.inf
        elsewhere = (labels < first) | (labels >= first + real)
        return x, (labels - first).masked_fill(elsewhere, 0), elsewhere


def metric_rows(place: Placement | None) -> tuple[CallRow, ...]:
    """The calls of a case's metric, none without or for whole logits; `place` is that of its logits."""
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
"""Logits split along the vocabulary."""
_SLICED = (_calls("all_reduce", "1", "log-likelihood"), _calls("all_reduce", str(DATASETS), "loss of every dataset"))
"""Logits split along the sequence."""
