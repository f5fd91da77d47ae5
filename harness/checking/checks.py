"""All checks of a case, in one table, and the one function that runs them.

A check is a pure function of the evidence; None means that there is nothing to check (the subject returned nothing of
the kind), and then no verdict is claimed. An exception inside a check is `unknown` with its text, never a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from harness.checking.coverage import coverage
from harness.checking.data_checks import data, tokens, truth
from harness.checking.evidence import UNKNOWN, Evidence, Finding
from harness.checking.exact_checks import determinism, layout, parallelism, recording, replicas, saved, waits
from harness.checking.group_checks import groups
from harness.checking.initial_value_checks import initial_values
from harness.checking.ledger_checks import ledger
from harness.checking.mask_checks import masks
from harness.checking.numeric_checks import NUMERIC_KINDS, numeric
from harness.checking.overlap_checks import overlap
from harness.checking.regrouping import regrouping
from harness.errors import error_text

Check = Callable[[Evidence], Finding | None]

CHECKS: Mapping[str, Check] = {
    "coverage": coverage,
    "data": data,
    "merge": layout,
    "replicas": replicas,
    **{name: numeric(name) for name in NUMERIC_KINDS},
    "initial_values": initial_values,
    "masks": masks,
    "tokens": tokens,
    "saved": saved,
    "ledger": ledger,
    "groups": groups,
    "waits": waits,
    "overlap": overlap,
    "parallelism": parallelism,
    "determinism": determinism,
    "recording": recording,
}
"""Name -> check. Layouts come before numbers, numbers in the order in which training computes them. A name that stands
twice keeps its first place."""


LAWS: Mapping[str, Check] = {"truth": truth, "regrouping": regrouping}
"""Checks of a subject with a truth of its own: of that truth, and of other groupings of the batch, which need none."""


def examine(evidence: Evidence, checks: Mapping[str, Check] = CHECKS) -> dict[str, Finding]:
    """The findings of every check that applied, by its name."""
    findings: dict[str, Finding] = {}
    for name, check in checks.items():
        try:
            finding = check(evidence)
        except Exception as problem:  # a broken check must not hide the others, and is no verdict on the subject
            text = f"the check itself failed: {error_text(problem)}"
            finding = Finding(verdict=UNKNOWN, message=text, unchecked=(f"everything that {name} looks at",))
        if finding is not None:
            findings[name] = finding
    return findings
