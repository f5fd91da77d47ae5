"""The check of packed rows: no document changes another one, and no gradient of one reaches another one's tokens.

Both are exact: a document that is not read adds nothing at all, neither to a value nor to a gradient. Runs of one step
tell it (harness.running.trials.document_runs). So it needs no dense model, and it notices what a dense model does too.
"""

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.records import Documents
from shardproof.harness.verdicts.facts import note_unchecked, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN


def check_documents(documents: Documents) -> Finding:
    """Whether documents that share a row, a step or ranks are computed as if each were alone."""
    if documents.problem:
        return Finding(verdict=UNKNOWN, facts=(state_fact("documents_unknown", problem=documents.problem),))
    if documents.count < 2:
        return Finding(verdict=UNKNOWN, facts=(state_fact("one_document"),))
    leak = documents.leak
    if leak is None:
        return Finding(verdict=PASS, facts=(state_fact("documents_apart", documents=documents.count),))
    values = {name: getattr(leak, name) for name in ("of", "other", "token", "rank", "gap", "before", "place")}
    fact = state_fact(f"document_leak_{leak.phase}", **values)
    if leak.rounding:
        facts, notes = (fact, state_fact("leak_as_rounding")), note_unchecked("borders of documents")
        return Finding(verdict=UNKNOWN, facts=facts, notes=notes)
    return Finding(verdict=FAIL, facts=(fact,), ranks=(leak.rank,), phase=leak.phase)
