"""What-ifs: whether the dense model computes a wrong value when one rule of data, weights or training is not kept.

`Evidence.alternatives` holds them under "<what if>/<name>"; what stands behind a dot in a what-if is one reading of it.
Tested on numbers: a what-if must explain the first wrong value, and nearly all others that it speaks of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import kind_of
from harness.diagnosing.rules.causes import Cause, claimed
from harness.diagnosing.rules.proofs import Explained, explains

__all__ = ["WHAT_IF", "what_if"]

_ALTERNATIVES = 2
"""More what-ifs than these that fit a value single nothing out."""
_FORWARD = ("act", "logits", "loss")
_OTHERWISE = 0.25
"""Share of the values that a what-if speaks of which may be otherwise."""
_SAME = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Values within this share of each other are the same, by dtype."""
_SAME_IN_SHORT = 5e-2

WHAT_IF: Mapping[str, str] = {
    "mask_ignored": "without the loss mask: tokens count that are masked",
    "padding_learned": "when tokens that are not to be learned get the label 0",
    "labels_unshifted": "when every token is its own label: labels are not shifted by one",
    "labels_shifted_twice": "when labels are shifted once more",
    "batch_repeated": "when every step reads the data of the first",
    "data_rank_repeated": "when every data rank reads the data of the first",
    "micro_repeated": "when every micro-batch is the first one",
    "local_count": "when every row has a mean of its own",
    "micro_missing": "of some micro-batches or steps alone",
    "borders_ignored": "when packed sentences have no borders: tokens see other sentences",
    "positions_missing": "when every token stands at place 0: positions are not applied",
    "positions_restart": "when positions begin anew in every rank's part of a sequence",
    "slice_places": "when tokens of a context rank's slice are taken for other places of the row",
    "slice_labels": "when labels are shifted inside of every context rank's slice",
    "stale": "when every layer has the weights of the layer before",
    "kv_exchanged": "when keys and values are exchanged",
    "gate_exchanged": "when gate and up are exchanged",
    "fused_cut": "when a fused weight is cut into other blocks than its rows form",
    "foreign_rows": "when every part of a split table adds a row for tokens that lie elsewhere: they are not masked",
    "rows_late": "when all parts of a split table but the first look up the next row: a range off by one",
    "edge_off": "when ranges of the vocabulary's parts are one row off",
    "flat_dim": "when parts along an inner dim lie end to end in memory: a collective that works along dim 0",
    "ignored_learned": "when tokens without a label count",
    "padding_counted": "when padded columns of the vocabulary take part in the softmax",
    "smoothing_missing": "without label smoothing",
    "smoothing_over_all": "when label smoothing is spread over all classes, the label's own or padding among them",
    "smoothing_by_part": "when label smoothing is spread over the classes of one part of the vocabulary",
    "transposed": "when rows and tokens of the queries are exchanged in memory: right for one row only",
    "kv_order": "when copies of key and value heads stand in another order than the queries that read them",
    "kv_alone": "when one copy of each key and value head alone gives its gradient: copies are not summed",
    "own_labels": "when each part of the vocabulary gives a gradient for its own labels alone",
    "tied_part": "when the tied weight gets the gradient of one of its two uses alone",
    "tied_twice": "when the gradient of one of the tied weight's two uses counts twice",
    "untied": "when the tied head keeps its first weights: head and embedding are no longer one",
    "scores_scaled": "when attention scores are scaled by another number",
    "later_seen": "when tokens see later ones: attention is not causal",
    "rotated_otherwise": "when rotary positions have another base, pairing or direction, or turn queries or keys alone",
    "positions_shifted": "when positions are some places too large or too small",
    "other_activation": "with another nonlinearity",
    "normed_otherwise": "with another norm: left out, centred or not, or with other weights",
    "other_epsilon": "when the norms have another epsilon",
    "term_missing": "when a residual is not added",
    "step_missing": "before the last step: it was not taken, or came after the parameters were read",
    "unclipped": "without clipping",
    "clip_scales_up": "when a norm below the limit is scaled up to it",
    "decay_missing": "without weight decay",
}
"""What if -> words."""
_READ = frozenset(
    "micro_missing positions_shifted scores_scaled later_seen rotated_otherwise other_activation normed_otherwise "
    "other_epsilon term_missing smoothing_over_all edge_off slice_places slice_labels".split()
)
"""What-ifs whose readings are known by their names."""


def what_if(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """The what-ifs under which the dense model computes the first wrong value and what follows it.

    More than two that fit single nothing out.
    """
    by_word: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key, other in evidence.alternatives.items():
        reading, _, name = key.partition("/")
        by_word.setdefault(reading.partition(".")[0], {}).setdefault(reading, {})[name] = other
    found: list[Cause] = []
    for word, meaning in WHAT_IF.items():
        readings = by_word.get(word, {})
        if fitting := [reading for reading, told in readings.items() if _fits(evidence, told, wrong)]:
            words = f"it is what the dense model computes {meaning}"
            kinds = [kind for reading in fitting if (kind := reading.partition(".")[2])]
            named = f" ({' or '.join(kinds).replace('_', ' ')})" if kinds and word in _READ else ""
            told, name = readings[fitting[0]], wrong[0]
            guess = Explained(value=evidence.merged.tensors[name], truth=evidence.truth[name], guess=told[name])
            found += claimed(word, words + named, guess)
    return found if len(found) <= _ALTERNATIVES else []


def _fits(evidence: Evidence, told: Mapping[str, Tensor], wrong: Sequence[str]) -> bool:
    """Whether one reading explains the first wrong value, and nearly all others that training computes with it.

    Some may differ: a weight whose rows are read in another order gives the right rows in another order, inside one
    module. What is wrong in forward is not held against gradients, whose conjugates may be another matter.
    """
    kinds = _FORWARD if kind_of(wrong[0]) in _FORWARD else ()
    spoken = [name for name in told if not kinds or kind_of(name) in kinds]
    held = [name for name in spoken if _shape(evidence.merged.tensors.get(name)) == _shape(told[name])]
    if wrong[0] not in held:
        return False
    agree = [
        explains(told[name], evidence.merged.tensors[name], evidence.truth[name])
        or (name != wrong[0] and _near(told[name], evidence.merged.tensors[name]))
        for name in held
        if name in evidence.truth
    ]
    first = explains(told[wrong[0]], evidence.merged.tensors[wrong[0]], evidence.truth[wrong[0]])
    return first and agree.count(False) <= _OTHERWISE * len(agree)


def _shape(tensor: Tensor | None) -> object:
    return None if tensor is None else tensor.shape


def _near(one: Tensor, value: Tensor) -> bool:
    share = _SAME.get(value.dtype, _SAME_IN_SHORT)
    return float((one.double() - value.double()).norm()) <= share * float(value.double().norm())
