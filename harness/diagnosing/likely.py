"""Likely causes of what went wrong in one case; none where the evidence does not single one out.

One bug has one first place, and what comes later follows from it: causes are looked for there alone, in this order, and
the first that is found is reported.

    1  what a check states by itself: a group of other ranks, a layout, a handle that was never waited for
    2  the dense model under another rule (`what_ifs`), when it explains the wrong tensors that it speaks of; a loss
       whose softmax counts every class once a rank
    3  the first call that parts from the expectation, when it comes before the first wrong tensor
    4  what the numbers of the first wrong tensors look like: counts, factors, places
    5  a call that parts later: no number makes a program issue other calls
    6  what is usually behind a check that nothing else explains
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.checking.evidence import FAIL, Evidence, Finding, split_axes
from harness.checking.group_checks import lists_text, strays
from harness.checking.tolerance import is_state, kind_of
from harness.diagnosing.rules.causes import Cause
from harness.diagnosing.rules.factors import from_factor
from harness.diagnosing.rules.layouts import from_flaws
from harness.diagnosing.rules.losses import from_parts, more_classes
from harness.diagnosing.rules.norms import from_norms
from harness.diagnosing.rules.offsets import from_offsets
from harness.diagnosing.rules.optimizer.steps import from_states
from harness.diagnosing.rules.optimizer.updates import from_start, from_updates
from harness.diagnosing.rules.patterns import causes, drift, not_finite, partial_sums, rounded
from harness.diagnosing.rules.places import blocks_of, comparable, wrong_ranks
from harness.diagnosing.rules.regions import from_regions
from harness.diagnosing.rules.sums import from_counts, from_losses, from_shares
from harness.diagnosing.rules.terms import from_terms
from harness.diagnosing.rules.what_ifs import what_if
from harness.differences import Difference, EventKey

__all__ = ["likely"]

_STATED: Mapping[str, tuple[str, str]] = {
    "data": (
        "data_path",
        "the code that reads the data, which the dense model and the ranks have in common",
    ),
    "merge": (
        "layout",
        "offsets of another rank, a padded or transposed shard, or a rank that leaves its part out",
    ),
    "waits": ("not_waited", "the handle was dropped before its wait()"),
    "parallelism": (
        "not_parallel",
        "the split was done to a tensor that is not used, or undone by what followed it",
    ),
    "determinism": (
        "not_deterministic",
        "uninitialised memory, a random number without a seed, or a sum in no fixed order",
    ),
}
"""Checks that are a cause by themselves and come before any number: check -> (cause, words)."""
_USUAL: Mapping[str, tuple[str, str]] = {
    "coverage": (
        "uncheckable",
        "names that are not the canonical ones (loss/<step>, grad/<parameter>, ...), or a subject that returns nothing",
    ),
    "overlap": ("exposed", "the call is awaited where it is issued, or is no longer asynchronous"),
    "recording": (
        "recording",
        "a program that asks whether modules or optimizers are watched, or that measures time",
    ),
}
"""What is usually behind a check that nothing else explains: check -> (cause, words)."""
THROUGHOUT = 0.9
"""Share of a shard's elements that are wrong when the shard is."""


def likely(
    evidence: Evidence,
    findings: Mapping[str, Finding],
    wrong: Sequence[str],
    parted: Difference | None,
    *,
    call_first: bool,
) -> tuple[Cause, ...]:
    """The causes of a case's failures; several are alternatives that fit equally well.

    `wrong` are all wrong names in the order in which training computes; `call_first` says that `parted` comes before
    the first of them.
    """
    if said := _from_groups(evidence):  # whatever else is wrong follows from a call over other ranks
        return tuple(said)
    failed = [check for check, finding in findings.items() if finding.verdict == FAIL]
    by_check = [Cause(id=known, words=words) for check, (known, words) in _STATED.items() if check in failed]
    by_call = [_blame(parted)] if parted else []
    if by_check and by_check[0].id == "not_waited" and parted and _waits_for_none(evidence, parted):
        return tuple(by_call)
    if by_check:
        return tuple((from_flaws(evidence, wrong) if "merge" in failed else []) or by_check[:1])
    call_first = call_first and by_call[0].id != "wrong_place"  # that changes no number
    numbers = [name for name in wrong if name in evidence.truth and comparable(evidence, name)]
    said = (what_if(evidence, numbers) or more_classes(evidence, numbers[0], parted)) if numbers else []
    said = said or (from_parts(evidence, numbers[0]) if numbers else [])
    if not said and not call_first:
        said = _by_numbers(evidence, numbers) if numbers else []
    said = said or by_call
    usual = [Cause(id=known, words=words) for check, (known, words) in _USUAL.items() if check in failed]
    return tuple(said or usual[:1])


def _from_groups(evidence: Evidence) -> list[Cause]:
    """The first axis whose calls ran over ranks that it does not have, with the rank lists seen and the legal ones."""
    found = strays(evidence)
    if not found:
        return []
    axis = found[0].axis
    seen = lists_text(event.group for event in found if event.axis == axis)
    words = f"calls named {axis} run over the ranks {seen}; the rank lists of axis {axis} are "
    return [Cause(id="wrong_group", words=words + lists_text(evidence.axes[axis]))]


def _waits_for_none(evidence: Evidence, parted: Difference) -> bool:
    """Whether all calls that were never waited for are the one too many: there was no use to wait for."""
    from_there = (bool(parted.caller) and work.caller.startswith(parted.caller) for work in evidence.unwaited)
    return parted.kind == "extra" and bool(evidence.unwaited) and all(from_there)


def _by_numbers(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """What the first wrong tensors look like. Logits of a later step follow from the parameters before them."""
    first, kind = wrong[0], kind_of(wrong[0])
    if kind in ("logits", "loss", "grad_norm") and not first.endswith("/0") and evidence.states is None:
        return from_updates(evidence, _parameters(wrong))
    alike = [name for name in wrong if kind_of(name) == kind]
    torn = [name for name in alike if name not in evidence.merged.tensors]
    if first in torn and (said := _of_replicas(evidence, torn)):
        return said
    if kind in ("loss", "act_grad", "grad") and (said := from_shares(evidence, _gradients(wrong))):
        return said
    if kind == "loss" and (said := from_losses(evidence, first) or _of_numbers(evidence, alike)):
        return said
    if kind == "loss" and "tokens/0" in wrong:  # a loss is divided by them
        return _of_tokens(evidence, wrong)
    if kind == "grad_norm":
        said = from_norms(evidence, first) or _of_numbers(evidence, alike) or _of_earlier(evidence, first)
        return said or from_states(evidence, wrong)
    if kind == "tokens":
        return _of_tokens(evidence, wrong)
    if is_state(first) or kind == "param":
        value = evidence.merged.tensors.get(first)
        said = [] if value is None else rounded(value, evidence.truth[first])
        return said or from_states(evidence, wrong) or from_updates(evidence, _parameters(wrong))
    said = _of_values(evidence, alike if kind == "grad" else alike[:1])
    if not said and kind == "act":  # a weight may have been wrong from the start
        return from_start(evidence, wrong)
    return said


def _of_numbers(evidence: Evidence, alike: Sequence[str]) -> list[Cause]:
    """One factor on the same number of several steps, or one that is a size of the case on the first.

    A factor that makes another whole number of the tokens is none: they may be counted otherwise.
    """
    said = from_factor(evidence, alike)
    first = evidence.merged.tensors.get(alike[0])
    if said and said[0].id == "constant_factor" and first is not None and "tokens" in evidence.shares:
        count = float(evidence.shares["tokens"].sum() * evidence.truth[alike[0]].double() / first.double())
        said = [] if math.isclose(count, round(count), rel_tol=1e-6) else said
    return said or from_factor(evidence, alike[:1])


def _of_tokens(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    counts = [name for name in wrong if kind_of(name) == "tokens"]
    return from_counts(evidence, counts[0]) or from_factor(evidence, counts[:1])


def _of_earlier(evidence: Evidence, name: str) -> list[Cause]:
    """Whether a number of one step is that of another."""
    value = evidence.merged.tensors.get(name)
    return [] if value is None else causes(value, evidence.truth[name], {}, _neighbours(evidence, name))


def _parameters(wrong: Sequence[str]) -> list[str]:
    return [name for name in wrong if kind_of(name) == "param"]


def _gradients(wrong: Sequence[str]) -> list[str]:
    return [name for name in wrong if kind_of(name) == "grad"]


def _of_replicas(evidence: Evidence, torn: Sequence[str]) -> list[Cause]:
    """What values tell that differ between ranks which must hold the same.

    A tensor whose truth is next to nothing tells nothing, so each is looked at until one does.
    """
    axes = split_axes(evidence.case)
    for name in torn:
        mine = {rank: by[0].local for rank, by in blocks_of(evidence, name).items()}
        truth = evidence.truth[name]
        said = not_finite(mine, truth) or drift(mine, truth) or partial_sums(mine, truth, axes)
        if said := said or from_norms(evidence, name):
            return said
    return from_shares(evidence, _gradients([*evidence.truth])) or from_losses(evidence, torn[0])


def _of_values(evidence: Evidence, names: Sequence[str]) -> list[Cause]:
    """What wrong values look like: a factor on all of them, rounded, a term too few, right numbers in other places."""
    known = [name for name in names if name in evidence.merged.tensors]
    if not known:
        return []
    first, truth = known[0], evidence.truth[known[0]]
    value, axes = evidence.merged.tensors[first], split_axes(evidence.case)
    if kind_of(first) == "logits":
        axes |= {"data ranks and micro-batches": axes.get("dp", 1) * evidence.case.micro}
    said = from_factor(evidence, known) or rounded(value, truth) or from_terms(evidence, first)
    said = said or from_offsets(evidence, known) or causes(value, truth, axes, _neighbours(evidence, first))
    return said or from_regions(evidence, first) or _one_shard(evidence, first)


def _one_shard(evidence: Evidence, name: str) -> list[Cause]:
    """Whether a tensor that is cut over an axis is wrong at one place of that axis alone, and all over that part."""
    wrong, blocks = set(wrong_ranks(evidence, name)), blocks_of(evidence, name)
    for axis, size in split_axes(evidence.case).items():
        places = [{ranks[place] for ranks in evidence.axes[axis]} for place in range(size)]
        cut = len({tuple(block.region for block in blocks[rank]) for rank in evidence.axes[axis][0] if rank in blocks})
        if cut == size and wrong in places and all(_throughout(evidence, name, rank) for rank in wrong):
            words = f"only part {places.index(wrong)} of {size} over {axis} is wrong, and nearly all of it"
            return [Cause(id="one_shard", words=words)]
    return []


def _throughout(evidence: Evidence, name: str, rank: int) -> bool:
    """Whether nearly all that a rank holds of a tensor is wrong: some rows are no shard."""
    truth = evidence.truth[name].double()
    limit = 1e-6 * float(truth.square().mean().sqrt())
    for block in blocks_of(evidence, name)[rank]:
        gap = (block.local.double() - truth[tuple(slice(a, b) for a, b in block.region)]).abs()
        if gap.numel() and float((gap > limit).double().mean()) < THROUGHOUT:
            return False
    return True


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
    changed = [field for field in EventKey.__slots__ if getattr(found, field) != getattr(expected, field)]
    told = [f"{field} {getattr(found, field) or '-'} instead of {getattr(expected, field) or '-'}" for field in changed]
    known = _changed(expected, found)
    averaged = f"averaged over {found.axis} where it must be summed"
    meaning = averaged if known == "averaged" else "the call is made otherwise"
    return Cause(id=known, words=f"{meaning}: " + ", ".join(told))


def _changed(expected: EventKey, found: EventKey) -> str:
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
