"""The catalogue of real bugs: records that name a public issue, the page that follows from them, and its measure."""

import csv
import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from shardproof.bugs.references import defect, references, unread
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.errors import RequestError, TimeLimit
from shardproof.harness.running.engines import engine_named
from shardproof.harness.running.injecting import COLUMNS, figures
from shardproof.harness.running.proof import prove
from shardproof.harness.subject import cases_of, resolve_subject
from shardproof.reports.commands.cli import main
from shardproof.suites import killing
from shardproof.suites.killing import scripts
from shardproof.suites.mutants import field, kill_rows
from shardproof.suites.mutants.catalogue import HELD_BACK, MUTANTS, VARIANT_ROWS, Mutant, cases_showing
from shardproof.suites.mutants.field import FIELD, MEASURED, page, public
from shardproof.suites.mutants.kill_rows import mutant_killed
from tests import ROOT
from tests.suites.toy_faults import kill

PAGE = (ROOT / "docs" / "catalogue.md").read_text()
OPEN = {row.name: row for row in (*MUTANTS, *VARIANT_ROWS)}


@pytest.mark.parametrize(
    ("text", "names", "rest"),
    [
        ("B-01: Megatron #1446, the norm differs", ("NVIDIA/Megatron-LM#1446",), "the norm differs"),
        ("B-25: PyTorch PR #12, an early return", ("pytorch/pytorch#12",), "an early return"),
        ("TT #792, #2780: a mask", ("pytorch/torchtitan#792", "pytorch/torchtitan#2780"), "a mask"),
        ("ROCm TE #715 and TE #1: a norm", ("ROCm/TransformerEngine#715", "NVIDIA/TransformerEngine#1"), "a norm"),
        ("Megatron #7452-3, again #7452-8: means", ("NVIDIA/Megatron-LM#7452",), "again #7452-8: means"),
        ("Megatron #656's kin: a table", (), "a table"),
        ("torchtitan #2206 and its kin: a count", (), "a count"),
        ("B-30: a bias added twice", (), "B-30: a bias added twice"),
    ],
)
def test_a_record_names_its_issue_in_words(text: str, names: tuple[str, ...], rest: str) -> None:
    assert references(text)[: len(names)] == names and bool(references(text)) == bool(names)
    assert defect(text).endswith(rest)


def test_every_number_of_a_record_is_read_and_the_field_is_what_a_case_can_show() -> None:
    """A system that SYSTEMS does not have would drop its issue from the catalogue without a word."""
    assert [row.name for row in OPEN.values() if unread(row.stands_for)] == []
    assert unread("B-85: frontier-bench #576, an iterator a chunk") == ("#576",)
    assert len(public()) >= 80 and len({name.partition("#")[0] for name in public()}) >= 20
    assert all(row.references and row.kills and not row.held_back for row in FIELD)
    not_shown = {"packed-positions-run-on", "random-number-drawn-on-one-rank", "sentinel-meets-padding"}
    assert {row.name for row in OPEN.values() if row.references} - {row.name for row in FIELD} == not_shown


def test_the_page_is_that_of_the_records_and_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written anew by `python -m shardproof.suites.mutants.field`; what was measured stands below, not compared."""
    assert PAGE.partition(MEASURED)[0] == page().partition(MEASURED)[0], "docs/catalogue.md is stale"
    other = dataclasses.replace(FIELD[0], cause="size_factor")
    version = [text.split()[7] for text in (page(), page((other, *FIELD[1:])))]
    assert "Version" in page() and version[0] != version[1], "another record is another version"
    stored = tmp_path / "catalogue.md"
    stored.write_text(f"# Of other records\n{''.join(PAGE.partition(MEASURED)[1:])}")
    monkeypatch.setattr(field, "PAGE", stored)
    assert field.main([]) == 0 and stored.read_text() == PAGE
    assert "| bugs planted that a check noticed | " in PAGE


def test_other_tools_read_its_rows_as_csv(capsys: pytest.CaptureFixture[str]) -> None:
    assert field.main(["--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["name"] for row in rows] == [row.name for row in FIELD]
    assert [row["references"].split() for row in rows] == [list(row.references) for row in FIELD]
    assert {f"Version {row['version']}: " in PAGE for row in rows} == {True}


def test_the_field_is_planned_with_twins_and_without_faults() -> None:
    plans = killing.plan_kills(resolve_subject(SUBJECT), quick=True, field=True)
    open_, held = {row.name for row in FIELD}, {row.name for row in HELD_BACK if field.in_field(row)}
    assert {plan.name for plan in plans} == open_ | held
    assert all(plan.twin and not plan.faults for plan in plans)
    assert {
        plan.name for plan in killing.plan_kills(resolve_subject(SUBJECT), quick=True, field=True, only="open")
    } == open_
    with pytest.raises(RequestError, match=r"--field: is of bugs planted in shardproof\.parallel\.subject:subject"):
        killing.plan_kills(resolve_subject("tests.suites.toy_faults:theirs"), quick=True, field=True)
    with pytest.raises(RequestError, match="--field"):
        killing.plan_kills(
            resolve_subject(SUBJECT), quick=True, field=True, cases=cases_of(["tp=2"], resolve_subject(SUBJECT))
        )


def test_a_bug_is_measured_beside_the_same_case_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bug = OPEN["final-norm-not-summed"]
    with engine_named("inproc") as engine:
        killed = mutant_killed(bug, "tp-sp", engine, twin=True)
        assert (killed.row.killed, killed.row.twin) == (True, "yes")
        assert killed.row.when.startswith("fails with ") and "tp=2" in killed.row.when
        case = cases_showing(bug, "tp-sp")[0]
        with bug.subject() as wrong:
            monkeypatch.setattr(kill_rows, "SUBJECT", wrong)
            result = prove(case, SUBJECT, engine, explain=False)
            assert kill_rows.quiet_without(result, engine, 60.0) == "no", "a twin that is not quiet is told"


def test_what_was_measured_is_told_with_what_went_wrong(tmp_path: Path) -> None:
    rows = [
        dataclasses.replace(kill("good", "ledger", right="yes"), twin="yes", when="fails with tp=2; passes with tp=1"),
        dataclasses.replace(
            kill("bad", "ledger", right="no"), twin="no", when="fails even in the simplest case tried: 'tp=1'"
        ),
        dataclasses.replace(kill("secret", "ledger", right="no", held_back=True), twin="yes"),
    ]
    told = figures([*rows[:2], kill("c", "ledger")])
    assert told.twin_quiet == (1, 2) and told.when_told == (1, 2), "of rows that have none nothing is told"
    env = {"request": {"quick": True, "only": ""}, "started": "2026-11-26T01:46:21", "versions": {"torch": "2.13.0"}}
    with (tmp_path / "kill_matrix.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *(row.cells() for row in rows)])
    (tmp_path / "env.json").write_text(json.dumps(env))
    text = field.measure_folder(tmp_path)
    assert "    shardproof faults --field --quick\n" in text and "2026-11-26, torch 2.13.0" in text
    assert "secret" not in text
    assert "| first place right | 1 of 2 (50.0 %) | 0 of 1 (0.0 %) |" in text
    assert "- `bad` (mode=tp): first place, misleading cause, not quiet without it\n" in text and "`good`" not in text


def test_scripts_of_the_field_are_of_the_field_and_one_that_takes_too_long_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of a script is checked in tests/bugs/test_records.py."""

    def script(row: Mutant, _engine: object) -> str:
        if row.name == FIELD[0].name:
            raise TimeLimit("time limit of 60 s", ranks=(), positions=())
        return f"a script of {row.name}"

    monkeypatch.setattr(killing, "_script", script)
    first, second = FIELD[:2]
    told = list(itertools.islice(scripts("all", field=True), 2))
    assert told == [(first.name, "", "time limit of 60 s"), (second.name, f"a script of {second.name}", "")]
    assert main(["faults", "--field", "--emit-repro", second.name, str(tmp_path)]) == 0
    assert (tmp_path / f"{second.name}.py").read_text() == f"a script of {second.name}"
    with pytest.raises(RequestError, match="of a public issue; legal: all "):
        scripts("norm-computed-twice", field=True)
