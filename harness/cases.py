"""A case's text to the case. It loads no torch, so that the command line refuses a wrong word at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.errors import RequestError
from harness.resolve import resolve

CASE = "reference.case:Case"
MODES = "reference.language.modes:MODES"


def read_case(text: str) -> Any:
    """The case of this text (a `harness.protocols.CaseLike`). Raises RequestError when it is none."""
    known: Any = resolve(CASE)
    try:
        return known.parse(text)
    except ValueError as problem:
        raise RequestError(f"case {text!r}: {problem}") from problem


def parse_cases(texts: Iterable[str]) -> tuple[Any, ...]:
    """The cases of these texts, each once. Raises RequestError for the first text that is no case."""
    return tuple({str(case): case for case in map(read_case, texts)}.values())


def check_words(text: str) -> None:
    """Raise RequestError for a word of the text that no case has, or whose value cannot be read."""
    known: Any = resolve(CASE)
    try:
        known.check_words(text)
    except ValueError as problem:
        raise RequestError(f"case {text!r}: {problem}") from problem


def known_modes() -> tuple[str, ...]:
    """The modes that a case can have."""
    modes: Any = resolve(MODES)
    return tuple(modes)


def check_modes(text: str) -> None:
    """Raise RequestError unless an option chooses "all" modes, or modes that a case can have, comma separated."""
    unknown = [mode for mode in text.split(",") if mode not in known_modes()]
    if text != "all" and unknown:
        raise RequestError(
            f"modes={','.join(unknown)}: no case has this mode; legal: all, or some of {','.join(known_modes())}"
        )
