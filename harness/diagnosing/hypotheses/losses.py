"""Losses that are wrong although their logits are right: what the loss over a split vocabulary does otherwise.

Reported before causes found in the calls, since it explains more than they do.
"""

import math

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.diagnosing.causes.cause import Cause, claimed, reported
from shardproof.harness.diagnosing.causes.hypothesis import Failure
from shardproof.harness.diagnosing.causes.places import blocks_of
from shardproof.harness.diagnosing.causes.proofs import Explained
from shardproof.harness.diagnosing.hypotheses.patterns import by_size, same
from shardproof.harness.mesh_axes import split_axes


def more_classes(failure: Failure) -> list[Cause]:
    """Whether a loss is that of a softmax which runs over every class as often as a group has ranks.

    Either by ln(ranks) too large, or wrong and taken with a maximum over ranks that hold all classes already.
    """
    evidence, name, value, parted = failure.evidence, failure.first, failure.value, failure.parted
    if kind_of(name) != "loss" or value is None:
        return []
    truth = evidence.truth[name].double()
    for axis, size in by_size(split_axes(evidence.case)):
        words = f"it is the truth + ln({size}), and {axis}={size}: as if every class counted {size} times"
        if causes := claimed(
            "more_classes", words, Explained(value=value, truth=truth, guess=truth + math.log(size), names=(name,))
        ):
            return causes
    line = parted.line if parted and parted.kind == "extra" else None
    if line and line.phase == "loss" and line.reduce_op == "max" and _whole(evidence, name):
        words = f"a maximum over {line.axis} is taken of classes that every rank holds"
        return [reported("more_classes", words, line)]
    return []


def _whole(evidence: Evidence, name: str) -> bool:
    """Whether every rank holds all classes of the right logits of this loss."""
    logits = name.replace("loss/", "logits/", 1)
    value, parts = evidence.merged.tensors.get(logits), blocks_of(evidence, logits)
    if value is None or not same(value, evidence.truth[logits]):
        return False
    return bool(parts) and all(b.region[-1] == (0, value.shape[-1]) for blocks in parts.values() for b in blocks)


def from_parts(failure: Failure) -> list[Cause]:
    """Whether ranks that share right logits, each a part of their classes, disagree on the loss."""
    evidence, name = failure.evidence, failure.first
    kind, _, step = name.partition("/")
    logits = evidence.merged.tensors.get(f"logits/{step}")
    if kind != "loss" or name in evidence.merged.tensors:
        return []
    if logits is None or not same(logits, evidence.truth[f"logits/{step}"]):
        return []
    loss, parts = blocks_of(evidence, name), blocks_of(evidence, f"logits/{step}")
    classes: dict[object, set[object]] = {}  # rows of the logits -> losses of the ranks that hold some of their classes
    for rank in loss.keys() & parts.keys():
        if all(block.region[-1] != (0, logits.shape[-1]) for block in parts[rank]):
            rows = tuple(block.region[:-1] for block in parts[rank])
            classes.setdefault(rows, set()).add(float(loss[rank][0].local))
    if not any(len(losses) > 1 for losses in classes.values()):
        return []
    words = "the logits are right, and the loss differs between ranks that hold parts of one vocabulary"
    return [reported("loss_by_parts", words, classes)]
