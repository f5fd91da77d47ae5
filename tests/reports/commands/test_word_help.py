"""`shardproof help case` and `help slice` list every word, as the class that checks it declares it."""

from __future__ import annotations

import dataclasses

import pytest

from parallel.slicing.words import Sliced
from reference.case import Case, CaseError
from reference.case.words import Meaning
from reports.commands import word_help
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
