"""Planted bugs are killed by the check that the catalogue names. A sample of every family; `shardproof faults` has all.

The profile `deep` takes every mutant, in one mode. What only one check kills is required of every check here, always: a
check that nothing needs would go.
"""

from __future__ import annotations

import pytest

from harness.checking.checks import CHECKS
from harness.checking.evidence import FAIL
from harness.resolve import resolve
from reference.case import Case
from suites.mutants.catalogue import FAMILIES, MUTANTS
from suites.mutants.mutant import Mutant
from suites.mutants.rows import Killed, mutant_killed
from suites.session.prover import Prover

_REAL = {family: [mutant for mutant in mutants if not mutant.equivalent] for family, mutants in FAMILIES.items()}
_FEW = {mutants[7 % len(mutants)].name for mutants in _REAL.values()}
_ALONE = {mutant.kills: mutant for mutant in reversed(MUTANTS) if mutant.alone}
"""Check -> a mutant that no other check kills."""
_BY_TOYS = {"parallelism": "tests.harness.toy_subjects:right"}
"""Check -> a subject that no other check fails. Ours states a closed form, so that its ledger fails as well."""
_BY_FILES = {"saved": "tests.parallel.checkpoints.test_checkpoint_mutants:WRONG_SAVES"}
"""Check -> planted bugs whose cases name a folder, which those of the catalogue cannot."""


def _held(prover: Prover, mutant: Mutant) -> Killed:
    modes = sorted(mutant.modes)
    return mutant_killed(mutant, modes[len(mutant.name) % len(modes)], prover.engine)  # another mode for each


@pytest.mark.parametrize(
    ("family", "mutant"),
    [(family, mutant) for family, mutants in _REAL.items() for mutant in mutants],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_planted_bug_is_killed_by_its_check(
    prover: Prover, family: str, mutant: Mutant, request: pytest.FixtureRequest
) -> None:
    if mutant.name not in _FEW and request.config.getoption("hypothesis_profile", None) != "deep":
        pytest.skip("six CPU minutes in all: --hypothesis-profile deep")
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
    assert set(CHECKS) == {*_ALONE, *_BY_TOYS, *_BY_FILES} and all(map(resolve, _BY_FILES.values()))
