"""The headline, traffic, the break-even and uneven exchanges, added up by hand. The example notebook."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from shardproof.harness.verdicts.facts import Note, NoteKind
from shardproof.harness.verdicts.verdict import Verdict
from shardproof.reports.printing import run_tables, text_tables
from shardproof.reports.programs import figures, program_tables
from shardproof.reports.stored import summary
from shardproof.reports.stored.frames import Run, in_order, load
from shardproof.reports.stored.unchecked import unchecked_notes
from tests import ROOT
from tests.reports import sample_run
from tests.reports.sample_run import ACTIVATION_BYTES, TP, TP_SP


def test_the_headline_counts_what_one_rank_does(run: Run) -> None:
    tp, tp_sp = summary.headline(run).to_dict("records")
    assert (tp["mode"], tp["ranks"], tp["forward_calls"], tp["backward_calls"]) == ("tp", 2, 3, 2)
    assert tp["payload_bytes"] == tp["expected_payload_bytes"] == 6 * ACTIVATION_BYTES
    assert (tp_sp["forward_calls"], tp_sp["backward_calls"]) == (4, 4)
    assert tp_sp["payload_bytes"] == 8 * ACTIVATION_BYTES
    assert (tp["verdict"], tp_sp["verdict"]) == ("pass", "pass")
    assert (tp_sp["case"], tp_sp["words"]) == (TP_SP, "tp=2 seq=64"), "mode has its own column"


def test_the_headline_shows_the_rank_that_saves_most_and_no_zero_that_nobody_measured(run: Run) -> None:
    assert list(summary.headline(run)["saved_bytes"]) == [2 * ACTIVATION_BYTES] * 2
    assert text_tables.headline_table(summary.headline(run)).rows[0][5] == "8 KiB"
    (run.path / "memory.csv").unlink()
    headline = summary.headline(load(run.path))
    assert headline["saved_bytes"].isna().all()
    assert text_tables.headline_table(headline).rows[0][5] == "-"


def test_the_headline_shows_the_error_of_a_tensor_that_is_closest_to_its_limit(failing: Run, run: Run) -> None:
    def worst(verdicts: pd.DataFrame) -> list[tuple[Any, ...]]:
        headline = summary.headline(dataclasses.replace(run, verdicts=verdicts))
        return [*headline[["worst_error", "worst_allowed", "verdict"]].itertuples(index=False, name=None)]

    assert worst(failing.verdicts) == [(1.2e-2, 1e-9, "fail"), (2e-16, 1e-9, "pass")]
    exact = failing.verdicts.assign(case=TP_SP, worst_error=[9, 9, 9, 9, 9, 9, 1e-30], worst_allowed=[*[1e3] * 6, 0.0])
    assert list(exact["verdict"]) == [*["pass"] * 6, "fail"]
    assert worst(exact)[1] == (1e-30, 0.0, "fail"), "an error where none is allowed"
    passed = failing.verdicts.assign(case=TP_SP, worst_error=[9, 9, 9, 9, 9, 9, 2.0], worst_allowed=[*[10] * 6, 1.0])
    assert worst(passed)[1] == (2.0, 1.0, "fail"), "what failed"
    both = pd.concat([exact, passed.iloc[-1:]])
    assert worst(both)[1] == (2.0, 1.0, "fail"), "replicas apart by rounding are not all that failed"
    lost = run.verdicts.iloc[:1].assign(check="ledger", verdict="fail", worst_error=3.0, worst_allowed=0.0)
    assert pd.isna(worst(pd.concat([run.verdicts, lost]))[0][0]), (
        "a count is no error, and one that passed says nothing"
    )
    assert [verdict for *_, verdict in worst(run.verdicts.iloc[:0])] == ["unknown", "unknown"], "and never a pass"


def test_a_limit_has_its_dtype_where_one_is_not_float64(run: Run) -> None:
    assert "dtype" not in text_tables.headline_table(summary.headline(run)).headers
    half = dataclasses.replace(run, cases=run.cases.assign(dtype=["bfloat16", "float64"]))
    for table in (text_tables.headline_table, text_tables.grouped_table):
        shown = table(summary.headline(half))
        place = shown.headers.index("dtype")
        assert shown.headers[place - 1] == "max error / allowed"
        assert [row[place] for row in shown.rows] == ["bfloat16", "float64"]


def test_a_closed_form_that_leaves_fields_out_is_acknowledged_and_these_are_named(tmp_path: Path) -> None:
    run = load(sample_run.write(tmp_path / "run", expected=False))
    left_out = Note(kind=NoteKind.CLOSED_FORM, names=("axis", "dtype"), reason="fields that its terms leave out")
    stated = Verdict(case=TP, check="ledger", verdict="pass", facts=(), notes=(left_out,))
    unstated = Note(kind=NoteKind.CLOSED_FORM, reason="the subject states no expectation")
    none = dataclasses.replace(stated, case=TP_SP, notes=(unstated,))
    told = sample_run.with_records(run, [*run.records, stated, none])
    table = text_tables.headline_table(summary.headline(told))
    assert [row[table.headers.index("expected")] for row in table.rows] == ["as stated", "-"]
    grouped = text_tables.grouped_table(summary.headline(told))
    assert [row[grouped.headers.index("expected")] for row in grouped.rows] == ["1 of 1", "-"]
    note = "not checked: axis, dtype of the calls: the closed form leaves them out (1 case)"
    assert [one for one in unchecked_notes(told) if "closed form" in one] == [note]


def test_a_tensor_that_a_check_found_wrong_is_not_called_undecided(failing: Run) -> None:
    wrong = failing.records[-1]
    assert wrong.failure is not None
    names = wrong.failure.wrong[0].name, "grad/other"
    doubt = dataclasses.replace(
        failing.records[0], notes=(Note(kind=NoteKind.UNDECIDED, names=names),), decided={"grad": (0, 2)}
    )
    (note,) = unchecked_notes(sample_run.with_records(failing, [doubt, wrong]))
    assert note.startswith("could not be judged: 1 of 2 gradients in 1 case") and note.endswith(": grad/other")
    (both,) = unchecked_notes(sample_run.with_records(failing, [doubt]))
    assert both.startswith("could not be judged: 2 of 2 gradients")


@pytest.mark.parametrize(
    ("words", "worst"),
    [
        (["pass", "unknown", "fail"], "fail"),
        (["pass", "unknown"], "unknown"),
        (["pass", "skip"], "skip"),
        (["pass", "a new word"], "a new word"),
    ],
)
def test_a_case_is_as_good_as_its_worst_check(words: list[str], worst: str) -> None:
    assert summary.worst_verdict(pd.DataFrame({"verdict": words})) == worst


def test_failures_come_first(failing: Run) -> None:
    assert summary.worst_first(failing.verdicts)["verdict"].iloc[0] == "fail"
    assert failing.verdicts["verdict"].iloc[-1] == "fail", "in the run it was the last"


def test_without_expectation_nothing_is_claimed(tmp_path: Path) -> None:
    run = load(sample_run.write(tmp_path / "run", expected=False))
    assert summary.headline(run)["expected_payload_bytes"].isna().all()
    assert set(summary.traffic(run)["agrees"]) == {""}
    assert set(summary.traffic(run)["expected_calls"].isna()) == {True}


def test_two_errors_that_cancel_in_the_sum_do_not_agree(run: Run) -> None:
    lines = run.summary[run.summary["case"] == TP].head(1)
    other = "mode=tp tp=2 seed=1"
    one, two = lines.assign(calls=lines["calls"] + 1), lines.assign(case=other, calls=lines["calls"] - 1)
    cases = pd.concat([run.cases, run.cases.head(1).assign(case=other)])
    traffic = summary.traffic(dataclasses.replace(run, cases=cases, summary=pd.concat([one, two])))
    assert list(traffic["calls"]) == list(traffic["expected_calls"]) == [6]
    assert list(traffic["agrees"]) == ["no"]


@pytest.mark.parametrize(("apart", "told"), [(0, "yes"), (1, "no")])
def test_ranks_that_differ_agree_when_each_meets_its_own_expectation(run: Run, apart: int, told: str) -> None:
    of_ranks = pd.array([apart] * len(run.summary), dtype="Int64")
    lines = run.summary.assign(min_calls=run.summary["calls"] - 1, ranks_apart=of_ranks)
    assert set(summary.traffic(dataclasses.replace(run, summary=lines))["agrees"]) == {told}


def test_cases_on_other_numbers_of_ranks_are_never_added_up(run: Run) -> None:
    alone = summary.traffic(run)
    assert list(alone["phase"])[:3] == ["forward", "loss", "backward"], "in the order of a step"
    wide, text = run.cases.head(1).assign(case="mode=tp tp=4", world_size=4), {"case": "mode=tp tp=4"}
    lines = run.summary[run.summary["case"] == TP].assign(**text)
    both = dataclasses.replace(run, cases=pd.concat([run.cases, wide]), summary=pd.concat([run.summary, lines]))
    traffic = summary.traffic(both)
    assert traffic[traffic["ranks"] == 2].reset_index(drop=True).equals(alone)
    assert list(traffic.loc[traffic["ranks"] == 4, "calls"]) == [3, 1, 2]


def test_the_tally_names_checks_that_are_unknown_in_a_failed_case(failing: Run) -> None:
    headline = summary.headline(failing)
    case = next(one.case for one in failing.records if one.verdict == "fail")
    left = Verdict(case=case, check="waits", verdict="unknown", facts=())
    counted = "2 cases: 1 pass, 1 fail, 0 unknown, 0 skip"
    assert summary.tally_of_run(headline, failing.records).split("; ")[0] == counted
    told = summary.tally_of_run(headline, [*failing.records, left]).split("; ")
    assert told[:2] == [counted, "waits is unknown beside the failure"]


def test_words_that_all_cases_share_are_said_once(run: Run) -> None:
    table = text_tables.headline_table(summary.headline(run))
    assert [row[-1] for row in table.rows] == ["tp=2", "seq=64"], "no case is without words"
    assert table.title.endswith("; all have tp=2")
    alone = text_tables.headline_table(summary.headline(run).head(1))
    assert [row[-1] for row in alone.rows] == ["tp=2"], "one case keeps its words"


def test_the_title_claims_no_more_than_was_compared(run: Run) -> None:
    headline = summary.headline(run)
    silent = headline.assign(worst_error=float("nan"))
    crashed = silent.assign(expected_payload_bytes=pd.array([pd.NA] * len(silent), dtype="Int64"))
    titles = [text_tables.headline_table(frame).title for frame in (headline, silent, crashed)]
    known = ("Every case against the dense model", "Every case against its expected ledger", "Every case")
    assert titles == [f"{title}; all have tp=2" for title in known]

    def table_of(**request: str) -> Any:
        return text_tables.headline_table(summary.headline(dataclasses.replace(run, env={"request": request})).head(1))

    assert table_of(truth="itself on one rank, in float64").title == "Every case against the subject on one rank"
    launches = table_of(engine="launches")
    assert launches.title == "Launch B against launch A"
    assert not [header for header in launches.headers if "calls" in header or "bytes" in header], "none is recorded"


# Numbers as text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0"), (12, "12 B"), (1023, "1023 B"), (4096, "4 KiB"), (2**20 - 1, "1 MiB"), (1998586, "1.906 MiB")]
    + [(5 * 2**30, "5 GiB"), (5 * 2**44, "81,920 GiB"), (pd.NA, "-")],
)
def test_bytes_are_written_in_the_unit_that_they_need(size_bytes: object, text: str) -> None:
    assert text_tables.byte_size(size_bytes) == text


@pytest.mark.parametrize(("error", "text"), [(0.0, "0"), (2.134e-16, "2.1e-16"), (float("nan"), "-"), (None, "-")])
def test_errors_are_written_short_and_nothing_is_not_zero(error: object, text: str) -> None:
    assert text_tables.small(error) == text


# Break-even: isp sends 1000 bytes of weights and 1 byte a token, mtp 5 bytes a token: T* = 1000 / (5 - 1) = 250


def _growth(**lines: tuple[float, float]) -> pd.DataFrame:
    rows = [(mode, t, constant + slope * t) for mode, (constant, slope) in lines.items() for t in (100, 200, 400)]
    return in_order(pd.DataFrame(rows, columns=["mode", "tokens", "wire_bytes"]))


def test_the_crossing_is_where_the_lines_meet_and_parallel_lines_have_none() -> None:
    (crossing,) = run_tables.find_crossings(_growth(mtp=(0, 5), isp=(1000, 1))).to_dict("records")
    assert (crossing["mode"], crossing["other"]) == ("isp", "mtp")
    assert crossing["tokens"] == pytest.approx(250)
    assert crossing["wire_bytes"] == pytest.approx(1250)
    parallel = run_tables.find_crossings(_growth(mtp=(0, 5), msp=(0, 5)))
    apart = run_tables.find_crossings(_growth(mtp=(1000, 5), msp=(0, 4)))
    from_zero = run_tables.find_crossings(_growth(mtp=(0, 5), fsp=(0, 6.5)))
    assert len(parallel) == len(apart) == len(from_zero) == 0


CROSSING = {"mtp": {100: 1000, 200: 2000}, "isp": {100: 1600, 200: 1800}}


def grown(run: Run, names: dict[str, dict[int, int]]) -> Run:
    """A run of these modes at these tokens, each with one forward call in a layer and one elsewhere."""
    event = run.ledger[run.ledger["region"] == "layers.0.attention.wo"].head(1)
    cases, ledger = [], []
    for mode, sizes in names.items():
        for tokens, sent in sizes.items():
            text = f"mode={mode} tp=2 seq={tokens}"
            cases.append({"case": text, "mode": mode, "world_size": 2, "tokens": tokens, "micro": 2, "steps": 1})
            ledger.append(event.assign(case=text, wire_bytes=sent))
            ledger.append(event.assign(case=text, wire_bytes=10, region="head"))
            ledger.append(event.assign(case=text, wire_bytes=7, op="all_to_all"))
    return dataclasses.replace(run, cases=in_order(pd.DataFrame(cases)), ledger=pd.concat(ledger))


def test_growth_is_measured_a_micro_batch_with_and_without_what_lies_outside_the_layers(run: Run) -> None:
    measured = grown(run, CROSSING)
    layers = run_tables.growth_of_bytes(measured)
    assert list(layers["wire_bytes"]) == [500, 1000, 800, 900], "two micro-batches; isp sorts behind mtp"
    assert list(run_tables.growth_of_bytes(measured, "all")["wire_bytes"]) == [508.5, 1008.5, 808.5, 908.5]
    compared = run_tables.compare_modes(measured)
    assert list(compared["counted"]) == ["layers", "all"]
    assert list(compared["tokens"]) == pytest.approx([175, 175])


def test_modes_are_compared_across_the_words_that_they_bring_with_them_and_no_others(run: Run) -> None:
    measured = grown(run, CROSSING)

    def also(word: str) -> int:
        cases = measured.cases.assign(case=[c + word * ("isp" in c) for c in measured.cases["case"]])
        return len(run_tables.growth_of_bytes(dataclasses.replace(measured, cases=cases)))

    assert also(" head=exchange") == 4
    assert also(" layers=9") == 0, "another model"


def test_one_size_or_one_mode_is_no_growth(run: Run) -> None:
    assert len(run_tables.growth_of_bytes(run)) == 0
    assert len(run_tables.growth_of_bytes(grown(run, {"mtp": {100: 1, 200: 2}, "isp": {100: 1}}))) == 0
    assert len(run_tables.compare_modes(run)) == 0
    with pytest.raises(ValueError, match="legal: layers, all"):
        run_tables.growth_of_bytes(run, "some")


def test_a_sum_with_an_unknown_part_is_unknown(run: Run) -> None:
    lines = run.summary.copy()
    lines.loc[(lines["mode"] == "tp") & (lines["phase"] == "loss"), "expected_payload_bytes"] = pd.NA
    part = dataclasses.replace(run, summary=lines)
    tp, tp_sp = summary.headline(part)["expected_payload_bytes"]
    assert tp is pd.NA and tp_sp == 8 * ACTIVATION_BYTES
    by_phase = summary.traffic(part).set_index(["mode", "phase"])
    assert by_phase.loc[("tp", "loss"), "agrees"] == ""
    assert by_phase.loc[("tp", "loss"), "expected_payload_bytes"] is pd.NA
    assert by_phase.loc[("tp", "forward"), "agrees"] == "yes"


UNEVEN, EVEN = (((3, 0), (5, 4)), ((2, 2), (2, 2)))
"""Rows that ranks 0 and 1 of a recorded program send to ranks 0 and 1."""


def exchanged(rows: tuple[tuple[int, int], ...]) -> pd.DataFrame:
    """A ledger with an all-to-all in each of two layers; a row has 8 bytes."""
    place = {"step": 0, "phase": "forward", "axis": "ep", "op": "all_to_all", "ranks": "0 1"}
    events = [
        {**place, "rank": rank, "region": f"layers.{layer}.moe", "payload_bytes": 8 * sum(sent)}
        | {"sent_rows": "+".join(map(str, sent))}
        for layer in (0, 1)
        for rank, sent in enumerate(rows)
    ]
    return pd.DataFrame(events)


def test_rows_bytes_and_balance_by_destination(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "add_group_ranks", lambda _run: exchanged(UNEVEN))
    (row,) = figures.list_exchanges(run).to_dict("records")
    assert row == {
        **{"region": "layers.*.moe", "phase": "forward", "axis": "ep", "calls": 4, "rows": 2 * (3 + 5 + 4)},
        **{"busiest": 0, "busiest_rows": 2 * 8, "busiest_bytes": 2 * 64},
        **{"balance": pytest.approx(16 / 12), "worst": pytest.approx(8 / 6)},
    }
    assert [one.title for one in program_tables._exchange_tables(run)] == ["Rows sent by uneven all-to-alls"]
    for silent in (exchanged(EVEN), exchanged(UNEVEN).drop(columns="sent_rows")):
        monkeypatch.setattr(figures, "add_group_ranks", lambda _run, silent=silent: silent)
        assert program_tables._exchange_tables(run) == []


NOTEBOOK = ROOT / "docs" / "a_run_as_frames.ipynb"


def test_every_cell_of_the_notebook_runs_and_none_has_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    assert all(cell.get("outputs", []) == [] for cell in notebook["cells"]), "it would leave a diff"
    sample_run.write(tmp_path / "runs" / "latest", failing=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        exec(compile(cell, f"{NOTEBOOK.name}, cell {number}", "exec"), names)  # our own text
    assert names["by_place"]["payload_bytes"].sum().sum() == 14 * sample_run.ACTIVATION_BYTES
    assert list(names["lines"]["verdict"]) == ["fail", "pass"]
