"""Runs of the same global batch, split otherwise over ranks and micro-batches (harness.checking.regrouping)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from harness.checking.evidence import Evidence, Regrouped
from harness.errors import ProgramError
from harness.mesh_axes import SAME_SAMPLES
from harness.outcome.merging import merge
from harness.protocols import CaseLike, case_text, unsaved
from harness.running.ranks.execution import execute
from harness.running.trials.trial import Trial
from harness.subject import NamedSubject, offers, own_cases, refusal

__all__ = ["groupings", "most_exact", "regrouped"]

_GROUPINGS = 2
_LARGEST = 8
"""Ranks of a grouping, where the case itself has fewer."""


def regrouped(trial: Trial, evidence: Evidence) -> Evidence:
    """The same evidence with up to _GROUPINGS runs of the same global batch, grouped otherwise (`groupings`): only in
    float64, or in another dtype of a subject that refuses float64. One that the subject does not finish is no failure
    of this case.
    """
    if evidence.given or evidence.torn:  # another grouping draws other numbers
        return evidence
    found = tuple(_run(trial, sizes, case) for sizes, case in groupings(trial.case, trial.subject))
    return replace(evidence, regrouped=found)


def _run(trial: Trial, sizes: dict[str, int], case: CaseLike) -> Regrouped:
    try:
        with trial.timed("regrouped"):
            run = execute(
                case,
                trial.subject.call,
                trial.engine,
                text=case_text(case),
                record=False,
                device=trial.device,
                timeout_s=trial.timeout_s,
                name=trial.subject.address,
            )
    except ProgramError as error:
        return Regrouped(sizes=sizes, problem=error.cause)
    merged = merge(run.outcomes)
    return Regrouped(sizes=sizes, tensors=merged.tensors, flaws=merged.flaws)


def most_exact(case: CaseLike, subject: NamedSubject) -> bool:
    """Whether the case is in float64, or the subject refuses it in float64."""
    if case.dtype == "float64":
        return True
    with suppress(ValueError):  # a vocabulary without float64
        return bool(refusal(case.but(dtype="float64"), subject))
    return True


def groupings(case: CaseLike, subject: NamedSubject) -> list[tuple[dict[str, int], CaseLike]]:
    """Up to _GROUPINGS other sizes, each with its case: of dp and micro with the same product, one data rank, then as
    many as fit on the ranks there are, or _LARGEST; the last, where it can be, also with other context ranks and
    stages. None without a data axis, which a subject of own cases has where one of them has data ranks; what the
    subject refuses is left out.
    """
    dp, named = getattr(case, "dp", 0), own_cases(subject)
    has_data_axis = dp > 1 or (dp == 1 and (named is None or any(getattr(one, "dp", 0) > 1 for one in named)))
    if not has_data_axis or not most_exact(case, subject):
        return []
    whole, most = dp * case.micro, max(case.world_size, _LARGEST) * dp // case.world_size
    sizes = [n for n in range(1, min(whole, most) + 1) if whole % n == 0 and n != dp]
    found = _legal(case, subject, [{"dp": n, "micro": whole // n} for n in sizes[:1] + sizes[:0:-1]], _GROUPINGS)
    spread = _legal(case, subject, [{"dp": 1, "micro": whole, **words} for words in _otherwise(case, subject)], 1)
    return [*found[: _GROUPINGS - len(spread)], *spread]


def _otherwise(case: CaseLike, subject: NamedSubject) -> list[dict[str, int]]:
    """Other numbers of context ranks and stages: both, then one of them. A subject without `refuses` has not stated
    that it knows these words, and one of own cases has them where a case names several such ranks.
    """
    own = own_cases(subject)
    named = (case,) if own is None and offers(subject.call, "refuses") else own or ()
    words = [word for word in SAME_SAMPLES if any(hasattr(one, word) for one in named)]
    if own is not None:
        words = [word for word in words if any(getattr(one, word) > 1 for one in own)]
    changed = {word: 1 if getattr(case, word) > 1 else 2 for word in words}
    return [changed, *({word: size} for word, size in changed.items())] if changed else []


def _legal(
    case: CaseLike, subject: NamedSubject, sizes: list[dict[str, int]], most: int
) -> list[tuple[dict[str, int], CaseLike]]:
    """The first of these sizes, with their cases, that break no rule, need no more than _LARGEST ranks or those of the
    case, and are not refused.
    """
    found: list[tuple[dict[str, int], CaseLike]] = []
    for words in sizes:
        with suppress(ValueError):  # this grouping breaks a rule of the case language
            other = case.but(**words, **unsaved(case))
            fits = len(found) < most and other.world_size <= max(case.world_size, _LARGEST)
            if fits and not refusal(other, subject):
                found.append((words, other))
    return found
