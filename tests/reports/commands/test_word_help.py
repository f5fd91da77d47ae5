"""Help in the terminal: the words of a case, as the class that checks them declares them; what a verdict covers."""

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardproof import run as run_cases
from shardproof.harness.terms import Term
from shardproof.parallel.slicing.words import Sliced
from shardproof.reference.case import Case, CaseError
from shardproof.reference.language.words import Meaning
from shardproof.reports.commands import word_help
from shardproof.reports.printing.run_tables import calls_table
from tests import ROOT
from tests.harness.command_line import ONE, TOY, CommandLine

PAGE = ROOT / "docs" / "case.md"
LISTED = [word for word in Case.meanings() if "|" in word.legal and word.legal != "true|false"]


@pytest.mark.parametrize("language", [Case, Sliced])
def test_every_word_has_a_meaning_and_legal_values(language: type[Case] | type[Sliced]) -> None:
    words = language.meanings()
    assert [word.name for word in words] == [field.name for field in dataclasses.fields(language)]
    assert all(word.meaning and word.legal and word.group for word in words)


@pytest.mark.parametrize("word", LISTED, ids=lambda word: word.name)
def test_the_listed_values_are_those_that_the_case_names_when_it_refuses_one(word: Meaning) -> None:
    with pytest.raises(CaseError) as refused:
        Case.parse(f"{word.name}=no-such-value")
    assert set(refused.value.legal.replace("|", " ").split()) == set(word.legal.split("|"))


def test_the_page_in_docs_is_what_the_command_prints(shardproof: CommandLine) -> None:
    assert shardproof("help", "case", "--markdown")[:2] == (0, PAGE.read_text())


@pytest.mark.parametrize("topic", word_help.TOPICS)
def test_a_terminal_gets_every_word_in_its_width(shardproof: CommandLine, topic: str) -> None:
    status, out, _ = shardproof("help", topic)
    assert status == 0
    meanings = Case.meanings() if topic == "case" else Sliced.meanings()
    assert all(f"\n  {word.name}={word.default}" in out for word in meanings)
    assert max(len(line) for line in word_help.help_as_text(word_help.TOPICS[topic], 100).splitlines()) <= 100


def test_the_calls_of_a_case_with_formula_bytes_and_reason(shardproof: CommandLine) -> None:
    """By hand: 4 * 16 tokens of 64 float64 in an activation, forward in embedding and two row linears of two layers."""
    status, out, _ = shardproof("help", "calls", "tp=2 dp=2 zero=1 layers=2 seq=16 batch=4 hidden=64 steps=1 micro=3")
    assert status == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    activation = f"tp=2 {4 * 16 * 64 * 8:,} float64[slice_tokens * hidden]"
    row_linears = "layers.*.attention.wo, layers.*.mlp.w2 forward all_reduce"
    assert f"{row_linears} {activation} {2 * 2 * 3} partial outputs" in lines
    assert "- grad_sync all_reduce dp=2 16 float64[2] 1 loss and number of tokens" in lines
    assert any(line.startswith("- step all_gather dp=2 ") and line.endswith("parameters of a bucket") for line in lines)
    message = shardproof.refused("help", "calls", "mode=tp-sp tp=2", "--subject", f"{TOY}limited")
    assert "states no calls for" in message
    assert "tp=two: must be a whole number" in shardproof.refused("help", "calls", "tp=two")
    table = calls_table("mode=mine", [Term(op="all_reduce", axis="tp"), Term(phase="forward", region="up", calls=3)])
    assert table.rows == (  # of terms that leave fields out
        ("-", "-", "all_reduce", "tp", "-", "-", "-", ""),
        ("up", "forward", "-", "-", "-", "-", "3", ""),
    )


SUBJECT = f"{__name__}:own"


def own(case: Any, device: torch.device) -> Mapping[str, Any]:
    loss = torch.ones((), dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(loss)
    return {"loss/0": loss}


own.words, own.truth = {"width": 12, "act": ("gelu", "relu"), "big": False}, "alone"  # type: ignore[attr-defined]


def test_words_without_quotes_are_cases_and_a_note_says_so(shardproof: CommandLine) -> None:
    _, out, err = shardproof("run", "tp=1", "steps=1", "--subject", SUBJECT)
    note = 'note: these words are 2 cases, one each; as one case: "tp=1 steps=1"\n'
    assert err.count(note) == 1 and "tp=1" in out and "steps=1" in out
    for words in (("tp=1", "tp=1 steps=1"), ("tp=1 steps=1",), ("steps=1", "steps=2")):
        assert "note: these words" not in shardproof("run", *words, "--subject", SUBJECT)[2]
    assert note in shardproof("faults", "tp=1", "steps=1", "--subject", SUBJECT)[2]
    assert note.replace("steps", "layers") in shardproof("predict", "tp=1", "layers=1", "--memory", "nothing")[2]
    quoted = shardproof("names", "tp=2 layers=1")
    assert quoted[0] == 0 and shardproof("names", "tp=2", "layers=1") == quoted, "a command of one case"


def test_expect_finds_a_case_in_any_order_of_its_words(shardproof: CommandLine, folder: Path) -> None:
    run = run_cases(["tp=2 steps=1", "tp=2 width=7 act=relu", "tp=2"], SUBJECT, out="runs").path
    for words, case in {"steps=1 tp=2": "tp=2 steps=1", "act=relu width=7 tp=2": "tp=2 width=7 act=relu"}.items():
        status, out, _ = shardproof("expect", str(run), *words.split())
        assert status == 0 and f'if str(case) != "{case}"' in out, words
    for words in ("tp=2 steps=1 big=true", "width=7 tp=2", "act=relu tp=2 width=8", "steps=1", "tp=2 depth=3"):
        assert "is not in run" in shardproof.refused("expect", str(run), words)
    for words in ("seq=64 dp=1 mode=tp-sp", "preset=tiny-gpt mode=tp-sp tp=2 seq=64 layers=2"):
        status, out, _ = shardproof("expect", str(folder), words)
        assert status == 0 and 'if str(case) != "mode=tp-sp tp=2 seq=64"' in out, "a case of ours, however written"
    assert shardproof("expect", str(folder), "tp=2")[0] == 0


def test_a_folder_that_cannot_be_written_is_a_wrong_request_and_no_other_is_made(shardproof: CommandLine) -> None:
    Path("a.txt").touch()
    start_s, taken = time.monotonic(), "it is a file"
    reasons = {"/dev/null": taken, "/proc/x": "No such file or directory", "a.txt": taken, "a.txt/b": ""}
    for folder, reason in reasons.items():
        message = shardproof.refused("run", f"{ONE} save=new", f"{ONE} save={folder}", "--subject", f"{TOY}right")
        assert f"save={folder}: cannot be written ({reason}" in message
        assert "legal: a folder with write permission, such as save=checkpoint" in message
    assert [*Path().rglob("*")] == [Path("a.txt")] and time.monotonic() - start_s < 40


CASE = "mode=tp tp=1 layers=1 hidden=16 heads=2 vocab=24 seq=8 micro=1 steps=1 dtype=bfloat16"
TOLD = "could not be judged: 15 of 23 gradients in 1 case: rounding alone is as large, or they do not merge: "


def amplified(dtype: torch.dtype) -> Tensor:
    """1 in float64; where sums are rounded it is that error many times over, as behind a router that flips."""
    row = torch.linspace(0.1, 1, 640, dtype=torch.float64).to(dtype).reshape(1, -1)
    exact = row.double() @ row.double().T
    return 1 + 1e3 * ((row @ row.T).double() - exact) / exact


def outcome(case: Case, routed: int) -> dict[str, Tensor]:
    """A loss, and 23 gradients, of which `routed` are of experts."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    named = {"loss/0": torch.tensor(5.0)}
    named |= {f"grad/experts.{number}.weight": amplified(dtype).expand(3, 4) for number in range(routed)}
    return named | {f"grad/layers.{number}.weight": torch.full((3, 4), 0.5) for number in range(23 - routed)}


def routing(routed: int, wrong: float = 1.0) -> Any:
    """A subject with this number of gradients of experts; one of them is off by the factor `wrong`."""

    def program(case: Case, device: torch.device) -> dict[str, Tensor]:
        named = {name: tensor.to(getattr(torch, case.dtype)) for name, tensor in outcome(case, routed).items()}
        return {**named, "grad/experts.3.weight": wrong * named["grad/experts.3.weight"]}

    vars(program)["truth"] = lambda case, device: outcome(case, routed)
    return program


experts, all_experts = routing(15, wrong=1.2), routing(23)


def test_undecided_gradients_are_counted_and_named_wherever_the_verdict_is_told(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("run", CASE, "--subject", f"{__name__}:experts")
    assert status == 0
    told = f"note: {TOLD}grad/experts.*.weight (15)"
    last = "1 case: 1 pass, 0 fail, 0 unknown, 0 skip; 9 of 24 tensors decided: gradients 8 of 23, all others"
    assert told in out.splitlines() and out.splitlines()[-1] == last
    assert " 9 of 24  pass" in out
    _, shown, _ = shardproof("show")
    assert told in shown.splitlines() and shown.splitlines()[-1] == last
    page = Path("runs/latest/report.html").read_text()
    assert f"{TOLD}grad/experts.*.weight (15)" in page and last in page and ">9 of 24<" in page
    rows = [json.loads(line) for line in Path("runs/latest/verdicts.jsonl").read_text().splitlines()]
    assert next(row for row in rows if row["check"] == "parameter_gradients")["decided"] == {"grad": [8, 23]}


def test_a_kind_of_which_nothing_is_decided_makes_a_case_unknown(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("run", CASE, "--subject", f"{__name__}:all_experts", "--json")
    told = json.loads(out)
    assert (status, told["exit_status"], told["cases"][0]["verdict"]) == (1, 1, "unknown")
    assert (told["cases"][0]["decided"], told["cases"][0]["tensors"]) == (1, 24)
    decided = "1 of 24 tensors decided: gradients 0 of 23, all others"
    assert told["tally"] == f"1 case: 0 pass, 0 fail, 1 unknown, 0 skip; {decided}"
    words = CASE.replace("bfloat16", "float64")
    _, out, _ = shardproof("run", words, f"{words} seed=1", "--subject", f"{__name__}:all_experts")
    assert out.splitlines()[-1] == "2 cases: 2 pass, 0 fail, 0 unknown, 0 skip; all 48 tensors decided"
    assert "undecided" not in out
