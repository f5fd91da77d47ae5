"""What-ifs: whether the dense model computes a wrong value when one rule of data, weights or training is not kept.

`Evidence.alternatives` holds them under "<what if>/<name>"; what stands behind a dot in a what-if is one reading of it.
Tested on numbers: a what-if must explain nearly all of the error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from harness.causes import Cause
from harness.diagnosing.patterns import explains
from harness.evidence import Evidence

__all__ = ["WHAT_IF", "what_if"]

WHAT_IF: Mapping[str, str] = {
    "mask_ignored": "without the loss mask: tokens count that are masked",
    "padding_learned": "when tokens that are not to be learned get the label 0",
    "labels_unshifted": "when every token is its own label: labels are not shifted by one",
    "batch_repeated": "when every step reads the data of the first",
    "data_rank_repeated": "when every data rank reads the data of the first",
    "micro_repeated": "when every micro-batch is the first one",
    "borders_ignored": "when packed sentences have no borders: tokens see other sentences",
    "positions_missing": "when every token stands at place 0: positions are not applied",
    "positions_restart": "when positions begin anew in every rank's part of a sequence",
    "kv_exchanged": "when keys and values are exchanged",
    "gate_exchanged": "when gate and up are exchanged",
    "fused_cut": "when a fused weight is cut into other blocks than its rows form",
    "foreign_rows": "when every part of a split table adds a row for tokens that lie elsewhere: they are not masked",
    "rows_late": "when all parts of a split table but the first look up the next row: a range off by one",
    "flat_dim": "when parts along an inner dim lie end to end in memory: a collective that works along dim 0",
    "ignored_learned": "when tokens without a label count",
    "padding_counted": "when padded columns of the vocabulary take part in the softmax",
    "smoothing_missing": "without label smoothing",
    "smoothing_by_part": "when label smoothing is spread over the classes of one part of the vocabulary",
    "transposed": "when rows and tokens of the queries are exchanged in memory: right for one row only",
    "kv_order": "when copies of key and value heads stand in another order than the queries that read them",
    "kv_alone": "when one copy of each key and value head alone gives its gradient: copies are not summed",
    "own_labels": "when each part of the vocabulary gives a gradient for its own labels alone",
    "tied_part": "when the tied weight gets the gradient of one of its two uses alone",
    "tied_twice": "when the gradient of one of the tied weight's two uses counts twice",
    "untied": "when the tied head keeps its first weights: head and embedding are no longer one",
    "step_missing": "before the last step: it was not taken, or came after the parameters were read",
    "unclipped": "without clipping",
    "clip_scales_up": "when a norm below the limit is scaled up to it",
    "decay_missing": "without weight decay",
}
"""What if -> words."""


def what_if(evidence: Evidence, name: str, value: Tensor) -> list[Cause]:
    """The first what-if that the dense model computes this wrong value under."""
    truth = evidence.truth[name]
    for word, other in _readings(evidence, name):
        if other.shape == value.shape and explains(other, value, truth):
            return [Cause(id=word, words=f"it is what the dense model computes {WHAT_IF[word]}")]
    return []


def _readings(evidence: Evidence, name: str) -> Iterator[tuple[str, Tensor]]:
    """All readings of all what-ifs of this name, in the order of WHAT_IF."""
    of_name: dict[str, list[Tensor]] = {}
    for key, other in evidence.alternatives.items():
        reading, _, told = key.partition("/")
        if told == name:
            of_name.setdefault(reading.partition(".")[0], []).append(other)
    for word in WHAT_IF:
        for other in of_name.get(word, ()):
            yield word, other
