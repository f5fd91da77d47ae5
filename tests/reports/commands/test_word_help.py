"""`shardproof help case` and `help slice` list every word, as the class that checks it declares it."""

from __future__ import annotations

import dataclasses

import pytest

from harness.terms import Term
from parallel.slicing.words import Sliced
from reference.case import Case, CaseError
from reference.language.words import Meaning
from reports.commands import word_help
from reports.printing.calls import calls_table
from tests import ROOT
from tests.harness.command_line import CommandLine

PAGE = ROOT / "docs" / "case.md"
SLICING = ROOT / "docs" / "slicing.md"
LISTED = [word for word in Case.meanings() if "|" in word.legal and word.legal != "true|false"]


def test_every_word_has_a_meaning_and_legal_values() -> None:
    words = Case.meanings()
    assert [word.name for word in words] == [field.name for field in dataclasses.fields(Case)]
    assert all(word.meaning and word.legal and word.group for word in words)


def test_the_words_of_a_slice_have_meanings_too() -> None:
    words = Sliced.meanings()
    assert [word.name for word in words] == [field.name for field in dataclasses.fields(Sliced)]
    assert all(word.meaning and word.legal and word.group for word in words)


@pytest.mark.parametrize("word", LISTED, ids=lambda word: word.name)
def test_the_listed_values_are_those_that_the_case_names_when_it_refuses_one(word: Meaning) -> None:
    with pytest.raises(CaseError) as refused:
        Case.parse(f"{word.name}=no-such-value")
    assert set(refused.value.legal.replace("|", " ").split()) == set(word.legal.split("|"))


def test_the_page_in_docs_is_what_the_command_prints(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("help", "case", "--markdown")
    assert status == 0
    assert out == PAGE.read_text()


def test_the_page_about_slicing_has_the_tables_that_the_command_prints(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("help", "slice", "--markdown")
    assert status == 0
    tables = [line for line in out.splitlines() if line.startswith("|")]
    assert tables == [line for line in SLICING.read_text().splitlines() if line in tables]


@pytest.mark.parametrize("topic", word_help.TOPICS)
def test_a_terminal_gets_every_word_in_its_width(shardproof: CommandLine, topic: str) -> None:
    status, out, _ = shardproof("help", topic)
    assert status == 0
    meanings = Case.meanings() if topic == "case" else Sliced.meanings()
    assert all(f"\n  {word.name}={word.default}" in out for word in meanings)
    assert max(len(line) for line in word_help.text(word_help.TOPICS[topic], 100).splitlines()) <= 100


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("help", "case", "tp=2"), "case 'tp=2': help case takes no case; legal: help calls CASE"),
        (("help", "calls", "tp=two"), "tp=two"),
        (
            ("help", "calls", "mode=tp-sp tp=2", "--subject", "tests.harness.toy_subjects:limited"),
            "states no calls for",
        ),
    ],
)
def test_what_has_no_calls_is_refused_in_one_line(shardproof: CommandLine, words: tuple[str, ...], said: str) -> None:
    status, out, err = shardproof(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_term_that_leaves_fields_out_is_a_line_too() -> None:
    table = calls_table("mode=mine", [Term(op="all_reduce", axis="tp"), Term(phase="forward", region="up", calls=3)])
    assert table.rows == (
        ("-", "-", "all_reduce", "tp", "-", "-", "-", ""),
        ("up", "forward", "-", "-", "-", "-", "3", ""),
    )
