"""Causes that a check or a run states by itself, whatever the tensors look like."""

from collections.abc import Collection, Mapping

from shardproof.harness.checking.measures.kinds import never_made, step_of
from shardproof.harness.diagnosing.causes.cause import Cause, report_cause
from shardproof.harness.diagnosing.causes.hypothesis import Failure
from shardproof.harness.diagnosing.causes.places import blocks_of
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.verdicts.facts import state_fact
from shardproof.harness.verdicts.verdict import FAIL

_STATED: Mapping[str, tuple[str, str]] = {
    "truth": ("stated", "truth_by_dtype_alone"),
    "coverage": ("stated", "no_name_of_truth"),
    "merge": ("layout", "parts_no_whole"),
    "waits": ("not_waited", "no_wait"),
    "parallelism": ("stated", "nothing_parallel"),
    "determinism": ("stated", "not_repeatable"),
}
"""Checks that are a cause by themselves: check -> ids of the cause and of its fact."""
_USUAL: Mapping[str, str] = {"overlap": "no_product", "recording": "watched_differs"}
"""Checks that state a cause if nothing else explains them: check -> id of its fact."""


def first_stated(failure: Failure) -> str:
    """The first failed check that is a cause by itself; "" if there is none."""
    return next(iter(_select_failed_checks(failure, _STATED)), "")


def of_checks(failure: Failure) -> list[Cause]:
    """The cause of the first failed check that is a cause by itself; if `merge` failed, first a part told as the whole.

    A check that names tensors states no cause if another tensor is wrong before them.
    """
    failed = [check for check in _select_failed_checks(failure, _STATED) if _comes_first(failure, check)]
    part = _part_as_whole(failure) if "merge" in failed else []
    stated = [(*_STATED[check], failure.findings[check]) for check in failed[:1]]
    return part or [report_cause(cause, state_fact(fact), finding) for cause, fact, finding in stated]


def _comes_first(failure: Failure, check: str) -> bool:
    """Whether no tensor is wrong before those that this check names."""
    named = {*failure.findings[check].names}
    return not named or named.isdisjoint(failure.wrong) or failure.wrong[0] in named


def _part_as_whole(failure: Failure) -> list[Cause]:
    """Whether the first tensor of a wrong shape was returned as if one rank's part were the whole."""
    evidence = failure.evidence
    flawed = {flaw.name for flaw in evidence.run.merged.flaws if flaw.kind == "shape"}
    name = next((name for name in failure.wrong if name in flawed and name in evidence.truth.tensors), "")
    true = tuple(evidence.truth.tensors[name].shape) if name else ()
    shapes = {block.global_shape for blocks in blocks_of(evidence.run, name).values() for block in blocks} - {true}
    for axis, size in split_axes(evidence.run.case).items() if name else ():
        for dim, length in enumerate(true):
            if shapes == {(*true[:dim], length // size, *true[dim + 1 :])}:
                part = state_fact("part_as_whole", size=size, dim=dim, axis=axis, shape=true)
                return [report_cause("layout", part, shapes)]
    return []


def guess_usual_causes(failure: Failure) -> list[Cause]:
    """The statement of the first failed check of _USUAL; that of overlap only if no number is wrong."""
    failed = [check for check in _select_failed_checks(failure, _USUAL) if check != "overlap" or not failure.numbers]
    return [report_cause("stated", state_fact(_USUAL[check]), failure.findings[check]) for check in failed[:1]]


def _select_failed_checks(failure: Failure, checks: Collection[str]) -> list[str]:
    """Those of these checks that fail."""
    return [check for check in checks if check in failure.findings and failure.findings[check].verdict == FAIL]


def rounded_on_ranks(failure: Failure) -> list[Cause]:
    """Rounding to a lower precision that happens on several ranks, and not on one rank alone."""
    lower = failure.evidence.search.low_precision_op
    fact = state_fact("rounded_on_ranks", lower=lower, dtype=failure.evidence.run.case.dtype)
    return [report_cause("shorter_dtype", fact, lower)] if lower else []


def taken_where_skipped(failure: Failure) -> list[Cause]:
    """States that the optimizer made in a step that the truth skips, if they come before any wrong number."""
    evidence, first = failure.evidence, next(iter(failure.wrong), "")
    made = never_made(evidence.truth.tensors, evidence.run.returned)
    return [report_cause("stated", state_fact("step_taken", step=step_of(first)), made)] if first in made else []


def guess_wrong_beginnings(failure: Failure) -> list[Cause]:
    """Samples, or initial values, of the ranks that differ from the truth's or from each other."""
    samples, start = failure.evidence.search.other_samples, failure.evidence.search.other_start
    known = [("other_samples", samples), ("other_start", start)]
    return [report_cause(id, fact, fact) for id, fact in known if fact][:1]


def guess_drawn_numbers(failure: Failure) -> list[Cause]:
    """Numbers that only the ranks draw, or only the dense model."""
    drawn = failure.evidence.search.drawn
    return [report_cause("other_numbers", drawn, drawn)] if drawn else []
