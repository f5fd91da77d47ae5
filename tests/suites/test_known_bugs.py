"""Known bugs: no id is unknown, none is unused, and each is planted somewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from harness.diagnosing.rules.causes import CAUSES
from harness.diagnosing.rules.what_ifs import WHAT_IF
from reference.case.variants import VARIANTS
from suites.mutants.catalogue import MUTANTS, VARIANT_ROWS
from suites.mutants.known import KNOWN, SHOWN_BY, main
from tests import ROOT


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
