"""Planted bugs are killed by the check that the catalogue names. A sample of every family; `shardproof faults` has all.

The sample moves on with the day of the year, so that in time every mutant is met here too; the mode with it. What only
one check kills is asked of every check here, always: a check that nothing needs would go.
"""

from __future__ import annotations

import datetime

import pytest

from harness.checking.checks import CHECKS
from harness.checking.evidence import FAIL
from harness.resolve import resolve
from reference.case import Case
from suites.mutants.catalogue import FAMILIES, MUTANTS
from suites.mutants.mutant import Mutant
from suites.mutants.rows import Killed, mutant_killed
from suites.session.prover import Prover

_DAY = datetime.datetime.now(datetime.UTC).timetuple().tm_yday
_REAL = {family: [mutant for mutant in mutants if not mutant.equivalent] for family, mutants in FAMILIES.items()}
_SAMPLE = [(family, _REAL[family][(_DAY + turn) % len(_REAL[family])]) for family in _REAL for turn in (0, 7)]
_ALONE = {mutant.kills: mutant for mutant in reversed(MUTANTS) if mutant.alone}
"""Check -> a mutant that no other check kills."""
_BY_TOYS = {"parallelism": "tests.harness.toy_subjects:right"}
"""Check -> a subject that no other check fails. Ours states a closed form, so that its ledger fails as well."""


def _held(prover: Prover, mutant: Mutant) -> Killed:
    modes = sorted(mutant.modes)
    return mutant_killed(mutant, modes[_DAY % len(modes)], prover.engine)


@pytest.mark.parametrize(("family", "mutant"), _SAMPLE, ids=lambda value: getattr(value, "name", value))
def test_a_planted_bug_is_killed_by_its_check(prover: Prover, family: str, mutant: Mutant) -> None:
    killed = _held(prover, mutant)
    assert set(mutant.kills.split("|")) & set(killed.row.killed_by), (family, killed)


@pytest.mark.parametrize("check", _ALONE)
def test_a_bug_that_only_this_check_kills(prover: Prover, check: str) -> None:
    killed = _held(prover, _ALONE[check])
    assert killed.row.killed_by == (check,), killed
    assert killed.row.region_right != "no", killed


@pytest.mark.parametrize("check", _BY_TOYS)
def test_a_subject_that_only_this_check_fails(prover: Prover, check: str) -> None:
    result = prover.proof(Case.parse("mode=tp tp=2 layers=1 hidden=16 heads=2 seq=4"), resolve(_BY_TOYS[check]))
    assert [verdict.check for verdict in result.verdicts if verdict.verdict == FAIL] == [check]


def test_every_check_has_a_bug_that_no_other_check_kills() -> None:
    """A new check brings a mutant with `alone=True` that it alone kills, or it is not needed."""
    assert set(CHECKS) == {*_ALONE, *_BY_TOYS}
