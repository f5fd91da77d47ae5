"""Every table of cases: the dense model's training on every rank, and every byte stated; bugs of schemes are caught."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from bugs.planting import planted
from harness.checking.evidence import FAIL, PASS
from harness.running.proof import CaseResult
from parallel.subject import subject
from reference.case import Case
from suites.mutants.catalogue import of_file
from suites.mutants.mutant import Mutant
from suites.session.prover import Prover
from tests.parallel.case_tables import TABLES


def proved(prover: Prover, words: str, checks: Iterable[str] = ()) -> CaseResult:
    """The case on our implementation, of which every check passes, these among them."""
    result = prover.proof(Case.parse(words), subject)
    assert [verdict.message for verdict in result.verdicts if verdict.verdict != PASS] == []
    assert {*checks} <= {verdict.check for verdict in result.verdicts}
    return result


def every_case() -> list[Any]:
    cost = pytest.mark.deep("two CPU minutes a table")
    return [
        pytest.param(name, words, marks=marks, id=f"{name}-{words}")
        for name, table in TABLES.items()
        for marks, every in (((), table.cases), (cost, table.deep))
        for words in every
    ]


@pytest.mark.parametrize(("table", "words"), every_case())
def test_training_is_the_dense_models_and_every_byte_is_stated(prover: Prover, table: str, words: str) -> None:
    result = proved(prover, f"{TABLES[table].sizes} {words}", TABLES[table].checks)
    case, checks = result.case, {verdict.check for verdict in result.verdicts}
    assert isinstance(case, Case) and result.evidence is not None
    if table in ("data_parallel", "context") and words in TABLES[table].cases:
        waits = "tp=1" in words if table == "data_parallel" else "cp_comm" in words and "ring" not in words
        assert "overlap" in checks or waits or not case.overlap
    if case.pp > 1:
        assert any(event.phase == "pipeline" for event in result.events)
    if table == "dropout":
        masks = [name for name in result.evidence.merged.tensors if name.startswith("mask/")]
        assert len(masks) == case.steps * (1 + 3 * case.layers), "the embedding's, and three sites of every layer"


@pytest.mark.parametrize("bug", of_file("tests/schemes"), ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(prover: Prover, bug: Mutant) -> None:
    result = prover.proof(Case.parse(bug.case), planted(bug.sources()))
    assert {*bug.kills.split("|")} & {verdict.check for verdict in result.verdicts if verdict.verdict == FAIL}
