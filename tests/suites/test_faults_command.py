"""`shardproof faults`: columns and figures of the matrix, exit status, interrupted runs, wrong requests, its plan."""

import csv
import dataclasses
import json
import re
from pathlib import Path

import pytest

from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.diagnosing.causes.cause import report_cause as made
from shardproof.harness.diagnosing.diagnosis import diagnose_ended_case
from shardproof.harness.errors import MachineError, RankDied, RequestError
from shardproof.harness.running.injecting import Kill, figures, killed_alone
from shardproof.harness.subject import cases_of, resolve_subject
from shardproof.harness.verdicts.facts import state_text
from shardproof.reports.commands import faults
from shardproof.suites import killing
from shardproof.suites.mutants.catalogue import HELD_BACK, MUTANTS, VARIANT_ROWS, cases_showing
from shardproof.suites.mutants.kill_rows import cause_told
from tests.harness.command_line import CommandLine
from tests.suites import toy_faults
from tests.suites.toy_faults import INTERRUPTED, kill

A_ROW = {
    **{"name": "a", "kind": "mutant", "stands_for": "B-01", "mode": "tp", "phase": "backward", "region": "head"},
    **{"killed_by": "replicas ledger", "killed": "yes", "equivalent": "no", "seconds": "0.500"},
    **{"region_right": "yes", "cause_right": "yes", "held_back": "no", "cause_told": "right", "twin": "", "when": ""},
}
"""The first row as it is written, its columns in their order."""
THEIRS, RIGHT = resolve_subject("tests.suites.toy_faults:theirs"), resolve_subject("tests.harness.toy_subjects:right")


@pytest.fixture(autouse=True)
def without_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows made by hand in place of hundreds of runs."""
    monkeypatch.setattr(faults, "KILLING", toy_faults.__name__)


def matrix() -> list[dict[str, str]]:
    with Path("runs/latest/kill_matrix.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_survivor_ends_with_one_and_is_named(shardproof: CommandLine) -> None:
    status, out, err = shardproof("faults")
    assert status == 1 and "survived: c in mode=tp (B-01)" in out
    assert re.search(r"Collectives that no check proves necessary.*tp +b +redundant", out, re.DOTALL)
    assert err.splitlines()[-1] == "[4/4] survived mode=tp c"
    assert [row["killed"] for row in matrix()] == ["yes", "yes", "no", "no"]
    assert [*matrix()[0].items()] == [*A_ROW.items()]


def test_show_says_what_the_folder_is_and_others_how_to_see_it(shardproof: CommandLine) -> None:
    shardproof("faults")
    status, out, _ = shardproof("show")
    assert status == 0
    assert out.startswith(
        "what `shardproof faults` found: 4 of 4 bugs planted in shardproof.parallel.subject:subject; no run of"
    )
    assert "killed, of those that are no equivalents" in out and "not killed: c in mode=tp (B-01)" in out
    for command in ("trace", "expect", "compare"):
        message = shardproof.refused(command, "runs/latest")
        assert "holds what `shardproof faults` found" in message and "legal: shardproof show runs/latest" in message
    Path("runs/latest/kill_matrix.csv").write_text("name,kind\na,mutant\n")
    assert "the column stands_for is missing" in shardproof.refused("show")


def test_a_row_that_the_machine_could_not_finish_is_neither_killed_nor_a_survivor(
    shardproof: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [kill("a", "ledger"), dataclasses.replace(kill("d"), machine="rank 1 was killed")]
    plans = [toy_faults.Plan(row=row) for row in rows]
    monkeypatch.setattr(toy_faults, "plan_kills", lambda *_, **__: plans)
    status, out, err = shardproof("faults")
    assert status == 3
    assert "no verdict: d in mode=tp: rank 1 was killed" in out and "survived" not in out + err
    assert figures(rows).killed == (1, 1) and figures(rows).unfinished == 1


def test_equivalents_do_not_count_and_their_proofs_are_kept(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("faults", "--quick", "--json")
    told = json.loads(out)
    assert (status, told["rows"], told["killed"], told["equivalent"], told["survivors"]) == (0, 3, [2, 2], 1, [])
    assert (told["median_s"], told["region_right"]) == (1.0, [1, 2])
    assert told["unmissed"] == [["tp", "b", "redundant"]]
    assert told["checks"]["replicas"] == {"kills": 2, "alone": 1}
    details = [json.loads(line) for line in Path("runs/latest/kills.jsonl").read_text().splitlines()]
    assert [detail["equivalent"] for detail in details] == ["", "", "nobody draws"]


def test_of_held_back_mutants_totals_alone_are_told(shardproof: CommandLine) -> None:
    """Neither what is printed nor what is written says which of them was given which place or cause."""
    status, out, err = shardproof("faults", "--held-back")
    told = out + err + "".join(Path("runs/latest", name).read_text() for name in ("kill_matrix.csv", "kills.jsonl"))
    assert status == 0 and "secret" not in told and "backward" not in told
    assert re.search(r"Figures of the held-back.*cause right.*1 of 2 .*misleading +1 of 2", out, re.DOTALL)
    assert [(row["name"], row["held_back"], row["cause_told"]) for row in matrix()] == [
        ("held-back", "yes", "misleading"),
        ("held-back", "yes", "right"),
    ]
    status, out, _ = shardproof("faults", "--held-back", "--json")
    assert status == 0 and json.loads(out)["held_back"]["cause_right"] == [1, 2]


@pytest.mark.parametrize(
    ("reported", "answer"),
    [
        ("", "none"),
        ("size_factor", "right"),
        ("stale size_factor", "misleading"),
        ("size_factor wrong_call", "right"),
        ("size_factor stale", "right and more"),
        ("stale", "misleading"),
    ],
)
def test_a_cause_is_right_when_the_first_one_reported_is(reported: str, answer: str) -> None:
    mutant = dataclasses.replace(MUTANTS[0], cause="size_factor|wrong_call")
    causes = tuple(made(word, state_text(""), "a call") for word in reported.split())
    diagnosis = dataclasses.replace(diagnose_ended_case(MachineError("", ranks=(), positions=())), causes=causes)
    assert cause_told(mutant, diagnosis) == answer
    nothing_fits = dataclasses.replace(mutant, cause="")
    assert cause_told(nothing_fits, diagnosis) == ("misleading" if causes else "none")


def test_an_interrupted_run_leaves_its_rows(shardproof: CommandLine) -> None:
    status, _, err = shardproof("faults", "--subject", INTERRUPTED)
    assert status == 130 and "finished rows are in" in err
    assert [row["mode"] for row in matrix()] == ["tp", "msp"]
    assert "the run folder cannot be written" in shardproof.refused("faults", "--out", "/proc/nowhere")


def test_figures_over_nothing_are_no_division_and_what_a_check_kills_alone_is_counted() -> None:
    assert figures([]).killed == (0, 0) and figures([]).median_s == 0.0
    assert faults.figure_table(figures([])).rows[0][2] == "-"
    rows = [kill("x", "ledger"), kill("y", "ledger", "waits"), kill("z", "waits")]
    alone = {"ledger": (2, 1, "x"), "waits": (2, 1, "z"), "merge": (0, 0, "")}
    assert killed_alone(rows, ("ledger", "waits", "merge")) == alone


def test_another_subject_gets_the_faults_of_its_collectives_and_no_mutant() -> None:
    plans = killing.plan_kills(THEIRS, quick=True)
    assert {plan.mode for plan in plans} == {"tp"}
    assert all(plan.faults and not plan.name for plan in plans)
    few = [dataclasses.replace(plans[0], faults=plans[0].faults[:3])]
    rows = [killed.row for killed in killing.run_kills(few, THEIRS)]
    assert [row.kind for row in rows] == ["fault"] * 3
    assert all(row.killed or row.equivalent for row in rows), rows


def test_processes_share_the_rows_and_one_that_ends_is_told() -> None:
    leaving = resolve_subject("tests.suites.toy_faults:leaving")
    (plan, *_) = killing.plan_kills(leaving, quick=True)
    assert plan.case
    plans = [dataclasses.replace(plan, faults=(fault,)) for fault in plan.faults[:2]]
    plans += [dataclasses.replace(plan, case=plan.case.but(seed=9))]
    rows: list[Kill] = []
    with pytest.raises(RankDied, match="^a process of the kill matrix ended: its process ended with exit status 9$"):
        rows.extend(killed.row for killed in killing.run_kills(plans, leaving, processes=2))
    assert rows and {row.name for row in rows} <= {str(fault) for fault in plan.faults[:2]}


def test_what_options_add_is_disturbed_where_the_subject_says_what_it_refuses() -> None:
    def added(subject: str) -> set[str]:
        plans = killing.plan_kills(resolve_subject(f"tests.suites.toy_faults:{subject}"), quick=False)
        assert len({fault for plan in plans for fault in plan.faults}) == sum(plan.rows for plan in plans)
        targets = [{fault.target for fault in plan.faults} for plan in plans]
        assert sum(map(len, targets)) == len(set().union(*targets)), "faults of one collective stay together"
        return {fault.target.phase for plan in plans[1:] for fault in plan.faults} & {"metric", "recompute"}

    assert added("theirs") == {"metric", "recompute"}
    assert added("unspoken") == set()


def test_ours_gets_a_row_for_every_mutant_and_variant() -> None:
    known = {"open": (*MUTANTS, *VARIANT_ROWS), "held-back": HELD_BACK, "": (*MUTANTS, *VARIANT_ROWS, *HELD_BACK)}
    for only, rows in known.items():
        assert {plan.name for plan in killing.plan_planted(quick=True, only=only)} == {row.name for row in rows}
        every = [(row.name, mode) for row in rows for mode in sorted(row.modes)]
        assert [(plan.name, plan.mode) for plan in killing.plan_planted(quick=False, only=only)] == every


def test_a_given_case_is_disturbed_and_no_other() -> None:
    (case,) = cases_of(["tp=3 layers=1 hidden=24 heads=3 kv_heads=3 ffn=30 steps=1"], THEIRS)
    plans = killing.plan_kills(THEIRS, quick=True, cases=(case,))
    assert {plan.case for plan in plans} == {case}
    assert {fault.target.group_size for plan in plans for fault in plan.faults} == {3}
    assert killing.plan_kills(resolve_subject(SUBJECT), quick=True, cases=(case,))[0].faults  # and no mutant
    for subject, words, rule in (
        (THEIRS, {"only": "held-back", "cases": (case,)}, "--held-back with a CASE"),
        (RIGHT, {}, "takes none of the cases whose collectives would be disturbed"),
        (RIGHT, {"cases": (case,)}, "its ranks issue no collective"),
        (THEIRS, {"cases": cases_of(["mode=fsp"], THEIRS)}, "does not take it: .* claims the modes tp, not fsp"),
        (THEIRS, {"dtype": "float32"}, r"--dtype float32: is for drawn cases of shardproof\.parallel\.subject:subject"),
    ):
        with pytest.raises(RequestError, match=rule):
            killing.plan_kills(subject, quick=True, **words)


def test_the_command_reads_the_case_in_the_words_of_its_subject(shardproof: CommandLine) -> None:
    assert "hidden=7" in shardproof.refused("faults", "tp=2 hidden=7 heads=2")
    assert shardproof("faults", "tp=2", "--quick")[0] == 0
    assert json.loads(Path("runs/latest/env.json").read_text())["request"]["cases"] == ["mode=tp"]


def test_a_dtype_is_that_of_every_drawn_case_but_for_bugs_of_other_dtypes() -> None:
    bugs = {row.name: row for row in MUTANTS}
    any_dtype = next(row for row in bugs.values() if "dtype" not in {**row.suite})
    other = bugs["masters-not-rounded-back"]
    assert {case.dtype for case in cases_showing(any_dtype, min(any_dtype.modes), "float32")} == {"float32"}
    assert {case.dtype for case in cases_showing(other, min(other.modes), "float32")} == {"bfloat16"}
