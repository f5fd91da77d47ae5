"""The checks of a case: `CHECKS` for every subject, `LAWS` too for one with a truth of its own; `run_checks` runs them.

`prove` adds names of its own: `supported` for a case that the subject does not take, `run` for one that raised. The
name `explanation` is for causes that could not be looked for, and a run's `truth` for what the dense model refuses.

A check is a pure function of the records that its signature names (harness.checking.records). It is not run where one
of them was not made; a parameter with a default may be without its record. None means that there is nothing to check
(the subject returned nothing of the kind), and then no verdict is claimed. An exception inside a check is `unknown`
with its text, never a pass.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import get_args

from shardproof.harness.checking.call_checks import check_groups, check_overlap, check_parallelism, check_waits
from shardproof.harness.checking.coverage import check_coverage, check_layout, check_replicas
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.ledger_checks import check_ledger
from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS, kind_of
from shardproof.harness.checking.numeric_checks import check_tokens, check_update, make_numeric_check
from shardproof.harness.checking.records import RECORDS, Claims, Evidence, Regroupings, Run, Truth
from shardproof.harness.checking.repeats import check_determinism, check_documents, check_recording
from shardproof.harness.errors import error_text
from shardproof.harness.verdicts.facts import note_unchecked
from shardproof.harness.verdicts.verdict import UNKNOWN

Check = Callable[..., Finding | None]


@cache
def _parameters_of_check(check: Check) -> Mapping[str, tuple[type, bool]]:
    """The parameters of a check: name -> the record that it reads, and whether it needs it."""
    read = {}
    for name, parameter in inspect.signature(check, eval_str=True).parameters.items():
        record = next(iter(get_args(parameter.annotation)), parameter.annotation)
        if record not in RECORDS:  # else the check would never be run, and nobody would miss it
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
    """The finding of a check in these records; None where one that it needs is not among them."""
    made = {type(record): record for record in records}
    if not records_of(check) <= made.keys():
        return None
    return check(**{name: made[record] for name, (record, _) in _parameters_of_check(check).items() if record in made})


def _check_if_returned(name: str) -> Check:
    """A check that few cases need, whose module is imported only where ranks return names of its kind."""

    def check(run: Run, truth: Truth, claims: Claims) -> Finding | None:
        if not any(kind_of(returned) in NUMERIC_KINDS[name] for returned in run.returned):
            return None
        from shardproof.harness.checking import mask_checks, routing_checks, state_checks  # noqa: PLC0415

        rare: Mapping[str, Check] = {
            "initial_values": state_checks.initial_values,
            "masks": mask_checks.check_masks,
            "routing": routing_checks.check_routing,
            "saved": state_checks.check_saved_state,
        }
        return run_check(rare[name], (run, truth, claims))

    return check


_OF_THEIR_OWN = {
    "tokens": check_tokens,
    "update": check_update,
    **{name: _check_if_returned(name) for name in ("initial_values", "masks", "routing", "saved")},
}
"""Kinds of NUMERIC_KINDS whose check does more than compare numbers with the truth."""

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


def _check_truth(run: Run, truth: Truth) -> Finding | None:
    if truth.first_forward is None:
        return None
    from shardproof.harness.checking.regrouping import check_truth as check  # noqa: PLC0415

    return check(run, truth)


def _check_regroupings(run: Run, truth: Truth, claims: Claims, regroupings: Regroupings) -> Finding:
    from shardproof.harness.checking.regrouping import check_regrouping as check  # noqa: PLC0415

    return check(run, truth, claims, regroupings)


LAWS: Mapping[str, Check] = {"truth": _check_truth, "regrouping": _check_regroupings}
"""Checks of a subject with a truth of its own: of that truth, and of the same batch over other dp and micro-batches."""


def run_checks(evidence: Evidence, checks: Mapping[str, Check] = CHECKS) -> dict[str, Finding]:
    """The findings of every check that applied, by its name."""
    findings: dict[str, Finding] = {}
    for name, check in checks.items():
        try:
            finding = run_check(check, evidence.records)
        except Exception as problem:  # a broken check must not hide the others, and is no verdict on the subject
            text = f"the check itself failed: {error_text(problem)}"
            finding = Finding(verdict=UNKNOWN, message=text, notes=note_unchecked(f"everything that {name} looks at"))
        if finding is not None:
            findings[name] = finding
    return findings
