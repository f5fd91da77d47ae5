"""Tests of parallel.subject. Rows of closed forms: each is met by a case, sums follow from placements; a new scheme is
one file, two entries.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.running.proof import prove
from shardproof.harness.subject import resolve_subject
from shardproof.parallel import subject as parallel_subject
from shardproof.parallel.communication.expectation import terms
from shardproof.parallel.data_parallel.calls import summed_over, trained_placements
from shardproof.parallel.subject import scheme_of, strategy_of, subject
from shardproof.reference.case import Case
from shardproof.reference.case.default_cases import default_cases
from shardproof.reference.language import core
from shardproof.reference.language.core import MODES
from shardproof.reports.commands import cli
from shardproof.suites.killing import plan_disturbed
from tests import ROOT
from tests.parallel.schemes import toy_scheme
from tests.parallel.schemes.toy_scheme import TOY


@pytest.mark.parametrize("mode", MODES)
def test_every_row_is_met_by_a_case(mode: str) -> None:
    """A row that no case meets would state nothing; Megatron's modes share theirs, and cut no table along hidden."""
    rows, split = scheme_of(mode).rows, f"mode={mode} tp=2 cross_entropy=unfused label_smoothing=0.1"
    losses = [split, f"{split} cross_entropy=fused", f"{split} cross_entropy=fused label_smoothing=0.0"]
    cases = [*default_cases([mode]), *map(Case.parse, losses if mode != "autotp" else ())]
    met = {(term.why, term.elements) for case in cases for term in terms(case, rows)}
    missing = {(row.why, row.elements) for row in rows} - met
    assert {why for why, _ in missing} <= ({"columns of hidden states"} if mode in ("tp", "tp-sp") else set())


@pytest.mark.parametrize(
    ("words", "parameter", "axes"),
    [
        ("mode=tp qk_norm=true", "layers.0.attention.q_norm.weight", ("dp", "tp")),
        ("mode=tp-sp", "layers.0.mlp.w2.bias", ("dp", "tp")),
        ("mode=tp-sp cp=2", "layers.0.mlp.w1.weight", ("dp_cp",)),
        ("mode=tp pp=2 layers=2", "embedding.tokens.weight", ("dp", "embedding")),
        ("mode=tp zero=3", "layers.0.mlp.w1.weight", ()),
        ("mode=tp zero=3 shard=2 dp=4", "layers.0.mlp.w1.weight", ("replica",)),
        ("mode=tp-sp zero=2", "final_norm.weight", ("tp",)),
        ("mode=isp wp=2", "final_norm.weight", ("wdp", "wp")),
    ],
)
def test_a_gradient_is_summed_over_what_neither_cuts_it_nor_shares_its_data(
    words: str, parameter: str, axes: tuple[str, ...]
) -> None:
    """By hand, from what a copy of the parameter has seen."""
    case = Case.parse(f"tp=2 dp=2 heads=4 kv_heads=2 {words}")
    strategy = strategy_of(case)
    assert summed_over(strategy, case, parameter, trained_placements(strategy, case)[parameter]) == axes


def test_the_example_of_a_row_in_the_docs_is_a_scheme_that_is_tested() -> None:
    page = (ROOT / "docs/design.md").read_text()
    source = (ROOT / "tests/parallel/schemes/toy_scheme.py").read_text()
    example = page.split("## Add a call")[1].split("```python\n")[1].split("```")[0]
    assert "CallRow(" in example and example.strip() in source
    assert toy_scheme.HEARTBEAT in toy_scheme.TOY.rows


pytest_plugins = ("pytester",)
TEXT = "mode=toy tp=2 layers=1 hidden=16 heads=4 kv_heads=4 ffn=32 vocab=389 seq=8 steps=2"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(core.MODES, "toy", core.MODES["mtp"])
    monkeypatch.setitem(parallel_subject.SCHEMES, "toy", TOY)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # no second process, which would not have it
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


@pytest.mark.usefixtures("toy")
def test_commands_have_a_scheme_that_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: InprocEngine
) -> None:
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
    assert cli.main(["predict", TEXT]) == 0
    assert "toy" in capsys.readouterr().out
    plans = plan_disturbed(resolve_subject(subject), "toy", engine, quick=False)
    targets = [fault.target for plan in plans for fault in plan.faults]
    assert any(target.phase == "grad_sync" and target.axis == "tp" for target in targets)
    assert "toy" in subject.modes and len(default_cases(["toy"])) > 5


@pytest.mark.usefixtures("loaded", "toy")
def test_suites(pytester: pytest.Pytester) -> None:
    words = (
        "--collect-only",
        "--pyargs",
        "shardproof.suites",
        "--subject",
        SUBJECT,
        "--modes",
        "toy",
        "-p",
        "no:cacheprovider",
    )
    result = pytester.runpytest_inprocess("-q", "-p", "no:xdist", *words)
    assert result.ret == 0
    asked = {line.split("::")[0] for line in result.outlines if "toy" in line}
    assert {Path(module).stem for module in asked} >= {"test_forward", "test_backward", "test_training", "test_races"}


@pytest.mark.usefixtures("toy")
def test_its_calls_are_in_its_closed_form_or_the_ledger_fails(
    monkeypatch: pytest.MonkeyPatch, engine: InprocEngine
) -> None:
    monkeypatch.setitem(parallel_subject.SCHEMES, "toy", dataclasses.replace(TOY, rows=scheme_of("mtp").rows))
    result = prove(Case.parse(TEXT), subject, engine)
    (ledger,) = (verdict for verdict in result.verdicts if verdict.check == "ledger")
    assert ledger.verdict == "fail" and "all_reduce sum of 8 B float64 over tp" in ledger.message
