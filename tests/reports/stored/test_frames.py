"""Run folders become frames: complete ones exactly, killed ones with a note, hostile ones with one clear error."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from shardproof.harness.ledger import COLUMNS
from shardproof.harness.running.summary import SUMMARY_COLUMNS as HARNESS_COLUMNS
from shardproof.harness.verdicts.facts import Worst, notes_about, state_text
from shardproof.harness.verdicts.verdict import Verdict
from shardproof.reports.stored.files import RunFolderError
from shardproof.reports.stored.frames import SUMMARY_COLUMNS, load
from tests.reports import sample_run


def test_a_complete_run_loads_without_a_note_and_without_loss(folder: Path) -> None:
    run = load(folder)
    assert run.notes == ()
    assert tuple(run.ledger.columns) == COLUMNS
    written = [event for case, calls in sample_run.CALLS.items() for event in sample_run.events(case, calls)]
    assert len(run.ledger) == len(written) == 28
    assert tuple(run.ledger.iloc[5]) == sample_run.row(written[5])
    assert list(run.cases["case"]) == [sample_run.TP, sample_run.TP_SP]
    assert run.env["torch"] == "2.13.0"
    assert run.timings["seconds"].sum() == 0.5
    assert list(run.memory["saved_bytes"]) == [4096, 8192] * 2


def test_words_with_an_order_are_ordered_categoricals(folder: Path) -> None:
    run = load(folder)
    for frame in (run.events, run.summary, run.verdicts, run.timings):
        assert frame["mode"].cat.ordered and list(frame["mode"].cat.categories[:2]) == ["tp", "tp-sp"]
    assert all(run.ledger[name].cat.ordered for name in ("phase", "op", "axis"))
    assert run.ledger["phase"].min() == "forward"
    assert run.ledger["phase"].max() == "backward", "by time and not by the alphabet"
    text = (folder / "ledger.csv").read_text().replace(",tp-sp,", ",zeta,").replace(",tp,2,", ',"[0, 1]",2,')
    (folder / "ledger.csv").write_text(text)
    ledger = load(folder).ledger
    assert ledger["mode"].max() == "zeta", "an unknown mode sorts behind the known"
    assert set(ledger["axis"]) == {"[0, 1]"}


def test_text_that_looks_like_a_missing_value_stays_text(folder: Path) -> None:
    path = folder / "ledger.csv"
    path.write_text(path.read_text().replace("layers.0.mlp.w1", "NA"))
    assert set(load(folder).ledger["region"]) == {"layers.0.attention.wo", "layers.0.attention.wqkv", "", "NA"}


def test_a_packed_ledger_reads_like_a_plain_one_and_cut_at_its_end_gives_what_came_before(folder: Path) -> None:
    plain, packed = load(folder).ledger, folder / "ledger.csv.gz"
    data = (folder / "ledger.csv").read_bytes()
    (folder / "ledger.csv").rename(packed)
    with pytest.raises(RunFolderError, match=r"ledger\.csv\.gz"):
        load(folder)
    half = len(data) // 2
    packed.write_bytes(gzip.compress(data[:half]) + gzip.compress(data[half:]))
    assert load(folder).ledger.equals(plain)
    packed.write_bytes(gzip.compress(data)[: len(gzip.compress(data)) * 2 // 3])
    run = load(folder)
    assert 0 < len(run.ledger) < 28
    assert any("archive is cut" in note for note in run.notes)


def test_verdicts_are_flat_and_a_missing_worst_is_no_number(folder: Path) -> None:
    line = sample_run.verdict(sample_run.TP, "ledger", error=None)
    with (folder / "verdicts.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    verdicts = load(folder).verdicts
    assert verdicts["worst_error"].iloc[0] == 2e-16
    assert verdicts["worst_allowed"].iloc[0] == 1e-9
    assert verdicts.iloc[-1]["check"] == "ledger"
    assert verdicts["worst_error"].isna().sum() == 1


# What the harness writes


def stored(out: Path, *cases: str) -> Path:
    """A folder written by the harness: both cases planned, the given ones finished."""
    worst = Worst(name="grad/w", error=float("inf"), allowed=1e-9, epsilons=float("inf"))
    notes = notes_about(undecided=("a", "b"))
    verdict = Verdict(case="", check="forward", verdict="fail", worst=worst, facts=(state_text("m"),), notes=notes)
    events = [sample_run.events(case, sample_run.CALLS[case]) for case in cases]
    return sample_run.stored(out, sample_run.CALLS, events, verdict)


def test_a_folder_that_the_harness_wrote_loads_without_a_note(folder: Path, tmp_path: Path) -> None:
    by_harness = stored(tmp_path / "runs", *sample_run.CALLS)
    run = load(tmp_path / "runs" / "latest")
    assert run.notes == ()
    assert (by_harness / "ledger.csv").read_text() == (folder / "ledger.csv").read_text()
    assert run.summary["payload_bytes"].sum() == 14 * sample_run.ACTIVATION_BYTES
    assert run.summary["expected_calls"].isna().all() and SUMMARY_COLUMNS == HARNESS_COLUMNS
    assert list(run.verdicts["worst_error"]) == [float("inf")] * 2
    assert list(run.verdicts["unchecked"]) == ["undecided: a, b"] * 2
    assert [one.notes for one in run.records] == [notes_about(undecided=("a", "b"))] * 2
    assert run.timings["seconds"].sum() == 0.5


def test_a_folder_that_the_harness_had_to_leave_loads_with_notes(tmp_path: Path) -> None:
    folder = stored(tmp_path, sample_run.TP)
    event = sample_run.row(sample_run.events(sample_run.TP_SP, sample_run.CALLS[sample_run.TP_SP])[0])
    with (folder / "ledger.csv").open("a") as file:
        file.write(",".join(map(str, event)) + "\n" + "mode=tp-sp tp=2 seq=64,tp-sp,2,")
    run = load(folder)
    assert list(run.summary["case"].unique()) == [sample_run.TP, sample_run.TP_SP]
    assert len(run.notes) == 3
    assert "ledger.csv: its last line was cut" in run.notes[0]
    assert "summary.csv lacks 1 of" in run.notes[1]
    assert "1 of 2 cases have no verdict" in run.notes[2]


# A killed run


def test_a_missing_summary_is_made_from_the_ledger_without_expectation(folder: Path) -> None:
    complete = load(folder).summary
    (folder / "summary.csv").unlink()
    run = load(folder)
    keys = ["case", "phase", "op"]
    made, written = (frame.sort_values(keys).reset_index(drop=True) for frame in (run.summary, complete))
    for name in (*keys, "calls", "payload_bytes", "wire_bytes"):
        assert list(made[name]) == list(written[name]), name
    assert made["expected_calls"].isna().all()
    assert any("summary.csv lacks 2 of" in note for note in run.notes)


def test_the_minimum_over_ranks_may_be_absent_from_a_row(folder: Path) -> None:
    header, first, *rows = (folder / "summary.csv").read_text().splitlines()
    (folder / "summary.csv").write_text("\n".join((header, f"{first[:-4]},1,4096,2048,", *rows)) + "\n")
    least = load(folder).summary["min_calls"]
    assert least[0] == 1
    assert least[1:].isna().all()


def test_a_run_killed_before_its_first_event_loads_empty_with_notes(tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text('{"layout": 3}')
    run = load(tmp_path)
    assert len(run.cases) == len(run.ledger) == len(run.summary) == len(run.verdicts) == 0
    assert [note.split()[0] for note in run.notes] == ["cases.jsonl", "ledger.csv", "summary.csv", "verdicts.jsonl"]


@pytest.mark.parametrize("name", ["ledger.csv", "summary.csv", "timings.csv", "verdicts.jsonl", "cases.jsonl"])
def test_a_file_created_and_never_filled_is_a_note_and_no_error(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"case,mo" if name.endswith("csv") else b'{"case": ')
    assert any(name in note for note in load(folder).notes)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0), (2**40, 2)])
def test_a_rank_that_its_world_does_not_have_is_refused(folder: Path, rank: int, size: int) -> None:
    ledger = pd.read_csv(folder / "ledger.csv", keep_default_na=False)
    ledger.loc[1, ["rank", "world_size"]] = rank, size
    ledger.to_csv(folder / "ledger.csv", index=False)
    with pytest.raises(RunFolderError, match=f"ledger.csv: rank {rank} of a world of {size} cannot be; legal: "):
        load(folder)


def test_a_world_that_no_machine_holds_is_refused(folder: Path) -> None:
    for size in ("0", "-2", "1e12", "Infinity"):
        text = (folder / "cases.jsonl").read_text()
        (folder / "cases.jsonl").write_text(text.replace('"world_size": 2', f'"world_size": {size}'))
        with pytest.raises(RunFolderError, match="is no number of ranks; legal: 1 to "):
            load(folder)
        (folder / "cases.jsonl").write_text(text)


def test_cases_of_another_program_have_no_mode_and_no_size(folder: Path) -> None:
    (folder / "cases.jsonl").write_text('{"case": 1}\n{"case": "mode=tp tp=2", "mode": null, "world_size": "two"}\n')
    cases = load(folder).cases
    assert list(cases["case"]) == ["1", "mode=tp tp=2"]
    assert list(cases["mode"]) == ["", ""] and cases["world_size"].isna().all()


HARM: dict[str, Callable[[bytes], bytes]] = {
    "junk": lambda data: b"\xff\xfe\x00\x01\n" * 3,
    "other columns": lambda data: b"a,b\n1,2\n",
    "words for numbers": lambda data: data.replace(b",2,", b",two,"),
    "ragged": lambda data: data + b"x," * 40 + b"\n",
    "not json": lambda data: b"not json\n" + data,
    "a list": lambda data: b"[1]\n",
    "a worst that is none": lambda data: (
        b'{"case": "mode=tp", "check": "forward", "verdict": "pass", "facts": [], "worst": [1]}\n'
    ),
    "a verdict that is none": lambda data: b'{"case": "mode=tp", "check": "run", "verdict": "maybe", "facts": []}\n',
}
HARMED = {
    "ledger.csv": ("junk", "other columns", "words for numbers", "ragged"),
    "summary.csv": ("other columns", "words for numbers"),
    "verdicts.jsonl": ("not json", "a list", "a worst that is none", "a verdict that is none"),
    "cases.jsonl": ("not json", "junk"),
    "env.json": ("not json", "a list", "junk"),
}


@pytest.mark.parametrize(("name", "how"), [(name, how) for name, ways in HARMED.items() for how in ways])
def test_a_hostile_file_is_one_error_that_names_it(folder: Path, name: str, how: str) -> None:
    (folder / name).write_bytes(HARM[how]((folder / name).read_bytes()))
    with pytest.raises(RunFolderError, match=name.replace(".", r"\.")) as caught:
        load(folder)
    assert "\n" not in str(caught.value).strip() and ("worst" in str(caught.value)) is ("worst" in how)
