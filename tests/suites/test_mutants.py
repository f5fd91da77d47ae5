"""Planted bugs are killed by the check that the catalogue names. A sample of every family; `shardproof faults` has all.

The profile `deep` takes every mutant, in one mode. What only one check kills is required of every check here, always: a
check that nothing needs would go. Of known bugs no id is unknown or unused; those of the blind measurement can be
planted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from harness.checking.checks import CHECKS
from harness.checking.evidence import FAIL
from harness.diagnosing.rules.causes import CAUSES
from harness.diagnosing.rules.what_ifs import WHAT_IF
from harness.resolve import resolve
from reference.case import Case
from reference.case.variants import VARIANTS
from suites.mutants.catalogue import FAMILIES, MUTANTS, UNSEEN, VARIANT_ROWS
from suites.mutants.known import KNOWN, SHOWN_BY, main
from suites.mutants.mutant import Mutant
from suites.mutants.rows import Killed, mutant_killed
from suites.session.prover import Prover
from tests import ROOT

_REAL = {family: [mutant for mutant in mutants if not mutant.equivalent] for family, mutants in FAMILIES.items()}
_FEW = {mutants[7 % len(mutants)].name for mutants in _REAL.values()}
_ALONE = {mutant.kills: mutant for mutant in reversed(MUTANTS) if mutant.alone}
"""Check -> a mutant that no other check kills."""
_BY_TOYS = {"parallelism": "tests.harness.toy_subjects:right"}
"""Check -> a subject that no other check fails. Ours states a closed form, so that its ledger fails as well."""
_BY_FILES = {"saved": "tests.parallel.checkpoints.test_checkpoint_layouts:WRONG_SAVES"}
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


@pytest.mark.parametrize("one", UNSEEN, ids=lambda one: one.name)
def test_every_bug_finds_its_lines_and_its_case_can_show_it(one: Mutant) -> None:
    assert one.sources() and one.wrong and one.held_back
    assert one.shows(Case.parse(one.case))


def test_names_are_unique() -> None:
    assert len({one.name for one in UNSEEN}) == len(UNSEEN) == 60


def texts(folder: str, *, but: Iterable[str] = ()) -> set[str]:
    """The string literals of the Python files below a folder."""
    return {
        node.value
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name not in but
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def unreported(ids: Iterable[str], literals: set[str]) -> list[str]:
    """The ids that no rule can report: none writes them, and no what-if has them."""
    return [id for id in ids if id not in literals and id not in WHAT_IF]


def uncomputed(ids: Iterable[str], literals: set[str]) -> list[str]:
    """The what-ifs that the reference never computes: no literal is or begins with their name."""
    heads = {text.partition("/")[0].partition(".")[0] for text in literals}
    return [id for id in ids if id not in heads]


def test_every_id_is_one_that_some_rule_reports() -> None:
    rules = texts("harness/diagnosing", but={"causes.py"}) | texts("harness/running")
    assert unreported(CAUSES, rules) == []
    assert unreported(["gremlins"], rules) == ["gremlins"]


def test_every_what_if_is_a_cause_and_the_reference_computes_it() -> None:
    assert set(WHAT_IF) <= set(CAUSES)
    computed = texts("reference")
    assert uncomputed(WHAT_IF, computed) == []
    assert uncomputed(["gremlins"], computed) == ["gremlins"]


def test_every_id_is_planted_by_a_row_or_by_a_test_that_names_it() -> None:
    assert {id for id, bug in KNOWN.items() if not bug.planted} == set(SHOWN_BY)
    for id, test in SHOWN_BY.items():
        assert f'"{id}"' in Path(ROOT / test).read_text(), id


def test_every_row_leads_back_to_its_ids() -> None:
    for row in (*MUTANTS, *VARIANT_ROWS):
        for id in filter(None, row.cause.split("|")):
            assert row in KNOWN[id].planted, row.name


def test_every_variant_has_a_source_a_change_and_a_row() -> None:
    assert set(VARIANTS) == {row.name for row in VARIANT_ROWS}
    assert all(bug.changes and bug.wrong and bug.condition for bug in VARIANTS.values())


def test_the_catalogue_prints_a_bug_and_refuses_an_unknown_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flat_dim", "crashed"]) == 0
    out = capsys.readouterr().out
    assert "flat_dim: an inner dim taken for flat memory\n    what if: when parts along an inner dim" in out
    assert "    variant flat-dim1: " in out
    assert "    planted in tests/harness/diagnosing/test_six_lines.py" in out
    assert main(["gremlins"]) == 2
    assert "gremlins: no such id; legal: " in capsys.readouterr().err
    assert main([]) == 0 and len(capsys.readouterr().out.splitlines()) > len(CAUSES)
