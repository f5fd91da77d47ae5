"""A new scheme is one file and its entry in two tables: then every command has it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from harness.engines.threads.inproc import InprocEngine
from harness.running.proof import prove
from harness.subject import named
from parallel import registry
from parallel.subject import subject
from reference.case import Case
from reference.case.default_cases import default_cases
from reference.language import modes
from reports.commands import cli
from suites.killing.matrix import disturbed
from suites.mutants.mutant import OURS
from tests.parallel.schemes.toy_scheme import TOY

pytest_plugins = ("pytester",)
TEXT = "mode=toy tp=2 layers=1 hidden=16 heads=4 kv_heads=4 ffn=32 vocab=389 seq=8 steps=2"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(modes.MODES, "toy", modes.MODES["mtp"])
    monkeypatch.setitem(registry.MODES, "toy", TOY)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # no second process, which would not have it
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def test_run_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", TEXT, "--out", "runs"]) == 0
    assert "toy" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "runs/latest/verdicts.jsonl").read_text().splitlines()]
    assert {row["verdict"] for row in rows if row["check"] == "ledger"} == {"pass"}
    assert cli.main(["page", "runs/latest"]) == 0
    pages = [path.read_text() for path in tmp_path.rglob("*.html")]
    assert any("toy" in page and "a heartbeat" in page for page in pages)
    assert cli.main(["help", "calls", TEXT]) == 0
    assert "a heartbeat" in capsys.readouterr().out
    monkeypatch.delitem(modes.MODES, "toy")  # a page of a run whose words are no longer legal
    assert cli.main(["page", "runs/latest"]) == 0
    assert not any("a heartbeat" in path.read_text() for path in tmp_path.rglob("*.html"))


def test_predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["predict", TEXT]) == 0
    assert "toy" in capsys.readouterr().out


def test_faults_and_default_cases() -> None:
    with InprocEngine() as engine:
        plans = disturbed(named(subject), "toy", engine, quick=False)
    targets = [fault.target for plan in plans for fault in plan.faults]
    assert any(target.phase == "grad_sync" and target.axis == "tp" for target in targets)
    assert "toy" in subject.modes and len(default_cases(["toy"])) > 5


@pytest.mark.usefixtures("loaded")
def test_suites(pytester: pytest.Pytester) -> None:
    words = ("--collect-only", "--pyargs", "suites", "--subject", OURS, "--modes", "toy", "-p", "no:cacheprovider")
    result = pytester.runpytest_inprocess("-q", "-p", "no:xdist", *words)
    assert result.ret == 0
    asked = {line.split("::")[0] for line in result.outlines if "toy" in line}
    assert {Path(module).stem for module in asked} >= {"test_forward", "test_backward", "test_training", "test_races"}


def test_its_calls_are_in_its_closed_form_or_the_ledger_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.MODES, "toy", dataclasses.replace(TOY, rows=registry.MODES["mtp"].rows))
    with InprocEngine() as engine:
        result = prove(Case.parse(TEXT), subject, engine)
    (ledger,) = (verdict for verdict in result.verdicts if verdict.check == "ledger")
    assert ledger.verdict == "fail" and "all_reduce sum of 8 B float64 over tp" in ledger.message
