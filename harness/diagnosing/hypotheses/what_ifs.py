"""What-ifs: whether the dense model computes a wrong value when one rule of data, weights or training is not kept.

Tested on numbers: a what-if must explain the first wrong value, and nearly all others that it speaks of.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.dense_model import WhatIfLike
from shardproof.harness.diagnosing.causes.cause import Cause, of_rule
from shardproof.harness.diagnosing.causes.hypothesis import Failure
from shardproof.harness.diagnosing.causes.proofs import Explained, explains, share_left

_ALTERNATIVES = 2
"""More what-ifs than these that fit a value single nothing out."""
_FORWARD = ("act", "logits", "loss")
_OTHERWISE = 0.25
"""Share of the values that a what-if speaks of which may be otherwise."""


def from_what_ifs(failure: Failure) -> list[Cause]:
    """The what-ifs under which the dense model computes the first wrong value and what follows it.

    More than two that fit single nothing out.
    """
    evidence, wrong, found = failure.evidence, failure.numbers, list[Cause]()
    for rule, readings in evidence.what_ifs if wrong else ():
        if fitting := [reading for reading, predicted in readings.items() if _fits(evidence, predicted, wrong)]:
            named = f" ({' or '.join(filter(None, fitting)).replace('_', ' ')})" * rule.names_readings
            value, truth = evidence.merged.tensors[wrong[0]], evidence.truth[wrong[0]]
            guess = Explained(value=value, truth=truth, guess=readings[fitting[0]][wrong[0]], names=(wrong[0],))
            found += of_rule(rule, f"it is what the dense model computes {rule.words}{named}", guess)
    return found if len(found) <= _ALTERNATIVES else []


def predictions(evidence: Evidence, id: str, name: str) -> Iterator[tuple[WhatIfLike, Tensor]]:
    """Results for this name without this rule, by every reading."""
    for rule, readings in evidence.what_ifs:
        for predicted in readings.values() if rule.id == id else ():
            if name in predicted:
                yield rule, predicted[name]


def _fits(evidence: Evidence, reading: Mapping[str, Tensor], wrong: Sequence[str]) -> bool:
    """Whether one reading explains the first wrong value, and nearly all others that training computes with it.

    Some may differ: a weight whose rows are read in another order gives the right rows in another order, inside one
    module. Errors of forward are not held against gradients, whose conjugates may be another matter.
    """
    kinds = _FORWARD if kind_of(wrong[0]) in _FORWARD else ()
    spoken = [name for name in reading if not kinds or kind_of(name) in kinds]
    values = {name: evidence.merged.tensors[name] for name in spoken if name in evidence.merged.tensors}
    comparable = [name for name, value in values.items() if value.shape == reading[name].shape]
    if wrong[0] not in comparable:
        return False
    agree = {
        name: explains(reading[name], values[name], evidence.truth[name])
        or (name != wrong[0] and _near(reading[name], values[name]))
        for name in comparable
        if name in evidence.truth
    }
    return agree[wrong[0]] and [*agree.values()].count(False) <= _OTHERWISE * len(agree)


def _near(tensor: Tensor, value: Tensor) -> bool:
    return float((tensor.double() - value.double()).norm()) <= share_left(value) * float(value.double().norm())
