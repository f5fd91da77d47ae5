"""Causes in the calls: the first call that differs from the expectation, and calls over ranks that their axis lacks."""

import torch

from shardproof.harness.checking.call_checks import find_strays
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.records import RecordedRun, Search
from shardproof.harness.diagnosing.causes.cause import Cause, report_cause
from shardproof.harness.diagnosing.causes.hypothesis import STATE, Failure
from shardproof.harness.diagnosing.hypotheses.stated import first_stated
from shardproof.harness.differences import Difference
from shardproof.harness.terms import EventKey
from shardproof.harness.verdicts.facts import state_fact

_AFTER_GRADIENTS = frozenset({"grad_norm", STATE})
"""Kinds of tensors that are made from gradients of parameters."""
_GROUP = frozenset({"axis", "group_size"})
_WORK = frozenset({"op", "reduce_op"})
_PAYLOAD = frozenset({"dtype", "payload_bytes"})
_COUNTED = {
    "missing": ("missing_call", "fewer_than_counted"),
    "extra": ("extra_call", "more_than_counted"),
    "wrong": ("wrong_call", "other_than_counted"),
}
"""For a term that states no single call: kind of the difference -> id of the cause and id of its fact."""


def over_other_ranks(failure: Failure) -> list[Cause]:
    """The cause for the first axis with calls over ranks that it does not have: their rank lists and the legal ones."""
    evidence = failure.evidence
    stray_calls = find_strays(evidence.run.calls, evidence.claims)
    if not stray_calls:
        return []
    axis = stray_calls[0].axis
    ran = {event.group for event in stray_calls if event.axis == axis}
    fact = state_fact("other_ranks", axis=axis, ran=ran, lists=evidence.claims.axes[axis])
    return [report_cause("wrong_group", fact, stray_calls)]


def behind_a_check(failure: Failure) -> list[Cause]:
    """The differing call, if it is behind what a check states.

    Either the call was not waited for, or it ran over other ranks, which hold other parts.
    """
    parted, check = failure.parted, first_stated(failure)
    if parted is None:
        return []
    unwaited = failure.evidence.run.calls.unwaited
    from_there = [bool(parted.caller) and work.caller.startswith(parted.caller) for work in unwaited]
    unexpected = parted.kind in ("extra", "wrong")
    lost = check == "waits" and unexpected and bool(from_there) and all(from_there)
    cause = _blame_difference(parted)
    return [cause] if lost or (check == "merge" and failure.call_first and cause.id == "wrong_group") else []


def in_lower_precision(failure: Failure) -> list[Cause]:
    """The differing call, if it sends in the lower precision to which the ranks round."""
    parted = failure.parted
    if parted is None or parted.found is None or parted.found.dtype not in failure.evidence.search.low_precision_op:
        return []
    return [_blame_difference(parted)] if _other_payload(parted) else []


def before_the_numbers(failure: Failure) -> list[Cause]:
    """The differing call, if it comes before the first wrong tensor. A call in another phase changes no number."""
    parted = failure.parted
    return guess_differing_call(failure) if parted and failure.call_first and not _another_place(parted) else []


def guess_differing_call(failure: Failure) -> list[Cause]:
    """The differing call, if it may be the cause of the first wrong tensor."""
    return [_blame_difference(failure.parted)] if failure.parted and _may_cause(failure, failure.parted) else []


def _blame_difference(parted: Difference) -> Cause:
    """The usual cause of a difference between ledger and closed form."""
    line = parted.line
    if parted.counted:
        cause, fact = _COUNTED[parted.kind]
        return report_cause(cause, state_fact(fact), parted)
    if parted.kind == "missing":
        return report_cause("missing_call", state_fact("call_left_out", op=line.op, axis=line.axis), parted)
    if parted.kind == "extra":
        return report_cause("extra_call", state_fact("call_too_many", op=line.op, axis=line.axis), parted)
    assert parted.expected and parted.found  # this kind has both sides
    expected, found = parted.expected, parted.found
    fields = [field for field in EventKey.__slots__ if getattr(found, field) != getattr(expected, field)]
    changes = [(field, getattr(found, field), getattr(expected, field)) for field in fields]
    return report_cause(
        "wrong_group" if _GROUP & {*fields} else "wrong_call", state_fact("changed_call", changes=changes), parted
    )


def _other_payload(parted: Difference) -> bool:
    """Whether a call differs by its size or dtype, and not by its ranks or what it does."""
    if parted.counted:
        return parted.kind == "wrong"
    changed = {n for n in EventKey.__slots__ if getattr(parted.found, n, "") != getattr(parted.expected, n, "")}
    both = parted.expected is not None and parted.found is not None
    return both and bool(changed & _PAYLOAD) and not changed & (_GROUP | _WORK)


def _another_place(parted: Difference) -> bool:
    """Whether the right call is made, but in another phase or module."""
    expected, found = parted.expected, parted.found
    if parted.counted or expected is None or found is None:
        return False
    return not any(getattr(found, n) != getattr(expected, n) for n in _GROUP | _WORK | _PAYLOAD)


def _may_cause(failure: Failure, parted: Difference) -> bool:
    """Whether a call may cause the first wrong number: it comes before that number, or before its sum in grad_sync.

    A missing call is no cause if a module never ran, or if parameters have no gradient: then more than a call is lost.
    """
    evidence, output = failure.evidence, f"act/{parted.line.region}"
    unreturned = evidence.truth.tensors.keys() - evidence.run.returned
    never_ran = parted.line.phase == "forward" and output in unreturned
    detached = parted.line.phase != "forward" and bool(guess_unused_parameters(failure))
    fewer = parted.kind == "missing" or _other_payload(parted)
    summed = parted.line.phase == "grad_sync" and failure.wrong[:1] and failure.wrong[0].startswith("loss/")
    return not (fewer and (never_ran or detached)) and bool(failure.call_first or summed)


def guess_unused_parameters(failure: Failure) -> list[Cause]:
    """The cause of parameters that do not change and for which no rank returns a gradient, as some do for others."""
    evidence = failure.evidence
    names = [name for name in evidence.truth.tensors if kind_of(name) == "grad"]
    run, search = evidence.run, evidence.search
    lost = [n for n in names if n not in run.returned and _stays_unchanged(run, search, n.removeprefix("grad/"))]
    if not lost or run.returned.isdisjoint(names):
        return []
    return [report_cause("never_updated", state_fact("not_returned", names=lost), lost)]


def unused_before_sums(failure: Failure) -> list[Cause]:
    """The cause of unused parameters, if the first wrong tensor is made from gradients."""
    return guess_unused_parameters(failure) if failure.kind in _AFTER_GRADIENTS else []


def _stays_unchanged(run: RecordedRun, search: Search, parameter: str) -> bool:
    value, start = run.tensors.get(f"param/{parameter}"), search.shares.get(f"start/{parameter}")
    return value is not None and start is not None and torch.equal(value.double(), start.double())
