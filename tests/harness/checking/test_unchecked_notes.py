"""The notes below a run's table: what was not returned, how much of the corpus was read, rows that nothing looks up."""

from __future__ import annotations

from pathlib import Path

from harness.cases import parse_cases
from harness.checking.evidence import Verdict
from harness.checking.exact_checks import SPLIT
from harness.ledger import NO_UPDATE
from harness.running.request import Request
from harness.running.run import run
from harness.running.store import Store
from harness.subject import named
from reports.stored.frames import load
from reports.stored.unchecked import unchecked_notes

HOLDS = "40 statements about the data hold; "


def notes(folder: Path, *rows: tuple[str, str, tuple[str, ...], str]) -> list[str]:
    """The notes of a run with these (check, message, unchecked, verdict), each in a case of its own."""
    store = Store(folder, "my:subject", {})
    texts = [f"mode=tp seed={number}" for number in range(len(rows))]
    store.plan([{"case": text, "mode": "tp", "world_size": 2} for text in texts])
    for text, (check, message, unchecked, verdict) in zip(texts, rows, strict=True):
        one = Verdict(case=text, check=check, verdict=verdict, message=message, unchecked=unchecked)
        store.add(text, "", (), (one,), {})
    store.close()
    return unchecked_notes(load(store.path))


def test_what_is_left_out_on_purpose_stands_apart(tmp_path: Path) -> None:
    names = ("grad/a.bias (left out on purpose)", "logits/0", "logits/1", "act/head")
    assert notes(tmp_path, ("coverage", "9 of 13 tensors", names, "pass")) == [
        "9 of 13 tensors; not returned, so not checked: 2 logits, 1 act; left out on purpose, so not checked: 1 grad"
    ]


def test_a_repeated_corpus_comes_first_and_equal_amounts_are_added_up(tmp_path: Path) -> None:
    amounts = ["many", "many", "it is repeated", "a", "b"]
    read = [("data", HOLDS + amount, (), "pass") for amount in amounts]
    assert notes(tmp_path, *read, ("data", HOLDS + "failed", (), "fail")) == [
        "data: it is repeated (1 case); many (2 cases); a (1 case); other amounts (1 case)"
    ]


def test_what_is_not_certain_of_the_ledger_is_a_note(tmp_path: Path) -> None:
    doubts = ("closed form: the subject states no expectation", "axis tp: its group has no description", NO_UPDATE)
    rows = [("ledger", "9 events", doubts[: count + 2], "pass") for count in range(2)]
    assert notes(tmp_path, *rows) == [
        "not certain: axis tp: its group has no description (2 cases)",
        f"not certain: {NO_UPDATE} (1 case)",
    ]


def test_the_share_of_the_parameters_that_is_split_is_a_note_the_least_first(tmp_path: Path) -> None:
    told = [
        f"2 of 2 ranks talk over tp=2; 1 of 9 sharded tensors are smaller on a rank; {share}{SPLIT}"
        for share in (99, 1, 99)
    ]
    assert notes(
        tmp_path, *(("parallelism", one, (), "pass") for one in told), ("parallelism", "2 of 2", (), "pass")
    ) == ["share of the parameters that is split: 1 % (1 case); 99 % (2 cases)"]


def test_rows_are_named_by_the_most_frequent_list(tmp_path: Path) -> None:
    rows = [("data", HOLDS, (f"rows {place}",), "pass") for place in (1, 2, 2)]
    assert notes(tmp_path, *rows) == ["not checked: rows 2 in 2 cases; other rows in 1 case"]


def test_a_run_states_that_its_corpus_is_repeated(tmp_path: Path) -> None:
    corpus, text = tmp_path / "short.txt", "to be or not to be"
    corpus.write_text(text)
    words = f"mode=tp tp=2 layers=1 hidden=16 heads=2 seq=8 steps=1 micro=2 batch=2 vocab=300 data={corpus}"
    result = run(
        Request(cases=parse_cases((words,)), subject=named("tests.harness.toy_subjects:right"), out=tmp_path / "runs")
    )
    told = unchecked_notes(load(result.path))
    assert f"data: the case reads 33 tokens and the corpus holds {len(text) + 1}: it is repeated (1 case)" in told
    missing = 300 - len(set(text)) - 1
    assert any(f"({missing} of 300 rows never looked up; first or last of a shard: 0, " in note for note in told)
