"""The check of packed rows: no document changes another one, and no gradient of one reaches another one's tokens.

Both are exact: a document that is not read adds nothing at all, neither to a value nor to a gradient. Runs of one step
tell it (harness.running.trials.document_runs). So it needs no dense model, and it notices what a dense model does too.
"""

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.records import DocumentLeak, Documents
from shardproof.harness.verdicts.facts import note_unchecked
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN


def check_documents(documents: Documents) -> Finding:
    """Whether documents that share a row, a step or ranks are computed as if each were alone."""
    if documents.problem:
        return Finding(verdict=UNKNOWN, message=f"documents could not be told apart: {documents.problem}")
    if documents.count < 2:
        message = "the step has one document, so nothing can cross a border; legal: rows of several documents"
        return Finding(verdict=UNKNOWN, message=message)
    leak = documents.leak
    if leak is None:
        message = f"{documents.count} documents: none changes another one, and no gradient crosses a border"
        return Finding(verdict=PASS, message=message)
    if leak.rounding:
        reason = "a number of rows that changes with what they hold can round otherwise"
        message = f"{_describe_leak(leak)}, as little as rounding may change it: {reason}"
        return Finding(verdict=UNKNOWN, message=message, notes=note_unchecked("borders of documents"))
    return Finding(verdict=FAIL, message=_describe_leak(leak), ranks=(leak.rank,), phase=leak.phase)


def _describe_leak(leak: DocumentLeak) -> str:
    """Which document reaches which, and between which lines of the subject."""
    where = f"between {leak.before} and {leak.place}" if leak.before else f"at {leak.place}"
    token = f"token {leak.token} on rank {leak.rank}"
    if leak.phase == "forward":
        return f"document {leak.of} changes document {leak.other}: {token} changes by {leak.gap:.3g} {where}"
    found = f"{token} gets {leak.gap:.3g} more of it {where}"
    return f"the gradient of document {leak.of} reaches document {leak.other}: {found}"
