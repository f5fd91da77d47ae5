"""The checks of a case: `CHECKS` for every subject, and `LAWS` for subjects with a truth of their own.

Some verdicts are not made by a check: `supported` for a case that the subject refuses, `run` for one that raised,
`explanation` for causes that could not be searched, and `truth` for a case that the dense model refuses.

A check is a pure function of the records that its signature names (harness.checking.records). It runs only if all of
them were made, except for parameters with a default. It returns None if there is nothing to check, because the subject
returned nothing of the kind; then there is no verdict. An exception inside a check makes it `unknown` with that text,
never a pass.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import get_args

from shardproof.harness.checking.call_checks import check_groups, check_overlap, check_parallelism, check_waits
from shardproof.harness.checking.coverage import check_coverage, check_layout, check_replicas
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.ledger_checks import check_ledger
from shardproof.harness.checking.mask_checks import check_masks
from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS
from shardproof.harness.checking.numeric_checks import check_tokens, check_update, make_numeric_check
from shardproof.harness.checking.records import RECORDS, Evidence
from shardproof.harness.checking.regrouping import check_regrouping, check_truth
from shardproof.harness.checking.repeats import check_determinism, check_documents, check_recording
from shardproof.harness.checking.routing_checks import check_routing
from shardproof.harness.checking.state_checks import check_initial_values, check_saved_state
from shardproof.harness.errors import error_text
from shardproof.harness.verdicts.facts import note_unchecked, state_fact
from shardproof.harness.verdicts.verdict import UNKNOWN

Check = Callable[..., Finding | None]


@cache
def _parameters_of_check(check: Check) -> Mapping[str, tuple[type, bool]]:
    """The parameters of a check: name -> the record that it reads, and whether it must have been made."""
    read = {}
    for name, parameter in inspect.signature(check, eval_str=True).parameters.items():
        record = next(iter(get_args(parameter.annotation)), parameter.annotation)
        if record not in RECORDS:  # otherwise the check would never run, unnoticed
            legal = ", ".join(each.__name__ for each in RECORDS)
            raise TypeError(f"{name} of the check {check} is annotated with no record; legal: {legal}")
        read[name] = record, parameter.default is parameter.empty
    return read


def records_of(check: Check) -> frozenset[type]:
    """The records that a check needs."""
    return frozenset(record for record, needed in _parameters_of_check(check).values() if needed)


def select_checks_by_need(checks: Mapping[str, Check], *records: type) -> dict[str, Check]:
    """Those of the checks that need one of these records."""
    return {name: check for name, check in checks.items() if records_of(check) & {*records}}


def run_check(check: Check, records: Iterable[object]) -> Finding | None:
    """The finding of a check on these records; None if a record that it needs is missing."""
    made = {type(record): record for record in records}
    if not records_of(check) <= made.keys():
        return None
    return check(**{name: made[record] for name, (record, _) in _parameters_of_check(check).items() if record in made})


_OF_THEIR_OWN: Mapping[str, Check] = {
    "tokens": check_tokens,
    "update": check_update,
    "initial_values": check_initial_values,
    "masks": check_masks,
    "routing": check_routing,
    "saved": check_saved_state,
}
"""Kinds of NUMERIC_KINDS that have a check of their own, which does more than compare numbers with the truth."""

CHECKS: Mapping[str, Check] = {
    "coverage": check_coverage,
    "merge": check_layout,
    "replicas": check_replicas,
    **{name: _OF_THEIR_OWN.get(name) or make_numeric_check(name) for name in NUMERIC_KINDS},
    "ledger": check_ledger,
    "groups": check_groups,
    "waits": check_waits,
    "overlap": check_overlap,
    "parallelism": check_parallelism,
    "documents": check_documents,
    "determinism": check_determinism,
    "recording": check_recording,
}
"""Name -> check. Layouts come before numbers, numbers in the order in which training computes them."""

LAWS: Mapping[str, Check] = {"truth": check_truth, "regrouping": check_regrouping}
"""Checks for a subject with a truth of its own: of that truth, and of the same batch in other groupings."""


def run_checks(evidence: Evidence, checks: Mapping[str, Check] = CHECKS) -> dict[str, Finding]:
    """The findings of every check that applied, by its name."""
    findings: dict[str, Finding] = {}
    for name, check in checks.items():
        try:
            finding = run_check(check, evidence.records)
        except Exception as problem:  # a broken check must not hide the others, and says nothing about the subject
            failed = state_fact("check_failed", problem=error_text(problem))
            left = note_unchecked(f"everything that {name} looks at")
            finding = Finding(verdict=UNKNOWN, facts=(failed,), notes=left)
        if finding is not None:
            findings[name] = finding
    return findings
