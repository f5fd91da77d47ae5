"""A case's text to the case. It loads no torch, so that the command line refuses a wrong word at once."""

from __future__ import annotations

from typing import Any

from harness.errors import RequestError
from harness.resolve import resolve

__all__ = ["CASE", "read_case"]

CASE = "reference.case:Case"


def read_case(text: str) -> Any:
    """The case of this text (a `harness.protocols.CaseLike`). Raises RequestError when it is none."""
    known: Any = resolve(CASE)
    try:
        return known.parse(text)
    except ValueError as problem:
        raise RequestError(f"case {text!r}: {problem}") from problem
