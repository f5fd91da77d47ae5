"""A case's text to the case. It loads no torch, so that the command line refuses a wrong word at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.errors import RequestError
from harness.resolve import resolve

__all__ = ["CASE", "parse_cases", "read_case"]

CASE = "reference.case:Case"


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
