"""A command parses each of its cases once and resolves its subject once."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from parallel.subject import subject as ours
from reference.case import Case
from reports.commands import cli

TINY = "layers=1 hidden=16 heads=2 vocab=24 seq=8 micro=1 steps=1"
PARSED: Counter[str] = Counter()


class Counted(ModuleType):
    """A module that counts how often its `subject` is read: `resolve` looks whether it is there, then reads it."""

    read = 0

    @property
    def subject(self) -> object:
        """The subject under test."""
        Counted.read += 1
        return ours


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parse: Any = Case.parse

    def counting(text: str) -> Case:
        PARSED[text] += 1
        case: Case = parse(text)
        return case

    PARSED.clear()
    Counted.read = 0
    monkeypatch.setattr(Case, "parse", counting)
    monkeypatch.setitem(sys.modules, "counted_module", Counted("counted_module"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    "words",
    [
        ("run", f"mode=tp tp=2 {TINY}", f"mode=tp tp=2 seed=1 {TINY}"),
        ("run", f"mode=tp tp=2 {TINY}", "--engine", "dry"),
        ("run", f"mode=tp tp=2 {TINY}", "--emit-repro", "script.py"),
        ("predict", f"mode=tp tp=2 {TINY}", "--cluster", "laptop"),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}"[:20],
)
def test_a_command_parses_a_case_once_and_resolves_its_subject_once(words: tuple[str, ...]) -> None:
    assert cli.main([*words, "--subject", "counted_module:subject"]) == 0
    assert set(PARSED.values()) == {1}, PARSED
    assert Counted.read == 2
