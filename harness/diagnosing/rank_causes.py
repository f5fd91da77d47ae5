"""Likely causes of what went wrong in one case; none where the evidence does not single one out.

A bug has one first place, and what comes later follows from it. Causes are looked for there alone, in this order, and
the first that is found is reported.

    1  what a check states by itself: a group of other ranks, a layout, a handle that was never waited for
    2  rounding that several ranks alone do; masks of dropout that are equal, or independent, and must not be; numbers
       drawn on one side alone; the dense model under another rule (`what_ifs`), when it explains the wrong tensors
       that it speaks of; a loss over too many classes, or over each rank's part of them; the first wrong module that
       was found without a declared layout
    3  the first call that parts from the expectation, when it comes before the first wrong tensor
    4  what the numbers of the first wrong tensors look like: counts, factors, places
    5  a call that parts later, where it may be behind the first wrong number: a loss is summed in grad_sync
    6  parameters without a gradient, where nothing above explains them; they come before 3 where the first wrong number
       is made of gradients
    7  what is usually behind a check that nothing else explains
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from harness.checking.call_checks import lists_text, strays
from harness.checking.evidence import FAIL, Evidence, Finding
from harness.checking.measures.kinds import kind_of
from harness.checking.measures.many_tensors import kind_rms
from harness.checking.measures.tolerance import own_share
from harness.checking.measuring import compared
from harness.diagnosing.by_numbers import by_numbers
from harness.diagnosing.rules.causes import MEANT, Cause, reported
from harness.diagnosing.rules.factors import UNDECIDED
from harness.diagnosing.rules.layouts import from_flaws
from harness.diagnosing.rules.losses import from_parts, more_classes
from harness.diagnosing.rules.masks import from_masks
from harness.diagnosing.rules.places import comparable
from harness.diagnosing.rules.proofs import Explained
from harness.diagnosing.rules.what_ifs import what_if
from harness.differences import Difference
from harness.outcome.merging import Merged
from harness.terms import EventKey

_STATED: Mapping[str, tuple[str, str]] = {
    "data": ("data_path", "the code that reads the data, which the dense model and the ranks have in common"),
    "truth": (
        "other_model",
        "its weights, or other numbers, are drawn in the case's dtype, where the same seed gives others: draw them in "
        "float64 and round them, torch.randn(..., dtype=torch.float64).to(dtype)",
    ),
    "coverage": (
        "uncheckable",
        "names that are not the canonical ones (loss/<step>, grad/<parameter>, ...), or a subject that returns nothing",
    ),
    "merge": ("layout", "offsets of another rank, a padded or transposed shard, or a rank that leaves its part out"),
    "waits": ("not_waited", "the handle was dropped before its wait()"),
    "parallelism": ("not_parallel", "the split was done to a tensor that is not used, or undone by what followed it"),
    "determinism": (
        "not_deterministic",
        "uninitialised memory, a random number without a seed, or a sum in no fixed order",
    ),
}
"""Checks that are a cause by themselves and come before any number: check -> (cause, words)."""
_USUAL: Mapping[str, tuple[str, str]] = {
    "overlap": ("exposed", "the call is awaited where it is issued, or is no longer asynchronous"),
    "recording": ("recording", "a program that asks whether modules or optimizers are watched, or that measures time"),
}
"""Usual causes behind a check that nothing else explains: check -> (cause, words)."""

_AFTER_GRADIENTS = ("grad_norm", "param", "param_after")
"""Kinds of numbers that are made of the gradients of parameters."""
_COUNTED = {
    "missing": ("missing_call", "calls that this term counts are left out"),
    "extra": ("extra_call", "more calls than this term counts: done twice, or not needed"),
    "wrong": ("wrong_payload", "the calls that this term counts are of other sizes"),
}
"""Usual causes when a term with fields left out does not hold: kind of the difference -> (cause, words)."""


def likely(
    evidence: Evidence,
    findings: Mapping[str, Finding],
    wrong: Sequence[str],
    parted: Difference | None,
    *,
    call_first: bool,
) -> tuple[Cause, ...]:
    """The causes of a case's failures; several are alternatives that fit equally well.

    `wrong` are all wrong names in the order of computation; `call_first`: `parted` comes before the first of them.
    """
    if causes := _from_groups(evidence):  # whatever else is wrong follows from a call over other ranks
        return tuple(causes)
    failed = [check for check, finding in findings.items() if finding.verdict == FAIL]
    by_check = [reported(known, words, findings[check]) for check, (known, words) in _STATED.items() if check in failed]
    by_call = [_blame(parted)] if parted else []
    if by_check and by_check[0].id == "not_waited" and parted and parted.kind == "extra":
        from_there = (bool(parted.caller) and work.caller.startswith(parted.caller) for work in evidence.unwaited)
        if evidence.unwaited and all(from_there):  # the call that was not waited for is the extra one
            return tuple(by_call)
    if call_first and by_check and by_check[0].id == "layout" and by_call[0].id == "wrong_group":
        return tuple(by_call)  # parts that other ranks sum are other parts
    if by_check:
        return tuple((from_flaws(evidence, wrong) if "merge" in failed else []) or by_check[:1])
    if parted and parted.found and parted.found.dtype in evidence.island and by_call[0].id == "wrong_payload":
        return tuple(by_call)  # the call itself sends in the lower precision
    if evidence.island:
        words = f"explained by rounding to {evidence.island}; the case is in {evidence.case.dtype}"
        words += f", and on one rank the subject does not round so; {MEANT}"
        return (reported("shorter_dtype", words, evidence.island),)
    if causes := from_masks(evidence, findings, wrong):
        return tuple(causes)
    if evidence.drawn:
        words = f"{evidence.drawn}, so nothing behind it can agree: switch that off for the proof, or seed it by the "
        words += "numbers of the samples (case.samples), on ranks and truth"
        return (reported("other_numbers", words, evidence.drawn),)
    by_call = by_call if parted and _may_cause(evidence, parted, wrong, call_first=call_first) else []
    call_first = bool(by_call) and call_first and by_call[0].id != "wrong_place"  # another phase changes no number
    numbers = [name for name in wrong if name in evidence.truth and comparable(evidence, name)]
    causes = (what_if(evidence, numbers) or more_classes(evidence, numbers[0], parted)) if numbers else []
    causes = within_limits(evidence, causes or (from_parts(evidence, numbers[0]) if numbers else []))
    causes = causes or _from_located(evidence)
    if not causes and numbers and kind_of(numbers[0]) in _AFTER_GRADIENTS:
        causes = _unused(evidence)
    if not causes and not call_first:
        causes = within_limits(evidence, by_numbers(evidence, numbers)) if numbers else []
    causes = causes or by_call or _unused(evidence)
    usual = [reported(known, words, findings[check]) for check, (known, words) in _USUAL.items() if check in failed]
    return tuple(causes or usual[:1])


def _from_located(evidence: Evidence) -> list[Cause]:
    """The causes that the numbers of the first wrong module show, under any layout that shows one."""
    if (located := evidence.located) is None:
        return []
    if axis := located.summed:
        words = f"the ranks' values add up to the truth over {axis}: each holds one partial sum, never reduced"
        return [reported("not_summed", words, located)]
    name = f"{'act' if located.phase == 'forward' else 'act_grad'}/{located.module}"
    for value, truth in located.shown:
        merged = Merged(tensors={**evidence.merged.tensors, name: value}, flaws=evidence.merged.flaws)
        seen = replace(evidence, truth={**evidence.truth, name: truth}, merged=merged, shares={}, others=())
        if causes := by_numbers(seen, [name]):  # cases of other sizes are not searched for their first wrong module
            return [replace(c, words=f"{c.words}{UNDECIDED}", follows=()) if c.follows else c for c in causes]
    return []


def _from_groups(evidence: Evidence) -> list[Cause]:
    """The first axis whose calls ran over ranks that it does not have, with the rank lists seen and the legal ones."""
    stray_calls = strays(evidence)
    if not stray_calls:
        return []
    axis = stray_calls[0].axis
    seen = lists_text(event.group for event in stray_calls if event.axis == axis)
    words = f"calls named {axis} run over the ranks {seen}; the rank lists of axis {axis} are "
    return [reported("wrong_group", words + lists_text(evidence.axes[axis]), stray_calls)]


def _blame(parted: Difference) -> Cause:
    """Usual cause of a difference between ledger and expectation."""
    line = parted.line
    if parted.counted:
        return reported(*_COUNTED[parted.kind], parted)
    if parted.kind == "missing":
        left = "each rank keeps its partial sum" if "reduce" in line.op else "ranks work on what they have alone"
        return reported("missing_call", f"the {line.op} over {line.axis} is left out: {left}", parted)
    if parted.kind == "extra":
        words = f"one {line.op} over {line.axis} too many: done twice, or not needed"
        return reported("extra_call", words, parted)
    assert parted.expected and parted.found  # the third kind has both sides
    expected, found = parted.expected, parted.found
    pairs = {field: (getattr(found, field), getattr(expected, field)) for field in EventKey.__slots__}
    changes = [
        f"{field} {one or '-'} instead of {other or '-'}" for field, (one, other) in pairs.items() if one != other
    ]
    known = _changed(expected, found)
    averaged = f"averaged over {found.axis} where it must be summed"
    meaning = averaged if known == "averaged" else "the call is made otherwise"
    return reported(known, f"{meaning}: " + ", ".join(changes), parted)


def _may_cause(evidence: Evidence, parted: Difference, wrong: Sequence[str], *, call_first: bool) -> bool:
    """Whether a call may be behind the first wrong number: it comes before that, or before its sum in grad_sync.

    Of a module that never ran, and of parameters without a gradient, more is missing than a call.
    """
    output = f"act/{parted.line.region}"
    never_ran = parted.line.phase == "forward" and output in evidence.truth and output not in evidence.returned
    detached = parted.line.phase != "forward" and bool(_unused(evidence))
    fewer = parted.kind == "missing" or _blame(parted).id == "wrong_payload"
    summed = parted.line.phase == "grad_sync" and wrong[:1] and wrong[0].startswith("loss/")
    return not (fewer and (never_ran or detached)) and bool(call_first or summed)


def _unused(evidence: Evidence) -> list[Cause]:
    """The cause of parameters that stay as they were, and of which no rank returned a gradient as of others."""

    def stays(name: str) -> bool:
        value, start = evidence.merged.tensors.get(f"param/{name}"), evidence.shares.get(f"start/{name}")
        return value is not None and start is not None and torch.equal(value.double(), start.double())

    names = [name for name in evidence.truth if kind_of(name) == "grad"]
    lost = [name for name in names if name not in evidence.returned and stays(name.removeprefix("grad/"))]
    if not lost or evidence.returned.isdisjoint(names):
        return []
    listed = f"{', '.join(lost[:3])}{' ...' * (len(lost) > 3)}"
    words = f"no rank returned {listed}, and the parameters did not move: not used, detached or frozen"
    return [reported("unused", words, lost)]


def _changed(expected: EventKey, issued: EventKey) -> str:
    """The cause id of a call that differs: by its group, else its op, its reduction, its payload, its place."""
    if (expected.axis, expected.group_size) != (issued.axis, issued.group_size):
        return "wrong_group"
    if expected.op != issued.op:
        return "wrong_op"
    if expected.reduce_op != issued.reduce_op:
        return "averaged" if (expected.reduce_op, issued.reduce_op) == ("sum", "avg") else "wrong_op"
    if (expected.dtype, expected.payload_bytes) != (issued.dtype, issued.payload_bytes):
        return "wrong_payload"
    return "wrong_place"


def within_limits(evidence: Evidence, causes: Iterable[Cause]) -> list[Cause]:
    """Causes that leave no more of a wrong tensor than its check allows: the last word before they are reported.

    The first merged tensor that a cause speaks of decides: what comes after it was computed from wrong values.
    """
    names = {id(tensor): name for name, tensor in evidence.merged.tensors.items()}
    return [cause for cause in causes if _allowed(evidence, names, cause)]


def _allowed(evidence: Evidence, names: Mapping[int, str], cause: Cause) -> bool:
    """Whether the tensor would pass if the residual of the prediction were its error.

    True for causes of one rank's part, of a step's movement, or of where the truth is 0 and has no size to measure by.
    A prediction that states how much it may leave (`Explained.left`) is one of a rule with a limit of its own.
    """
    spoken = (p for p in cause.proof if isinstance(p, Explained) and p.left is None and id(p.value) in names)
    proof = next(spoken, None)
    if proof is None or not bool(proof.truth.any()):
        return True
    name, tensors = names[id(proof.value)], evidence.merged.tensors
    truth, guess = evidence.truth[name].double(), proof.guess.double()
    left = proof.value.double() - guess
    left = left.where(left.abs() > own_share(evidence.dtype_of(name)) * guess.abs(), 0.0)
    corrected = truth + left / max(1.0, float(guess.norm() / truth.norm()))
    merged = Merged(tensors={**tensors, name: corrected.to(proof.value.dtype)}, flaws=evidence.merged.flaws)
    alike = {other: tensor for other, tensor in evidence.truth.items() if kind_of(other) == kind_of(name)}
    return compared(replace(evidence, merged=merged), name, kind_rms(alike).get(kind_of(name), 0.0)).right
