"""How a subject means to differ from its truth: lower dtypes in which it computes or sends, known deviations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import RequestError
from harness.protocols import CaseLike
from harness.resolve import resolve
from harness.subject.call import NamedSubject, answered

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


def deviating(case: CaseLike, subject: NamedSubject) -> dict[str, Deviation]:
    """The attribute `deviates`, or what this function of the case returns: pattern of names -> how these tensors
    deviate; {} without it. Raises RequestError for what is no such mapping.
    """
    said = answered("deviates", lambda: _of_case(getattr(subject.call, "deviates", None), case))
    if said is None:
        return {}
    found = {pattern: Deviation.read(one) for pattern, one in said.items()} if isinstance(said, Mapping) else {"": None}
    if not all(isinstance(pattern, str) and pattern.strip() and one for pattern, one in found.items()):
        rule = "must map patterns of names to a sentence each, or to a sentence and a truth that applies it"
        legal = "{'act/*.router': 'capacity is counted by rank, not over the batch'}"
        raise RequestError(f"subject={subject.name}: deviates={said!r} {rule}; legal: deviates = {legal}")
    stated = {pattern: one for pattern, one in found.items() if one is not None}
    if any(one.truth for one in stated.values()) and not callable(_truth(subject)):
        rule = "names a truth that applies a deviation, and there is no dense model of the subject's own"
        raise RequestError(f"subject={subject.name}: deviates {rule}; legal: subject.truth = truth beside it")
    return stated


def _truth(subject: NamedSubject) -> Any:
    said = subject.truth or getattr(subject.call, "truth", None)
    return resolve(said) if isinstance(said, str) and ":" in said else said


@dataclass(frozen=True, slots=True)
class Deviation:
    """How tensors deviate, in one sentence; `truth`, (case, device) -> outcome, applies it to a dense model."""

    sentence: str
    truth: Callable[..., Mapping[str, Any]] | None = None

    @classmethod
    def read(cls, said: object) -> Deviation | None:
        """The deviation that a subject states: a sentence, or a sentence and a truth. None for anything else."""
        sentence, truth = said if isinstance(said, tuple) and len(said) == 2 else (said, None)
        if not isinstance(sentence, str) or not sentence.strip() or not (truth is None or callable(truth)):
            return None
        return cls(" ".join(sentence.replace(";", ",").split()), truth)  # "; " stands between the parts of a list


def _of_case(said: Any, case: CaseLike) -> Any:
    return said(case) if callable(said) else said
