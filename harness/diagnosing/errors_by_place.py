"""Every tensor of a failed case with its error and where it is computed, and the first place: rows of `errors.csv`.

A verdict names only the worst tensor. These rows have every tensor, so that a report can show where the error began
and how it spread. Errors and limits are ratios (harness.checking.measures.tolerance). The last row of a case is its
first place: it has `first` = "yes", no name and no error.
"""

from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS, kind_of
from shardproof.harness.checking.measuring import compare_with_truth, sizes_of
from shardproof.harness.checking.records import RecordedRun, Truth
from shardproof.harness.diagnosing.causes.places import order_by_time, place_of
from shardproof.harness.verdicts.facts import First

ERROR_COLUMNS = ("case", "name", "step", "phase", "region", "error", "allowed", "first")
_KINDS = frozenset(kind for kinds in NUMERIC_KINDS.values() for kind in kinds)


def error_rows(run: RecordedRun, truth: Truth, text: str, first: First) -> list[tuple[object, ...]]:
    """The rows of ERROR_COLUMNS in the order of training; `text` is the case's."""
    steps = run.case.steps
    known = [name for name in truth.tensors if name in run.tensors and kind_of(name) in _KINDS]
    sizes = sizes_of(run, truth, [name for name in truth.tensors if kind_of(name) in _KINDS])
    rows: list[tuple[object, ...]] = []
    for name in order_by_time(known, steps):
        place, measured = place_of(name, steps), compare_with_truth(run, truth, name, sizes.get(kind_of(name), 0.0))
        rows.append((text, name, place.step, place.phase, place.module, measured.error, measured.allowed, ""))
    if first.phase:
        rows.append((text, "", max(first.step, 0), first.phase, first.region, 0.0, 0.0, "yes"))
    return rows
