"""Parses a case's text. No torch is loaded, so that the command line refuses a wrong word at once."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

from shardproof.harness.dense_model import dense_model
from shardproof.harness.errors import RequestError
from shardproof.harness.protocols import CaseLike

if TYPE_CHECKING:
    from shardproof.harness.plain_case import PlainCase


def read_case(text: str) -> Any:
    """The case of this text (a `harness.protocols.CaseLike`). Raises RequestError when it is none."""
    try:
        return dense_model().case.parse(text)
    except ValueError as problem:
        raise RequestError(f"case {text!r}: {problem}") from problem


def parse_cases(texts: Iterable[str]) -> tuple[Any, ...]:
    """The cases of these texts, each once. Raises RequestError for the first text that is no case."""
    return tuple({str(case): case for case in map(read_case, texts)}.values())


def check_words(text: str) -> None:
    """Raise RequestError for a word of the text that no case has, or whose value cannot be read."""
    try:
        dense_model().case.check_words(text)
    except ValueError as problem:
        raise RequestError(f"case {text!r}: {problem}") from problem


def check_modes(text: str) -> None:
    """Raise RequestError unless an option chooses "all" modes, or modes that a case can have, comma separated."""
    known = dense_model().modes
    unknown = [mode for mode in text.split(",") if mode not in known]
    if text != "all" and unknown:
        raise RequestError(
            f"modes={','.join(unknown)}: no case has this mode; legal: all, or some of {','.join(known)}"
        )


def in_own_words(case: CaseLike) -> "TypeGuard[PlainCase]":
    """Whether a case is in words of a subject's own, of which our dense model knows nothing."""
    return hasattr(type(case), "vocabulary")
