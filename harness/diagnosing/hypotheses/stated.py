"""Causes that a check or a run states by itself, whatever a tensor looks like."""

from collections.abc import Mapping

from shardproof.harness.checking.evidence import FAIL
from shardproof.harness.diagnosing.causes.cause import MEANT, Cause, reported
from shardproof.harness.diagnosing.causes.hypothesis import Failure
from shardproof.harness.diagnosing.hypotheses.layouts import from_flaws

_STATED: Mapping[str, tuple[str, str]] = {
    "data": ("data_path", "the dense model and the ranks read data that are wrong alike, as the check states"),
    "truth": (
        "other_model",
        "in float32 the dense model is another one than in float64; draw its numbers in float64 and round them, "
        "torch.randn(..., dtype=torch.float64).to(dtype)",
    ),
    "coverage": ("uncheckable", "no name that the subject returns is one of the truth's"),
    "merge": ("layout", "the ranks' parts do not make the full tensor, as the check states"),
    "waits": ("not_waited", "its wait() was never called"),
    "parallelism": (
        "not_parallel",
        "ranks of a case that splits send nothing, or hold everything, as the check states",
    ),
    "determinism": (
        "not_deterministic",
        "two runs of the same ranks on the same data differ: some number does not follow from the case",
    ),
}
"""Checks that are a cause by themselves and come before any number: check -> (cause, words)."""
_USUAL: Mapping[str, tuple[str, str]] = {
    "overlap": ("exposed", "no product is computed between the call and its wait"),
    "recording": ("recording", "the run that is watched and the one that is not differ"),
}
"""Usual causes behind a check that nothing else explains: check -> (cause, words)."""


def first_stated(failure: Failure) -> str:
    """The first check that fails and is a cause by itself, "" where none does."""
    return next(iter(_failed(failure, _STATED)), "")


def of_checks(failure: Failure) -> list[Cause]:
    """The cause of the first failed check that is one by itself; of a layout, what its flaws show."""
    failed = _failed(failure, _STATED)
    flaws = from_flaws(failure.evidence, failure.wrong) if "merge" in failed else []
    return flaws or [reported(*_STATED[check], failure.findings[check]) for check in failed[:1]]


def usual(failure: Failure) -> list[Cause]:
    """The usual cause of the first failed check that nothing else explains."""
    return [reported(*_USUAL[check], failure.findings[check]) for check in _failed(failure, _USUAL)[:1]]


def _failed(failure: Failure, table: Mapping[str, tuple[str, str]]) -> list[str]:
    """These checks, as far as they fail."""
    return [check for check in table if check in failure.findings and failure.findings[check].verdict == FAIL]


def rounded_on_ranks(failure: Failure) -> list[Cause]:
    """Rounding to a lower precision that does not happen on one rank."""
    island = failure.evidence.island
    words = f"explained by rounding to {island}; the case is in {failure.evidence.case.dtype}"
    words += f", and on one rank the subject does not round so; {MEANT}"
    return [reported("shorter_dtype", words, island)] if island else []


def other_samples(failure: Failure) -> list[Cause]:
    """Samples that the ranks read and the dense model does not, or the other way round."""
    samples = failure.evidence.other_samples
    return [reported("other_samples", samples, samples)] if samples else []


def drawn(failure: Failure) -> list[Cause]:
    """Numbers that the ranks draw and the dense model does not."""
    numbers = failure.evidence.drawn
    words = f"{numbers}, so nothing behind it can agree: switch that off for the proof, or seed it by the "
    words += "numbers of the samples (case.samples), on ranks and truth"
    return [reported("other_numbers", words, numbers)] if numbers else []
