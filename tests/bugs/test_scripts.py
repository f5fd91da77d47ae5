"""Planted bugs as stand-alone scripts, the example of CONTRIBUTING, and bugs with a public name in every engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bugs.record import read
from harness.engines.processes.forked.pool import PoolEngine
from harness.errors import RequestError
from harness.running.proof import prove
from reference.case import Case
from reports.commands.cli import main
from suites.killing.scripts import scripts
from suites.mutants.mutant import GROUPS, Mutant
from suites.mutants.rows import mutant_killed
from suites.session.prover import Prover
from tests import ROOT


def test_the_example_of_contributing_is_read_planted_and_killed(prover: Prover, tmp_path: Path) -> None:
    (text,) = re.findall(r"```\n(row-bias-by-halves: .*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (tmp_path / "example.txt").write_text(text)
    (bug,) = read(tmp_path / "example.txt", Mutant, GROUPS)
    killed = mutant_killed(bug, "tp", prover.engine)
    assert set(bug.kills.split("|")) <= set(killed.row.killed_by) and killed.row.region_right == "yes", killed


def test_a_bug_becomes_a_script_that_repeats_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--emit-repro", "norms-not-summed", str(tmp_path / "scripts")]) == 0
    script = tmp_path / "scripts" / "norms-not-summed.py"
    assert capsys.readouterr().out == f"{script}\n"
    text = script.read_text()
    assert text.startswith('"""norms-not-summed: B-04, B-06: InternEvo') and "\n+    return is_row(module)" in text
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (1, "reproduced"), ended.stderr
    mended = tmp_path / "mended.py"
    mended.write_text(re.sub(r"'planted': \{.*?\}", "'planted': {}", text, flags=re.DOTALL))
    ended = subprocess.run(
        [sys.executable, str(mended)], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "not reproduced"), ended.stderr


def test_what_no_script_shows_says_why_and_held_back_bugs_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["faults", "--emit-repro", "norm-computed-twice", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("norm-computed-twice: no script: ")
    with pytest.raises(RequestError, match="emit-repro=gremlins: is no open mutant or variant; legal: all "):
        scripts("gremlins")


def test_a_variant_is_planted_where_the_ranks_are(pool: PoolEngine) -> None:
    case = Case.parse("mode=isp tp=2 layers=2 steps=1 seq=8 heads=4 kv_heads=2 hidden=16 ffn=32 vocab=264")
    right, wrong = (prove(one, "parallel.subject:subject", pool) for one in (case, case.but(variant="isp-average")))
    assert (right.verdict, wrong.verdict) == ("pass", "fail")


def test_parallel_has_no_switch_for_a_variant() -> None:
    """A case's variant is known to who plants it and to the subject that asks for it."""
    files = [path for path in (ROOT / "parallel").rglob("*.py") if "variant" in path.read_text()]
    assert {path.relative_to(ROOT).as_posix() for path in files} == {
        "parallel/__init__.py",
        "parallel/subject.py",
        "parallel/variants.py",
    }
