"""Every statement of a line `when:` is true when it is run again from its text alone."""

import random
from functools import partial
from pathlib import Path

import pytest

from bench.blind import Statement, false_statements, statements
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.running.proof import prove
from shardproof.harness.subject import resolve_subject
from shardproof.harness.verdicts.verdict import FAIL
from shardproof.reference.case import Case
from shardproof.suites.mutants.catalogue import MUTANTS, Mutant, cases_showing
from tests.deep import deep
from tests.harness.noted import when_of
from tests.harness.proofs import ran

SIZES = "layers=1 hidden=16 heads=4 ffn=16 seq=8 steps=1"
SMOOTHED = f"family=llama tp=2 vocab=62 label_smoothing=0.1 {SIZES}"
DEAR = pytest.mark.deep("six CPU seconds each")
OWN = {mutant.name: mutant for mutant in MUTANTS if mutant.changes and not mutant.is_shared}
"""Planted bugs that are not held back."""


def run_again(folder: Path, mutant: Mutant, case: Case, when_s: float) -> tuple[str, list[Statement]]:
    """The printed line of a bug on a case, and its untrue statements; no line if the case is right."""
    with mutant.subject() as planted, InprocEngine() as engine:
        result = ran(folder, planted, case, when_s=when_s)
        lines = [when_of(one) for one in result.verdicts if one.verdict == FAIL]
        line = next(filter(None, lines), "")
        assert bool(line) == bool(result.exit_status)
        if not line:
            return "", []
        again = partial(prove, subject=resolve_subject(planted), engine=engine, explain=False)
        return line, false_statements(line, lambda text: again(Case.parse(text)), str(case))


@pytest.mark.parametrize(
    ("name", "case", "words"),
    [
        ("padded-columns-count", f"vocab=509 tp=2 {SIZES}", "vocab head"),
        pytest.param("label-smoothing-by-parts", SMOOTHED, "tp label_smoothing", marks=DEAR),
        pytest.param("norm-of-the-own-part", f"tp=1 dp=4 zero=1 micro=2 {SIZES}", "dp zero", marks=DEAR),
    ],
)
def test_a_printed_line_is_true_word_for_word(name: str, case: str, words: str, tmp_path: Path) -> None:
    line, false = run_again(tmp_path, OWN[name], Case.parse(case), 60.0)
    assert not false, line
    stated = {statement.case.split()[-1].partition("=")[0] for statement in statements(line) if not statement.fails}
    assert set(words.split()) <= stated, line


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a time limit in hypothesis' gc hook
@pytest.mark.parametrize("seed", [*deep("ten CPU seconds each", *range(30))])
def test_lines_of_bugs_and_cases_that_are_drawn(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)  # noqa: S311
    mutant = OWN[draw.choice(sorted(OWN))]
    cases = cases_showing(mutant, draw.choice(sorted(mutant.modes)))
    for number, case in enumerate(draw.sample(cases, min(len(cases), 5))):
        line, false = run_again(tmp_path / str(number), mutant, case, 10.0)
        assert not false, f"{mutant.name}: {line}"
        if line:
            return
    pytest.skip(f"no drawn case shows {mutant.name}")


def test_a_line_is_a_list_of_cases() -> None:
    line = (
        "fails with tp=2|4 and zero=1, perhaps act=relu; passes with tp=1, with zero=0 wdp=1 but for replicas|ledger "
        "(tried on 'tp=2 zero=1'; no time was left to try bias)"
    )
    assert [(one.case.removeprefix("tp=2 zero=1 "), one.fails, sorted(one.but_for)) for one in statements(line)] == [
        ("tp=2 zero=1", True, []),
        ("tp=4 zero=1", True, []),
        ("tp=1", False, []),
        ("zero=0 wdp=1", False, ["ledger", "replicas"]),
    ]
    plainest = "fails even in the simplest case tried: 'tp=1 dp=2'; perhaps needed: dp=2 (no time was left to try bias)"
    assert statements(plainest) == [Statement(case="tp=1 dp=2", fails=True)]
    assert statements("not searched: no time was left before a case was tried; a larger --when searches longer") == []
    with pytest.raises(ValueError, match="is no line of this kind"):
        statements("wrong with tp=2")
