"""Causes that a check or a run states by itself, whatever a tensor looks like."""

from collections.abc import Collection, Mapping

from shardproof.harness.diagnosing.causes.cause import MEANT, Cause, report_cause
from shardproof.harness.diagnosing.causes.hypothesis import Failure
from shardproof.harness.diagnosing.causes.places import blocks_of
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.verdicts.verdict import FAIL

_STATED: Mapping[str, tuple[str, str]] = {
    "truth": (
        "stated",
        "in float32 the dense model is another one than in float64; draw its numbers in float64 and round them, "
        "torch.randn(..., dtype=torch.float64).to(dtype)",
    ),
    "coverage": ("stated", "no name that the subject returns is one of the truth's"),
    "merge": ("layout", "the ranks' parts do not make the full tensor, as the check states"),
    "waits": ("not_waited", "its wait() was never called"),
    "parallelism": ("stated", "ranks of a case that splits send nothing, or hold everything, as the check states"),
    "determinism": (
        "stated",
        "two runs of the same ranks on the same data differ: some number does not follow from the case",
    ),
}
"""Checks that are a cause by themselves and come before any number: check -> (cause, words)."""
_USUAL: Mapping[str, str] = {
    "overlap": "no product is computed between the call and its wait",
    "recording": "the run that is watched and the one that is not differ",
}
"""Checks that state a cause where nothing else explains them: check -> words."""


def first_stated(failure: Failure) -> str:
    """The first check that fails and is a cause by itself, "" where none does."""
    return next(iter(_select_failed_checks(failure, _STATED)), "")


def of_checks(failure: Failure) -> list[Cause]:
    """The cause of the first failed check that is one by itself; of a layout, a part that stands for the whole."""
    failed = _select_failed_checks(failure, _STATED)
    part = _part_as_whole(failure) if "merge" in failed else []
    return part or [report_cause(*_STATED[check], failure.findings[check]) for check in failed[:1]]


def _part_as_whole(failure: Failure) -> list[Cause]:
    """Whether the first name whose shape is not the truth's was returned as if one rank's part were all of it."""
    evidence = failure.evidence
    flawed = {flaw.name for flaw in evidence.run.merged.flaws if flaw.kind == "shape"}
    name = next((name for name in failure.wrong if name in flawed and name in evidence.truth.tensors), "")
    true = tuple(evidence.truth.tensors[name].shape) if name else ()
    shapes = {block.global_shape for blocks in blocks_of(evidence.run, name).values() for block in blocks} - {true}
    for axis, size in split_axes(evidence.run.case).items() if name else ():
        for dim, length in enumerate(true):
            if shapes == {(*true[:dim], length // size, *true[dim + 1 :])}:
                words = f"1 of {size} parts along dim {dim} ({axis}) told as the whole: return Shard(local, offsets, "
                return [report_cause("layout", f"{words}{true}) where a rank holds a part", shapes)]
    return []


def guess_usual_causes(failure: Failure) -> list[Cause]:
    """The statement of the first failed check of these; of overlap, where no number is wrong either."""
    failed = [check for check in _select_failed_checks(failure, _USUAL) if check != "overlap" or not failure.numbers]
    return [report_cause("stated", _USUAL[check], failure.findings[check]) for check in failed[:1]]


def _select_failed_checks(failure: Failure, checks: Collection[str]) -> list[str]:
    """These checks, as far as they fail."""
    return [check for check in checks if check in failure.findings and failure.findings[check].verdict == FAIL]


def rounded_on_ranks(failure: Failure) -> list[Cause]:
    """Rounding to a lower precision that does not happen on one rank."""
    island = failure.evidence.search.low_precision_op
    words = f"explained by rounding to {island}; the case is in {failure.evidence.run.case.dtype}"
    words += f", and on one rank the subject does not round so; {MEANT}"
    return [report_cause("shorter_dtype", words, island)] if island else []


def guess_wrong_beginnings(failure: Failure) -> list[Cause]:
    """Samples, or initial values, of the ranks that are others than those of the truth, or of each other."""
    samples, start = failure.evidence.search.other_samples, failure.evidence.search.other_start
    known = [("other_samples", samples), ("other_start", start)]
    return [report_cause(id, words, words) for id, words in known if words][:1]


def guess_drawn_numbers(failure: Failure) -> list[Cause]:
    """Numbers that the ranks draw and the dense model does not."""
    numbers = failure.evidence.search.drawn
    words = f"{numbers}, so nothing behind it can agree: switch that off for the proof, or seed it by the "
    words += "numbers of the samples (case.samples), on ranks and truth"
    return [report_cause("other_numbers", words, numbers)] if numbers else []
