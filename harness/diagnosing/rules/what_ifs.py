"""What-ifs: whether the dense model computes a wrong value when one rule of data, weights or training is not kept.

`Evidence.alternatives` holds them under "<what if>/<name>"; what stands behind a dot in a what-if is one reading of it.
Tested on numbers: a what-if must explain the first wrong value, and nearly all others that it speaks of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import kind_of
from harness.diagnosing.rules.causes import WHAT_IF, Cause, claimed
from harness.diagnosing.rules.proofs import Explained, explains, share_left

_ALTERNATIVES = 2
"""More what-ifs than these that fit a value single nothing out."""
_FORWARD = ("act", "logits", "loss")
_OTHERWISE = 0.25
"""Share of the values that a what-if speaks of which may be otherwise."""
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
    return float((one.double() - value.double()).norm()) <= share_left(value) * float(value.double().norm())
