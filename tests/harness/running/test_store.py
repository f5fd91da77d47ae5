"""The run folder: readable at any moment, also of a killed run; safe names, nothing overwritten, one clear error."""

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.errors import MachineError, RequestError
from shardproof.harness.ledger import COLUMNS
from shardproof.harness.run_folder import safe_name
from shardproof.harness.running import store as store_module
from shardproof.harness.running.result import ledger_rows
from shardproof.harness.running.store import Store, environment
from shardproof.harness.running.summary import SUMMARY_COLUMNS, summarize
from shardproof.harness.terms import Term
from shardproof.harness.verdicts.facts import Worst, note_unchecked, state_text
from shardproof.harness.verdicts.verdict import Verdict
from shardproof.reports.commands.cli import main
from shardproof.reports.stored.frames import load
from shardproof.reports.stored.summary import headline
from tests.harness.toy_evidence import TERMS, events, without

CASE = "mode=tp"


def opened(out: Path, subject: str = "shardproof.parallel.subject:subject") -> Store:
    return Store(out, subject, environment(["shardproof", "run"], {"subject": subject}))


def finished(store: Store, ledger: Any = None, verdict: str = "pass") -> None:
    ledger = events() if ledger is None else ledger
    worst = Worst(name="loss/0", error=float("inf"), allowed=1e-9, epsilons=float("nan"))
    notes, decided = note_unchecked("x"), {"loss": (1, 1)}
    told = {"check": "forward", "facts": (state_text("a\nb"),), "notes": notes, "decided": decided}
    verdicts = [Verdict(case=CASE, verdict=verdict, worst=worst, **told)]  # type: ignore[arg-type]
    rows = summarize(CASE, "tp", 2, ledger, TERMS)
    store.add(CASE, ledger_rows(ledger), rows, verdicts, {"truth": 0.25, "recorded": 1.5})


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_run_folder_holds_the_contracts_files_and_columns(tmp_path: Path) -> None:
    store = opened(tmp_path / "runs")
    store.plan([{"case": CASE, "mode": "tp", "world_size": 2}])
    finished(store)
    store.close()
    names = {"env.json", "cases.jsonl", "ledger.csv", "summary.csv", "verdicts.jsonl", "timings.csv", "memory.csv"}
    assert {path.name for path in store.path.iterdir()} == names
    assert (tmp_path / "runs" / "latest").resolve() == store.path.resolve()
    assert (tmp_path / "runs" / ".gitignore").read_text() == "*\n", "runs stay out of the user's repository"
    ledger = table(store.path / "ledger.csv")
    assert tuple(ledger[0]) == COLUMNS and len(ledger) == 40
    assert ledger[0]["region"] == "embedding" and ledger[0]["is_async"] == "False"
    env = json.loads((store.path / "env.json").read_text())
    assert env["command"] == ["shardproof", "run"]
    assert {"python", "torch", "shardproof"} <= set(env["versions"])
    (verdict,) = map(json.loads, (store.path / "verdicts.jsonl").read_text().splitlines())
    assert verdict == {
        "case": CASE,
        "check": "forward",
        "verdict": "pass",
        "worst": {"name": "loss/0", "error": "inf", "allowed": 1e-9, "epsilons": "nan"},
        "facts": [{"id": "text", "values": {"text": "a\nb"}}],
        "message": "a\nb",
        "notes": [{"kind": "not checked", "reason": "x"}],
        "decided": {"loss": [1, 1]},
        "of": 1,
    }
    assert table(store.path / "timings.csv")[1] == {"case": CASE, "part": "recorded", "seconds": "1.500000"}


def test_the_summary_holds_one_rank_beside_the_expectation_and_shows_lacking_and_surplus_events() -> None:
    rows = summarize(CASE, "tp", 2, events(), TERMS)
    assert [(r.phase, r.op, r.calls, r.payload_bytes, r.wire_bytes) for r in rows] == [
        ("forward", "all_reduce", 8, 3072, 3072),
        ("loss", "all_reduce", 4, 256, 256),
        ("backward", "all_reduce", 8, 3072, 3072),
    ]
    assert [(r.expected_calls, r.expected_payload_bytes) for r in rows] == [(8, 3072), (4, 256), (8, 3072)]
    assert all(r.min_calls is None for r in rows)
    assert {r.expected_calls for r in summarize(CASE, "tp", 2, events(), None)} == {None}
    lost = tuple(event for event in events() if event.phase != "loss")
    lacking = [row for row in summarize(CASE, "tp", 2, lost, TERMS) if row.phase == "loss"]
    assert [(row.calls, row.expected_calls) for row in lacking] == [(0, 4)]
    (surplus,) = summarize(CASE, "tp", 2, without(events(), phase="x")[:1], ())
    assert (surplus.calls, surplus.expected_calls, surplus.min_calls) == (1, 0, 0)


@pytest.mark.parametrize(("loss_of", "apart"), [({0: 4, 1: 2}, 0), ({0: 2, 1: 4}, 2), ({0: 4, 1: 4}, 1)])
def test_every_rank_is_held_against_its_own_expectation(loss_of: dict[int, int], apart: int) -> None:
    """Rank 0 is the last stage and takes twice as many losses; the largest and smallest numbers do not show it."""
    losses = Term(phase="loss", op="all_reduce", axis="tp", group_size=2)
    form = [replace(losses, calls=2 * (2 - tp), at={"tp": tp}) for tp in (0, 1)]
    of_loss = [event for event in events() if event.phase == "loss"]
    ledger = [e for rank, calls in loss_of.items() for e in [e for e in of_loss if e.rank == rank][:calls]]
    (row,) = summarize(CASE, "tp", 2, ledger, form, (), {"tp": ((0, 1),)})
    assert (row.expected_calls, row.ranks_apart) == (4, None)
    assert (row.min_calls is not None) == (len(set(loss_of.values())) > 1)
    form = [replace(term, payload_bytes=64) for term in form]
    (row,) = summarize(CASE, "tp", 2, ledger, form, (), {"tp": ((0, 1),)})
    assert (row.calls, row.expected_calls, row.ranks_apart) == (4, 4, apart)


def test_min_columns_are_filled_where_ranks_differ_and_only_there(tmp_path: Path) -> None:
    store = opened(tmp_path)
    finished(store)
    finished(store, tuple(event for event in events() if event.rank == 0 or event.phase != "forward"))
    rows = table(store.path / "summary.csv")
    assert tuple(rows[0]) == SUMMARY_COLUMNS
    apart = [("", "0")] * 3 + [("0", "1"), ("", "0"), ("", "0")]
    assert [(row["min_calls"], row["ranks_apart"]) for row in rows] == apart
    finished(store)
    assert len(table(store.path / "summary.csv")) == 9


def test_a_large_ledger_is_packed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LARGEST_LEDGER", 1000)
    store = opened(tmp_path)
    finished(store)
    store.close()
    assert not (store.path / "ledger.csv").exists()
    with gzip.open(store.path / "ledger.csv.gz", "rt", newline="") as file:
        assert len(list(csv.DictReader(file))) == 40
    assert store_module.LARGEST_LEDGER == 1000


def test_two_runs_in_one_second_have_two_folders(tmp_path: Path) -> None:
    stores = [opened(tmp_path) for _ in range(4)]
    assert len({store.path for store in stores}) == 4
    assert (tmp_path / "latest").resolve() == stores[-1].path.resolve()


@pytest.mark.parametrize("subject", ["../../etc:passwd", "a b/c:d\ne", "", "--out", "x" * 500, "\u00fcml:\u00e4ut"])
def test_any_subject_name_gives_a_safe_folder(tmp_path: Path, subject: str) -> None:
    name = safe_name(subject)
    assert name and len(name) <= 80 and name.isascii()
    assert name[0] not in "-." and "/" not in name and name != ".."
    store = opened(tmp_path / "runs", subject)
    assert store.path.parent == tmp_path / "runs"
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_place_that_cannot_hold_a_run_is_one_clear_error(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(RequestError, match=r"out=.*file: the run folder cannot be written \(File exists\); legal:"):
        opened(taken)
    with pytest.raises(RequestError, match="Not a directory"):
        opened(taken / "below")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    store = opened(tmp_path)
    (store.path / "verdicts.jsonl").unlink()
    (store.path / "verdicts.jsonl").symlink_to("/dev/full")
    with pytest.raises(MachineError, match="No space left on device"):
        finished(store)
    assert len(table(store.path / "ledger.csv")) == 40


def test_a_place_without_links_loses_the_link_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "precious").touch()
    store = opened(tmp_path)
    assert (tmp_path / "latest" / "precious").exists()
    assert len(store.notes) == 1 and "does not point to this run" in store.notes[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["latest", store.path.name])


FIRST, SECOND = "mode=tp tp=2", "mode=tp tp=4"
CHECKS = ("forward", "replicas", "update")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two cases of three verdicts each; the last one of each fails."""
    store = Store(tmp_path, "my_pkg.tp:subject", {"versions": {}})
    store.plan({"case": case, "mode": "tp", "world_size": 2} for case in (FIRST, SECOND))
    for case in (FIRST, SECOND):
        words = zip(CHECKS, ("pass", "pass", "fail"), strict=True)
        verdicts = [
            Verdict(case=case, check=check, verdict=word, facts=(state_text(f"m {check}"),)) for check, word in words
        ]
        store.add(case, "", (), verdicts, {"truth": 0.5})
    store.close()
    return store.path


def verdicts(folder: Path) -> list[str]:
    return list(headline(load(folder))["verdict"])


def test_wherever_the_verdicts_are_cut_no_case_reads_as_a_pass(folder: Path) -> None:
    data = (path := folder / "verdicts.jsonl").read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")]
    for place in sorted(
        {*ends, *(end - 1 for end in ends), *(end + 1 for end in ends[:-1]), *range(0, len(data), 151)}
    ):
        path.write_bytes(data[:place])
        whole = sum(end <= place for end in ends)
        first, second = "fail" if whole >= 3 else "unknown", "fail" if whole >= 6 else "unknown"
        assert verdicts(folder) == [first, second], place


def test_a_cut_between_two_lines_of_a_case_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "verdicts.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    assert main(["show", str(folder)]) == 0
    told = capsys.readouterr().out
    assert f"unknown (run): {SECOND}\n2 of its 3 verdicts are stored: the run was stopped while they were writ" in told
    assert "note: verdicts.jsonl lacks verdicts of 1 of the cases in it: the run was stopped\n" in told
