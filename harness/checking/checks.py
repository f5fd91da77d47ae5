"""The checks of a case: `CHECKS` for every subject, `LAWS` too for one with a truth of its own; `examine` runs them.

`prove` adds names of its own: `supported` for a case that the subject does not take, `run` for one that raised. The
name `explanation` is for causes that could not be looked for, and a run's `truth` for what the dense model refuses.

A check is a pure function of the evidence. None means that there is nothing to check (the subject returned nothing of
the kind), and then no verdict is claimed. An exception inside a check is `unknown` with its text, never a pass.
"""

from collections.abc import Callable, Mapping

from shardproof.harness.checking.call_checks import groups, overlap, parallelism, waits
from shardproof.harness.checking.coverage import coverage, layout, replicas
from shardproof.harness.checking.evidence import Evidence, Finding
from shardproof.harness.checking.ledger_checks import ledger
from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS
from shardproof.harness.checking.numeric_checks import numeric, tokens, update
from shardproof.harness.checking.repeats import determinism, recording
from shardproof.harness.errors import error_text
from shardproof.harness.verdicts.facts import unchecked
from shardproof.harness.verdicts.verdict import UNKNOWN

Check = Callable[[Evidence], Finding | None]


def _rarely(name: str) -> Check:
    """A check that few cases need, whose module is imported only where ranks return names of its kind."""

    def check(evidence: Evidence) -> Finding | None:
        from shardproof.harness.checking import mask_checks, routing_checks, state_checks  # noqa: PLC0415

        rare: Mapping[str, Check] = {
            "initial_values": state_checks.initial_values,
            "masks": mask_checks.masks,
            "routing": routing_checks.routing,
            "saved": state_checks.saved,
        }
        return rare[name](evidence)

    return check


_OF_THEIR_OWN = {
    "tokens": tokens,
    "update": update,
    **{name: _rarely(name) for name in ("initial_values", "masks", "routing", "saved")},
}
"""Kinds of NUMERIC_KINDS whose check does more than compare numbers with the truth."""

CHECKS: Mapping[str, Check] = {
    "coverage": coverage,
    "merge": layout,
    "replicas": replicas,
    **{name: numeric(name, _OF_THEIR_OWN.get(name)) for name in NUMERIC_KINDS},
    "ledger": ledger,
    "groups": groups,
    "waits": waits,
    "overlap": overlap,
    "parallelism": parallelism,
    "determinism": determinism,
    "recording": recording,
}
"""Name -> check. Layouts come before numbers, numbers in the order in which training computes them."""


def _truth(evidence: Evidence) -> Finding | None:
    if evidence.first_forward is None:
        return None
    from shardproof.harness.checking.regrouping import truth as check  # noqa: PLC0415

    return check(evidence)


def _regrouping(evidence: Evidence) -> Finding | None:
    if not evidence.regrouped:
        return None
    from shardproof.harness.checking.regrouping import regrouping as check  # noqa: PLC0415

    return check(evidence)


LAWS: Mapping[str, Check] = {"truth": _truth, "regrouping": _regrouping}
"""Checks of a subject with a truth of its own: of that truth, and of the same batch over other dp and micro-batches."""


def examine(evidence: Evidence, checks: Mapping[str, Check] = CHECKS) -> dict[str, Finding]:
    """The findings of every check that applied, by its name."""
    findings: dict[str, Finding] = {}
    for name, check in checks.items():
        try:
            finding = check(evidence)
        except Exception as problem:  # a broken check must not hide the others, and is no verdict on the subject
            text = f"the check itself failed: {error_text(problem)}"
            finding = Finding(verdict=UNKNOWN, message=text, notes=unchecked(f"everything that {name} looks at"))
        if finding is not None:
            findings[name] = finding
    return findings
