"""The truth of a subject: a dense model of its own, a subject on ranks, or the decoder of `reference`.

A subject on ranks is "alone", the subject itself on one rank, or "MODULE:OBJECT WORDS", another one or the same in a
layout of its own. Its words are those of its case; {tp} among them is the word tp of the case under proof.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from shardproof.harness.dense_model import in_own_words
from shardproof.harness.errors import RequestError
from shardproof.harness.mesh_axes import AXES, EXPERT_AXES
from shardproof.harness.plain_case import PlainCase
from shardproof.harness.protocols import CaseLike, Value, case_text
from shardproof.harness.resolve import resolve
from shardproof.harness.subject.call import NamedSubject, answer_question, offers, resolve_subject
from shardproof.harness.subject.claims import own_refusal, stated_deviations, vocabulary

ALONE: Final = "alone"
"""The truth of a subject that is compared with itself on one rank."""
DenseFunction = Callable[..., Mapping[str, Value]]
"""(case, device) -> outcome, in one process."""
_LEGAL = "legal: --truth MODULE:OBJECT"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRanks:
    """A truth that is a subject, which runs on ranks. `words` are those of its case; without any it runs on one rank.

    `itself`: it is the subject under proof, on one rank.
    """

    subject: NamedSubject
    words: str = ""
    itself: bool = False

    def case_of(self, case: CaseLike) -> CaseLike:
        """Its case for this one. Raises RequestError if there is none."""
        if not in_own_words(case) or self.itself:
            return one_rank(case, self.subject)
        made, why = self._made(case)
        if why:
            raise RequestError(f"case {case_text(case)!r}: {why}; legal: other words behind MODULE:OBJECT")
        return made

    def refusal(self, case: CaseLike) -> str:
        """Why it has no case for this one, "" if it has. Raises RequestError for words that no case can have."""
        return self._made(case)[1] if in_own_words(case) and not self.itself else ""

    def _made(self, case: PlainCase) -> tuple[PlainCase, str]:
        """Its case, and why that cannot be run, "" if it can. Raises RequestError for words that no case can have."""
        try:
            made = self._in_its_words(case)
        except (ValueError, KeyError) as problem:
            why = f"the case has no word {problem}" if isinstance(problem, KeyError) else problem
            rule = f"its truth {self.subject.name} has no case {self.words!r} ({why})"
            legal = "legal: other words behind MODULE:OBJECT"
            raise RequestError(f"case {case_text(case)!r}: {rule}; {legal}") from problem
        batches, dp = case.micro * case.axis_sizes["dp"], made.axis_sizes["dp"]
        if any(word.startswith("micro=") for word in self.words.split()):
            pass
        elif batches % dp:
            return made, f"dp={dp} of its truth {self.subject.name} must divide the {batches} micro-batches of a step"
        else:
            made = made.but(micro=batches // dp)
        why = own_refusal(made, self.subject)
        return made, why and f"its truth {self.subject.name} refuses {case_text(made)!r}: {why}"

    def _in_its_words(self, case: PlainCase) -> PlainCase:
        known = vocabulary(self.subject)
        if known is None:
            raise ValueError("it has cases of shardproof's decoder, which has a dense model")
        shared = {key: value for key, value in case.words().items() if key in dict(known.words)}
        shared |= {axis: 1 for axis in (*AXES, *EXPERT_AXES) if axis in dict(known.words)}
        # No format string: that would look up attributes of what it is given.
        return known.parse(re.sub(r"\{(\w+)\}", lambda name: case.text_by_word[name[1]], self.words), shared)


def refusal(case: CaseLike, subject: NamedSubject) -> str:
    """Why the subject, or the subject that is its truth, does not take this case; "" if both do.

    Raises RequestError if their own code fails.
    """
    if why := own_refusal(case, subject):
        return why
    truth = truth_of(subject) if subject.truth or offers(subject.call, "truth") else None
    return truth.refusal(case) if isinstance(truth, OnRanks) else ""


def one_rank(case: CaseLike, subject: NamedSubject) -> CaseLike:
    """The case on one rank, with the micro-batches of all data ranks in sequence.

    Raises RequestError if there can be no such case.
    """
    micro = case.micro * getattr(case, "dp", 1)
    split = (axis for axis in ("wp", *EXPERT_AXES) if getattr(case, axis, 1) > 1)  # with etp=0 it is tp
    try:
        return case.but(**dict.fromkeys((*AXES, *split), 1), micro=micro)
    except ValueError as problem:
        rule = f"{subject.name} cannot be its own truth: there is no such case on one rank ({problem})"
        raise RequestError(f"case {case_text(case)!r}: {rule}; {_LEGAL}") from problem


def truth_of(subject: NamedSubject) -> DenseFunction | OnRanks | None:
    """The truth that was requested (--truth), or the subject's attribute `truth`.

    None: the decoder of `reference`. Raises RequestError for any other value, and for a subject with words of its own
    and without a truth.
    """
    stated: Any = subject.truth or answer_question("truth", lambda: getattr(subject.call, "truth", None))
    if stated is None and vocabulary(subject) is not None:
        rule = "has words of its own, so the decoder of shardproof is not its truth"
        legal = "--truth MODULE:OBJECT, --truth alone, or the attribute truth"
        raise RequestError(f"subject={subject.name}: {rule}; legal: {legal}")
    if stated is None:
        return None
    if stated == ALONE:
        return OnRanks(subject=subject, itself=True)
    address, _, words = stated.partition(" ") if isinstance(stated, str) else (stated, "", "")
    target: Any = resolve(address) if isinstance(address, str) else address
    if not callable(target):
        rule = f"must be callable as truth(case, device), not {type(target).__name__}"
        raise RequestError(f"truth={stated}: {rule}; {_LEGAL} or --truth alone")
    if offers(target, "words"):
        return OnRanks(subject=resolve_subject(address), words=words.strip())
    if words:
        rule = "has no attribute words, so it is a dense model, which runs in one process and has no layout"
        raise RequestError(f"truth={stated}: {address} {rule}; legal: --truth {address}")
    return _with_deviations(target, subject)


def _with_deviations(dense: DenseFunction, subject: NamedSubject) -> DenseFunction:
    if getattr(subject.call, "deviates", None) is None:
        return dense

    @functools.wraps(dense)
    def apply_deviations(case: CaseLike, device: Any, **given: Any) -> Mapping[str, Value]:
        """The tensors of stated deviations, from the truths that apply these."""
        outcome = dict(dense(case, device, **given))
        for pattern, deviation in stated_deviations(case, subject).items():
            if deviation.truth is not None:
                other = deviation.truth(case, device)
                outcome |= {name: other[name] for name in outcome if name in other and fnmatchcase(name, pattern)}
        return outcome

    return apply_deviations


def compared_with(truth: DenseFunction | OnRanks | None) -> str:
    """Words for a truth."""
    if truth is None:
        return "the dense model"
    if isinstance(truth, OnRanks):
        name = "itself" if truth.itself else f"the subject {truth.subject.name}"
        return f"{name} on {truth.words or 'one rank'}, in float64"
    return f"its own dense model {getattr(truth, '__module__', '')}:{getattr(truth, '__qualname__', truth)}"
