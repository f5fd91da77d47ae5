"""What a subject is compared with: a dense model of its own, itself on one rank, or the decoder of `reference`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from harness.errors import RequestError
from harness.protocols import CaseLike, Value
from harness.resolve import resolve
from harness.subject.by_design import deviating
from harness.subject.call import NamedSubject, answered
from harness.subject.cases import vocabulary

ALONE: Final = "alone"
"""The truth of a subject that is compared with itself, on one rank."""
DenseModel = Callable[..., Mapping[str, Value]]
"""(case, device) -> outcome, in one process."""


def truth_of(subject: NamedSubject) -> DenseModel | str | None:
    """The dense model that was requested (--truth) or that is the subject's attribute `truth`; "alone" for itself.

    None: the decoder of `reference`. Raises RequestError for what is neither, and for a subject of own words without
    one.
    """
    said: Any = subject.truth or answered("truth", lambda: getattr(subject.call, "truth", None))
    if said is None:
        if vocabulary(subject) is not None:
            rule = "has words of its own, so the decoder of shardproof is not its truth"
            raise RequestError(
                f"subject={subject.name}: {rule}; legal: --truth MODULE:OBJECT, --truth alone, or the attribute truth"
            )
        return None
    if said == ALONE:
        return ALONE
    found: object = resolve(said) if isinstance(said, str) else said
    if not callable(found):
        rule = f"must be callable as truth(case, device), not {type(found).__name__}"
        raise RequestError(f"truth={said}: {rule}; legal: --truth MODULE:OBJECT or --truth alone")
    dense: DenseModel = found
    return _with_deviations(dense, subject)


def _with_deviations(dense: DenseModel, subject: NamedSubject) -> DenseModel:
    """The dense model with the tensors of stated deviations as their own truths have them."""
    if getattr(subject.call, "deviates", None) is None:
        return dense

    @functools.wraps(dense)
    def applied(case: CaseLike, device: Any, **given: Any) -> Mapping[str, Value]:
        outcome = dict(dense(case, device, **given))
        for pattern, deviation in deviating(case, subject).items():
            if deviation.truth is not None:
                other = deviation.truth(case, device)
                outcome |= {name: other[name] for name in outcome if name in other and fnmatchcase(name, pattern)}
        return outcome

    return applied
