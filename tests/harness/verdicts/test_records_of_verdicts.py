"""Verdicts are records from the check to the file and back, and no reader but the renderer knows their words."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from shardproof.harness.verdicts import words
from shardproof.harness.verdicts.facts import (
    End,
    FailedCheck,
    First,
    LikelyCause,
    Note,
    NoteKind,
    RightWith,
    When,
    WhenKind,
    Where,
    Worst,
    WrongTensor,
    state_fact,
    state_text,
)
from shardproof.harness.verdicts.sentences.rendering import SENTENCES
from shardproof.harness.verdicts.verdict import FAIL, Verdict, schema_of, verdict_of
from shardproof.reports.commands.cli import main
from shardproof.reports.comparing.comparison import compare
from shardproof.reports.comparing.snapshot import snapshot
from shardproof.reports.pages import page
from shardproof.reports.pages.comment import render_comment
from shardproof.reports.stored.failures import bugs_of_run, group_by_place, simplest_first
from shardproof.reports.stored.frames import Run, load
from shardproof.reports.stored.unchecked import unchecked_notes
from tests import ROOT
from tests.harness import own_words
from tests.harness.proofs import ran

SCHEMA = ROOT / "docs" / "verdicts.schema.json"
FULL = Verdict(
    case="tp=2",
    check="forward",
    verdict=FAIL,
    facts=(
        state_fact("miscounted", name="loss/0", counted=3, truth=float("inf")),
        state_fact("flawed", name="w", kind="shape", flaw=state_fact("shape_of_truth", shape=(2, 3), truth=(3, 2))),
    ),
    worst=Worst(name="loss/0", error=float("inf"), allowed=1e-9, epsilons=float("nan")),
    notes=(Note(kind=NoteKind.LOOSE, names=("w; x",), numbers=(1, 2), reason="r"),),
    decided={"loss": (1, 2)},
    failure=FailedCheck(
        where=Where(mode="tp", world_size=2, ranks=(1,), step=0, phase="loss", region="m", tensor="loss/0"),
        repeat="shardproof run",
        wrong=(WrongTensor(name="loss/0", measure="peak", error=float("inf"), allowed=1e-9),),
        unit=2**-52,
        first=First(phase="loss", step=0, name="loss/0", beside=("wrong on rank 1",)),
        causes=(LikelyCause(id="zero", fact=state_text("it is zero")),),
        end=End(machine=False, lines=("raised",), traceback="t.txt"),
        when=When(kind=WhenKind.NEEDED, fails=("tp=2",), right=(RightWith(words="tp=1", but_for=("ledger",)),)),
    ),
)


def test_a_verdict_read_back_is_the_same_and_its_row_is_of_the_documented_schema() -> None:
    row = json.loads(json.dumps(FULL.row()))
    assert str(verdict_of(row)) == str(FULL)  # a nan equals nothing
    assert json.loads(SCHEMA.read_text()) == schema_of(Verdict)
    half = {**row, "facts": [{"id": "text", "values": {"text": "\ud800"}}]}
    assert verdict_of(half).statement == r"\ud800", "as it can be written to a page"
    end = {**row["failure"], "end": {"machine": True, "lines": []}}
    wrongs: list[dict[str, Any]] = [{"case": 3}, {"worst": {"name": "x"}}, {"failure": "what: x"}, {"failure": end}]
    wrongs += [{"worst": {**row["worst"], "error": 10**400}}, {"decided": {"loss": [1, 2**63]}}]
    kinds: list[Any] = [
        "other",
        [],
        "undecided elements",
        "lower precision",
        "grouping not finished",
        NoteKind.SPLIT_SHARE.value,
    ]
    texts = dict.fromkeys(("differing", "elements", "odd", "largest", "first"), "x")
    facts: list[Any] = [{"id": "no such"}, {"id": "differs"}, {"id": "zero", "values": 3}]
    facts += [{"id": "bits_differ", "values": texts}, {"id": "text", "values": {"text": 10**400}}]
    facts += [{"id": "flawed", "values": {"name": "w", "kind": "k", "flaw": {}}}]
    wrongs += [{"facts": [fact]} for fact in facts]
    wrongs += [{"notes": [{"kind": kind}]} for kind in [*kinds, NoteKind.SPLIT_SHARE.value]]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            verdict_of({**row, **wrong})


def test_each_sentence_is_in_its_table_and_every_one_is_said() -> None:
    """Checks and diagnoses hand ids to `state_fact`; what they hand to `state_text` was written by others."""
    files = [path for path in (ROOT / "harness").rglob("*.py") if "sentences" not in path.parts]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [id for id in SENTENCES if f'"{id}"' not in source and id != "text"] == []
    written = [
        ast.unparse(node)
        for path in files
        if {"checking", "diagnosing"} & {*path.parts}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("state_text", "Fact")
        if any(isinstance(part, ast.Constant | ast.JoinedStr) for part in node.args)
    ]
    assert written == []


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a failure, its statement of the words that it needs, and a passing case."""
    wrong = own_words.Network(lambda case: 2.0 if case.act == "tanh" and case.tp > 1 else 1.0)
    return ran(tmp_path_factory.mktemp("runs"), wrong, "tp=2", "tp=2 act=tanh", when_s=20.0).path


def shown(run: Run) -> list[object]:
    """Everything that readers make of a run, without the words of its verdicts."""
    found = bugs_of_run(simplest_first(run))
    places = group_by_place([one for one in run.records if one.verdict == FAIL], run.path, run.ledger)
    return [
        [(bug.verdict.case, bug.verdict.check, dict(bug.others), bug.cases) for bug in found],
        [(group.cases, len(group.others), group.called_at, group.map) for group in places],
        list(run.verdicts["verdict"]),
        unchecked_notes(run),
        compare(snapshot(run, "a"), snapshot(run, "b")).breaches,
    ]


def test_no_reader_needs_the_words_of_a_message(
    failing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a renderer that gives the name of the check alone, all that is counted, grouped and compared is the same."""
    known = shown(load(failing))
    monkeypatch.setattr(words, "render", lambda check, *_: [f"<{check}>"])
    run = load(failing)
    assert shown(run) == known
    assert all("what:" not in text for text in (page.render_page(run), render_comment(run)))
    assert main(["show", str(failing)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^fail: tp=2 act=tanh\n<\w+>$", out, re.M), out
    assert "2 cases: 1 pass, 1 fail" in out


def test_rows_are_appended_and_a_run_killed_anywhere_shows_what_it_had(failing: Path, tmp_path: Path) -> None:
    lines = (failing / "verdicts.jsonl").read_bytes().splitlines(keepends=True)
    later = [number for number, line in enumerate(lines) if "verdict" not in json.loads(line)]
    assert later == [*range(later[0], len(lines))], "statements of words are rows behind all verdicts"
    for file in failing.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    when = []
    for count in (later[0], len(lines)):
        (tmp_path / "verdicts.jsonl").write_bytes(b"".join(lines[:count]))
        failed = [one.failure for one in load(tmp_path).records if one.verdict == FAIL]
        assert failed and all(one is not None for one in failed)
        when.append({one.when.kind for one in failed if one and one.when})
    assert when == [set(), {WhenKind.NEEDED}]


def test_a_later_pass_of_the_same_case_hides_no_failure(failing: Path, tmp_path: Path) -> None:
    for file in failing.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    failed = next(one for one in load(failing).records if one.verdict == FAIL)
    passed = {"case": failed.case, "check": failed.check, "verdict": "pass", "facts": [], "of": 1}
    with (tmp_path / "verdicts.jsonl").open("a") as file_:
        file_.write(json.dumps(passed) + "\n")
    run = load(tmp_path)
    assert len(run.records) == len(load(failing).records) + 1
    assert bugs_of_run(simplest_first(run)) == bugs_of_run(simplest_first(load(failing)))


class Named:
    """A subject on one rank that returns these values, beside a truth of ones with the names."""

    words = {"seed": (1, 2), "steps": 1}

    def __init__(self, names: Sequence[str], returned: Mapping[str, float] = MappingProxyType({"loss/0": 1.0})) -> None:
        self._names, self._returned = names, returned

    def truth(self, case: Any, device: torch.device) -> Mapping[str, torch.Tensor]:
        return {name: torch.ones((), dtype=torch.float64) for name in ("loss/0", *self._names)}

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, torch.Tensor]:
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self._returned.items()}


def test_names_that_look_like_words_of_a_message_are_only_names(tmp_path: Path) -> None:
    """A truth whose names hold the separators, labels and markup of reports; the subject returns the loss alone."""
    odd = ("grad/w; bias (left out on purpose)", "grad/first:  v\nwhat: x", "grad/<b>w</b>")
    run = load(ran(tmp_path, Named(odd), "seed=1").path)
    (note,) = [note for note in unchecked_notes(run) if "returned" in note]
    assert note == "1 of 4 tensors of the truth were returned; not returned, so not checked: 3 grad"
    run = load(ran(tmp_path, Named(odd, dict.fromkeys(("loss/0", *odd), 2.0)), "seed=1").path)
    (bug,) = bugs_of_run(simplest_first(run))
    assert [line.partition(":")[0] for line in bug.verdict.lines] == [
        "what",
        "where",
        "error",
        "first",
        "causes",
        "repeat",
    ]
    assert "<b>w</b>" not in page.render_page(run)
