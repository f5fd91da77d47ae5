"""How a subject means to differ from its truth: lower dtypes in which it computes or sends, known deviations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.errors import RequestError
from harness.protocols import CaseLike
from harness.subject.call import NamedSubject, answered

__all__ = ["LOWER", "deviating", "lower_dtypes"]

LOWER = ("compute_dtype", "wire_dtype")
"""The attributes that state a dtype: of matrix products, and of what travels between ranks."""
_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""From the finest to the coarsest."""


def lower_dtypes(case: CaseLike, subject: NamedSubject) -> dict[str, str]:
    """The dtypes of LOWER that the subject states for this case, without those that are no lower than the case's own.

    Raises RequestError for what is no dtype.
    """
    said = {name: _said(name, case, subject) for name in LOWER}
    for name, dtype in said.items():
        if dtype not in ("", *_DTYPES):
            rule = "must be a dtype's word, or a function of the case that returns one"
            raise RequestError(f"subject={subject.name}: {name}={dtype} {rule}; legal: {name} = 'bfloat16'")
    own = _DTYPES.index(case.dtype)
    return {name: dtype for name, dtype in said.items() if dtype and _DTYPES.index(dtype) > own}


def _said(name: str, case: CaseLike, subject: NamedSubject) -> str:
    found = answered(name, lambda: _of_case(getattr(subject.call, name, None), case))
    return "" if found is None else str(found).removeprefix("torch.")


def deviating(case: CaseLike, subject: NamedSubject) -> dict[str, str]:
    """The attribute `deviates`, or what this function of the case returns: pattern of names -> one sentence that says
    how these tensors deviate from the truth; {} without it. Raises RequestError for what is no such mapping.
    """
    said = answered("deviates", lambda: _of_case(getattr(subject.call, "deviates", None), case))
    if said is None:
        return {}
    legal = "{'act/*.router': 'capacity is counted by rank, not over the batch'}"
    words = said.items() if isinstance(said, Mapping) else [(said, "")]
    for pattern, sentence in words:
        if not all(isinstance(word, str) and word.strip() for word in (pattern, sentence)):
            rule = "must map patterns of names to a sentence each"
            raise RequestError(f"subject={subject.name}: deviates={said!r} {rule}; legal: deviates = {legal}")
    return {pattern: " ".join(sentence.split()) for pattern, sentence in words}


def _of_case(said: Any, case: CaseLike) -> Any:
    return said(case) if callable(said) else said
