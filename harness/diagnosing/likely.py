"""Likely causes of one failed check, from its tensors, from the ledger, or from what the check says by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.causes import Cause
from harness.checking.ledger_checks import Difference, Line
from harness.diagnosing.layouts import from_flaws
from harness.diagnosing.offsets import from_offsets
from harness.diagnosing.patterns import causes, drift, not_finite, partial_sums, same
from harness.diagnosing.places import blocks_of, comparable
from harness.diagnosing.sums import from_norms, from_shares, from_updates
from harness.diagnosing.what_ifs import what_if
from harness.evidence import Evidence, split_axes
from harness.tolerance import kind_of

__all__ = ["likely"]

_USUAL: Mapping[str, tuple[str, str]] = {
    "coverage": (
        "uncheckable",
        "names that are not the canonical ones (loss/<step>, grad/<parameter>, ...), or a subject that returns nothing",
    ),
    "merge": (
        "layout",
        "offsets of another rank, a padded or transposed shard, or a rank that leaves its part out",
    ),
    "parallelism": (
        "not_parallel",
        "the split was done to a tensor that is not used, or undone by what followed it",
    ),
    "waits": ("not_waited", "the handle was dropped before its wait()"),
    "determinism": (
        "not_deterministic",
        "uninitialised memory, a random number without a seed, or a sum in no fixed order",
    ),
    "recording": (
        "recording",
        "a program that asks whether modules or optimizers are watched, or that measures time",
    ),
}
"""What is usually behind a check that no tensor explains: check -> (cause, words)."""
_FIELDS = ("phase", "region", "op", "reduce_op", "axis", "group_size", "dtype", "payload_bytes")


def likely(
    evidence: Evidence, check: str, parted: Difference | None, wrong: Sequence[str], name: str
) -> tuple[Cause, ...]:
    """Causes told by the first of the `wrong` tensors and by `name`, and by the ledger; else what usually is behind.

    `wrong` stand in the order in which training computes.
    """
    said: list[Cause] = []
    numbers = [told for told in wrong if comparable(evidence, told)]
    for told in dict.fromkeys(told for told in (*wrong[:1], name) if told in evidence.truth):
        said += _of_tensor(evidence, check, told) if comparable(evidence, told) else []
    said += from_shares(evidence, numbers) or from_offsets(evidence, numbers)
    said += from_updates(evidence, numbers)
    if parted:
        said.append(_blame(parted))
    if not said and check == "replicas":
        said += _of_another_replica(evidence, numbers)
    if not said and check == "merge":
        said += from_flaws(evidence, wrong)
    if not said and check in _USUAL:
        known, words = _USUAL[check]
        said.append(Cause(id=known, words=words))
    return tuple(dict.fromkeys(said))


def _of_tensor(evidence: Evidence, check: str, name: str) -> list[Cause]:
    """What one wrong tensor looks like."""
    truth, axes, said = evidence.truth[name], split_axes(evidence.case), list[Cause]()
    if kind_of(name) == "logits":
        axes |= {"data ranks and micro-batches": axes.get("dp", 1) * evidence.case.micro}
    if (value := evidence.merged.tensors.get(name)) is not None:
        said += what_if(evidence, name, value) or from_norms(evidence, name)
        said = said or causes(value, truth, axes, _neighbours(evidence, name))
    elif check == "replicas":
        mine = {rank: by[0].local for rank, by in blocks_of(evidence, name).items()}
        if said := not_finite(mine, truth) or drift(mine, truth):
            return said
        said += partial_sums(mine, truth, axes) + from_norms(evidence, name)
    said += _loss_of_parts(evidence, name)
    return _biases(evidence, name, [cause for cause in said if cause.id != "more_classes" or kind_of(name) == "loss"])


def _of_another_replica(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """What the first tensor tells whose replicas differ: one whose truth is next to nothing tells nothing."""
    axes = split_axes(evidence.case)
    for name in wrong:
        if name in evidence.truth and name not in evidence.merged.tensors:
            mine = {rank: by[0].local for rank, by in blocks_of(evidence, name).items()}
            if said := partial_sums(mine, evidence.truth[name], axes):
                return said
    return []


def _biases(evidence: Evidence, name: str, said: list[Cause]) -> list[Cause]:
    """Tell a bias that is missing from one that is added too often: both are one vector in every row."""
    bias = evidence.shares.get(f"start/{name.removeprefix('act/')}.bias")
    value = evidence.merged.tensors.get(name)
    if bias is None or value is None or not any(cause.id == "bias_per_rank" for cause in said):
        return said
    extra = (value.double() - evidence.truth[name].double()).flatten(0, -2).mean(0)
    if not same(extra, -bias):
        return said
    return [Cause(id="bias_missing", words="the bias is not in it: never added")]


def _loss_of_parts(evidence: Evidence, name: str) -> list[Cause]:
    """Whether ranks disagree on a loss although its logits are right: then the wrong is done in between."""
    kind, _, step = name.partition("/")
    logits = evidence.merged.tensors.get(f"logits/{step}")
    if kind != "loss" or name in evidence.merged.tensors or logits is None:
        return []
    if not same(logits, evidence.truth[f"logits/{step}"]):
        return []
    words = (
        "the logits are right and the loss differs between ranks: part of it (a sum, the mean of label smoothing) is "
        "taken over each rank's own part of the vocabulary"
    )
    return [Cause(id="loss_by_parts", words=words)]


def _neighbours(evidence: Evidence, name: str) -> dict[str, Tensor]:
    """Truths of the same kind and another step: what a stale tensor would equal."""
    kind, _, rest = name.partition("/")
    return {
        other: tensor
        for other, tensor in evidence.truth.items()
        if rest.isdigit() and other != name and kind_of(other) == kind
    }


def _blame(parted: Difference) -> Cause:
    """What a difference between ledger and expectation usually means."""
    line = parted.line
    if parted.kind == "missing":
        left = "each rank keeps its partial sum" if "reduce" in line.op else "ranks work on what they have alone"
        return Cause(id="missing_call", words=f"the {line.op} over {line.axis} is left out: {left}")
    if parted.kind == "extra":
        return Cause(id="extra_call", words=f"one {line.op} over {line.axis} too many: done twice, or not needed")
    assert parted.expected and parted.found  # the third kind has both sides
    expected, found = parted.expected, parted.found
    changed = [field for field in _FIELDS if getattr(found, field) != getattr(expected, field)]
    told = [f"{field} {getattr(found, field) or '-'} instead of {getattr(expected, field) or '-'}" for field in changed]
    return Cause(id=_changed(expected, found), words="the call is made otherwise: " + ", ".join(told))


def _changed(expected: Line, found: Line) -> str:
    """The cause of a call that is made otherwise: what weighs most of that which changed."""
    if (expected.axis, expected.group_size) != (found.axis, found.group_size):
        return "wrong_group"
    if expected.op != found.op:
        return "wrong_op"
    if expected.reduce_op != found.reduce_op:
        return "averaged" if (expected.reduce_op, found.reduce_op) == ("sum", "avg") else "wrong_op"
    if (expected.dtype, expected.payload_bytes) != (found.dtype, found.payload_bytes):
        return "wrong_payload"
    return "wrong_place"
