"""Truths of a subject: a dense model of its own, itself on one rank, or the decoder of `reference`.

Stated differences: lower dtypes in which it computes or sends, known deviations.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from shardproof.harness.errors import RequestError
from shardproof.harness.protocols import CaseLike, Value
from shardproof.harness.resolve import resolve
from shardproof.harness.subject.call import NamedSubject, answered, asking
from shardproof.harness.subject.claims import vocabulary

LOWER = ("compute_dtype", "wire_dtype")
"""The attributes that state a dtype: of matrix products, and of what travels between ranks."""
_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""From the finest to the coarsest."""


def lower_dtypes(case: CaseLike, subject: NamedSubject) -> dict[str, str]:
    """The dtypes of LOWER that the subject states for this case, without those that are no lower than the case's own.

    Raises RequestError for what is no dtype.
    """
    stated = {}
    for name in LOWER:
        with asking(name):
            found = _of_case(getattr(subject.call, name, None), case)
            dtype = str(case.dtype if found in (None, "") else found).removeprefix("torch.")
        if dtype not in _DTYPES:
            rule = "must be a dtype's word, or a function of the case that returns one"
            raise RequestError(f"subject={subject.name}: {name}={dtype} {rule}; legal: {name} = 'bfloat16'")
        stated[name] = dtype
    return {name: dtype for name, dtype in stated.items() if _DTYPES.index(dtype) > _DTYPES.index(case.dtype)}


def deviating(case: CaseLike, subject: NamedSubject) -> "dict[str, Deviation]":
    """The attribute `deviates`, or what this function of the case returns: pattern of names -> how these tensors
    deviate; {} without it. Raises RequestError for what is no such mapping.
    """
    answer = answered("deviates", lambda: _of_case(getattr(subject.call, "deviates", None), case))
    if answer is None:
        return {}
    given = answer if isinstance(answer, Mapping) else {"": None}
    found = {pattern: Deviation.read(one) for pattern, one in given.items()}
    if not all(isinstance(pattern, str) and pattern.strip() and one for pattern, one in found.items()):
        rule = "must map patterns of names to a sentence each, or to a sentence and a truth that applies it"
        legal = "{'act/*.router': 'capacity is counted by rank, not over the batch'}"
        raise RequestError(f"subject={subject.name}: deviates={answer!r} {rule}; legal: deviates = {legal}")
    stated = {pattern: one for pattern, one in found.items() if one is not None}
    if any(one.truth for one in stated.values()):
        own = subject.truth or getattr(subject.call, "truth", None)
        if not callable(resolve(own) if isinstance(own, str) and ":" in own else own):
            rule = "names a truth that applies a deviation, and there is no dense model of the subject's own"
            raise RequestError(f"subject={subject.name}: deviates {rule}; legal: subject.truth = truth beside it")
    return stated


@dataclass(frozen=True, slots=True)
class Deviation:
    """How tensors deviate, in one sentence; `truth`, (case, device) -> outcome, applies it to a dense model."""

    sentence: str
    truth: Callable[..., Mapping[str, Any]] | None = None

    @classmethod
    def read(cls, stated: object) -> "Deviation | None":
        """The deviation that a subject states: a sentence, or a sentence and a truth. None for anything else."""
        sentence, truth = stated if isinstance(stated, tuple) and len(stated) == 2 else (stated, None)
        if not isinstance(sentence, str) or not sentence.strip() or not (truth is None or callable(truth)):
            return None
        return cls(" ".join(sentence.replace(";", ",").split()), truth)  # "; " stands between the parts of a list


def _of_case(stated: Any, case: CaseLike) -> Any:
    return stated(case) if callable(stated) else stated


ALONE: Final = "alone"
"""The truth of a subject that is compared with itself, on one rank."""
DenseFunction = Callable[..., Mapping[str, Value]]
"""(case, device) -> outcome, in one process."""


def truth_of(subject: NamedSubject) -> DenseFunction | str | None:
    """The dense model that was requested (--truth) or that is the subject's attribute `truth`; "alone" for itself.

    None: the decoder of `reference`. Raises RequestError for what is neither, and for a subject of own words without
    one.
    """
    stated: Any = subject.truth or answered("truth", lambda: getattr(subject.call, "truth", None))
    if stated is None and vocabulary(subject) is not None:
        rule = "has words of its own, so the decoder of shardproof is not its truth"
        legal = "--truth MODULE:OBJECT, --truth alone, or the attribute truth"
        raise RequestError(f"subject={subject.name}: {rule}; legal: {legal}")
    if stated is None:
        return None
    if stated == ALONE:
        return ALONE
    target: object = resolve(stated) if isinstance(stated, str) else stated
    if not callable(target):
        rule = f"must be callable as truth(case, device), not {type(target).__name__}"
        raise RequestError(f"truth={stated}: {rule}; legal: --truth MODULE:OBJECT or --truth alone")
    dense: DenseFunction = target
    if getattr(subject.call, "deviates", None) is None:
        return dense

    @functools.wraps(dense)
    def applied(case: CaseLike, device: Any, **given: Any) -> Mapping[str, Value]:
        """The tensors of stated deviations as their own truths have them."""
        outcome = dict(dense(case, device, **given))
        for pattern, deviation in deviating(case, subject).items():
            if deviation.truth is not None:
                other = deviation.truth(case, device)
                outcome |= {name: other[name] for name in outcome if name in other and fnmatchcase(name, pattern)}
        return outcome

    return applied


def compared_with(truth: DenseFunction | str | None) -> str:
    """Words for a truth."""
    if truth is None:
        return "the dense model"
    if truth == ALONE:
        return "itself on one rank, in float64"
    return f"its own dense model {getattr(truth, '__module__', '')}:{getattr(truth, '__qualname__', truth)}"
