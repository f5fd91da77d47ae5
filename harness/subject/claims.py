"""What a subject claims: its words, cases and modes, what it refuses, and differences that it states.

Stated differences are lower dtypes in which it computes or sends, and deviations by design. It may also state names
that it leaves out on purpose, and modules whose state its ranks cannot share.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardproof.harness.dense_model import check_modes, dense_model, in_own_words, read_case
from shardproof.harness.errors import RequestError
from shardproof.harness.mesh_axes import AXES
from shardproof.harness.plain_case import Vocabulary
from shardproof.harness.protocols import CaseLike, Subject
from shardproof.harness.resolve import resolve
from shardproof.harness.subject.call import (
    NamedSubject,
    answer_question,
    ask_subject,
    offers,
    resolve_subject,
    words_of,
)


@ask_subject("words")
def vocabulary(subject: NamedSubject) -> Vocabulary | None:
    """The words of the subject's own cases, from its attribute `words`; None for cases of our decoder.

    Raises Unanswered if `words` cannot be read.
    """
    own = getattr(subject.call, "words", None)
    if own is None:
        return None
    return Vocabulary.of(own)


def case_of(text: str, subject: NamedSubject) -> CaseLike:
    """The case of this text as this subject reads it. Raises RequestError for any other text."""
    own = vocabulary(subject)
    if own is None:
        case: CaseLike = read_case(text)
        return case
    try:
        return own.parse(text)
    except ValueError as problem:
        raise RequestError(f"case {text!r}: {problem}") from problem


def cases_of(texts: Iterable[str], subject: NamedSubject) -> tuple[CaseLike, ...]:
    """The cases of these texts, without repeats. Raises RequestError for the first text that is no case."""
    cases = [case_of(text, subject) for text in texts]
    return tuple({str(case): case for case in cases}.values())


def own_cases(subject: NamedSubject) -> tuple[CaseLike, ...] | None:
    """The cases that the subject names in its attribute `cases`, None without it. Raises RequestError for what is no
    tuple of cases, and for one without a case.
    """
    texts = words_of(subject, "cases", "('tp=2 dp=3',)")
    if texts is None:
        return None
    if not texts:
        raise RequestError(f"subject={subject.name}: cases=() names none; legal: cases = ('tp=2 dp=3',)")
    return cases_of(texts, subject)


def domains_of(case: CaseLike, subject: NamedSubject) -> dict[str, tuple[Any, ...]]:
    """Every word of a case that has several values, with these, the plainest first.

    A number of a subject's own words has the values of its default and of the cases that the subject names. For axes,
    steps and micro-batches 1 is the plainest value. A word with legal values has these alone.
    """
    if not in_own_words(case):
        return dict(dense_model().domains())
    named = [one for one in own_cases(subject) or () if in_own_words(one)]
    found: dict[str, tuple[Any, ...]] = {}
    for word, legal in case.vocabulary.words:
        fewest = (1,) if word in (*AXES, "steps", "micro") else ()
        flags = (False, True) if isinstance(legal[0], bool) else ()
        values = dict.fromkeys((*fewest, *legal, *flags, *(getattr(one, word) for one in named), getattr(case, word)))
        taken = tuple(value for value in values if case.vocabulary.takes(word, value))
        if word != "seed" and len(taken) > 1:
            found[word] = taken
    return found


def draws(subject: NamedSubject) -> Any:
    """The hypothesis strategy of cases in its attribute `draws`, or what a function of that name returns; None without
    it. Raises Unanswered when that function fails.
    """
    found: Callable[[], Any] | Any = getattr(subject.call, "draws", None)
    return answer_question("draws", found) if callable(found) else found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedModes:
    """`modes` can be requested, in the subject's order; no case can have the `unknown`. `own`: of its own cases."""

    subject: str
    modes: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    own: bool = False

    def choose_modes(self, text: str) -> tuple[str, ...]:
        """The modes that an option names, separated by commas, or "all". Raises RequestError for any other text."""
        if text == "all":
            return self.modes
        if not self.own:
            check_modes(text)
        named = tuple(dict.fromkeys(text.split(",")))
        if other := [mode for mode in named if mode not in self.modes]:
            claimed = ", ".join((*self.modes, *self.unknown))
            raise RequestError(f"modes={','.join(other)}: {self.subject} claims {claimed}; legal: --modes all")
        return named


def own_refusal(case: CaseLike, subject: NamedSubject) -> str:
    """Why the subject does not take this case, "" if it does. Raises RequestError if its own code fails."""
    modes = claimed_modes(subject)
    if modes is not None and case.mode not in modes:
        return f"{subject.name} claims the modes {', '.join(modes) or 'none'}, not {case.mode}"
    if in_own_words(case) and not case.vocabulary.takes("dtype", case.dtype):
        return str(case.vocabulary.foreign("dtype", case.dtype))
    asked: Any = subject.call
    return answer_question("refuses", lambda: str(asked.refuses(case) or "")) if offers(asked, "refuses") else ""


def claims(subject: NamedSubject) -> ClaimedModes:
    """The modes of this subject; all if it claims none, those of its own cases if these are in its own words.

    Raises RequestError for anything but a tuple of words, or if no case can have any of them.
    """
    if vocabulary(subject) is not None:
        own = own_cases(subject)
        if own is None:  # only the subject knows which of its words to run
            rule = "has words of its own, so a case must be given, or named in its attribute cases"
            raise RequestError(f"subject={subject.name}: {rule}; legal: cases = ('tp=2 dp=3',)")
        return ClaimedModes(subject=subject.name, modes=tuple(dict.fromkeys(case.mode for case in own)), own=True)
    known = dense_model().modes
    stated = claimed_modes(subject)
    if stated is None:
        return ClaimedModes(subject=subject.name, modes=known)
    words = tuple(dict.fromkeys(stated))
    modes = tuple(mode for mode in words if mode in known)
    if not modes:
        rule = "names no mode that a case can have"
        raise RequestError(f"subject={subject.name}: modes={tuple(stated)!r} {rule}; legal: {'|'.join(known)}")
    return ClaimedModes(subject=subject.name, modes=modes, unknown=tuple(mode for mode in words if mode not in known))


def claimed_modes(subject: NamedSubject) -> tuple[str, ...] | None:
    """The words of the attribute `modes`, None without it. Raises RequestError for anything but a tuple of words."""
    return words_of(subject, "modes", "('tp',)")


def left_out(subject: NamedSubject) -> tuple[str, ...]:
    """The patterns of names in the attribute `unchecked`, () without it. Raises RequestError for anything but a tuple
    of words.
    """
    return words_of(subject, "unchecked", "('grad/*.bias',)") or ()


def kept_per_rank(subject: Subject) -> tuple[str, ...]:
    """The modules in the attribute `per_rank`, () without it. Raises RequestError for anything but a tuple of words."""
    if not offers(subject, "per_rank"):
        return ()
    return words_of(resolve_subject(subject), "per_rank", "('megatron.core.parallel_state',)") or ()


LOWER = ("compute_dtype", "wire_dtype")
"""The attributes that state a dtype: of matrix products, and of what ranks send."""
_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""From the finest to the coarsest."""


def lower_dtypes(case: CaseLike, subject: NamedSubject) -> dict[tuple[str, str], str]:
    """The dtypes of LOWER that the subject states for this case, without those that are no lower than the case's own.

    Each by its attribute and the calls of which it is stated: "all_gather", "all_gather over dp"; "" stands for all.
    Raises RequestError for what is no dtype.
    """
    stated: dict[tuple[str, str], str] = {}
    for name in LOWER:
        with ask_subject(name):
            found = _of_case(getattr(subject.call, name, None), case)
            by_call = found if isinstance(found, Mapping) and name == "wire_dtype" else {"": found}
            dtypes = {(name, str(calls)): _dtype_word(case, one) for calls, one in by_call.items()}
        if wrong := next((dtype for dtype in dtypes.values() if dtype not in _DTYPES), ""):
            rule = "must be a dtype's word, or a function of the case that returns one"
            raise RequestError(f"subject={subject.name}: {name}={wrong} {rule}; legal: {name} = 'bfloat16'")
        stated |= dtypes
    return {name: dtype for name, dtype in stated.items() if _DTYPES.index(dtype) > _DTYPES.index(case.dtype)}


def _dtype_word(case: CaseLike, stated: object) -> str:
    return str(case.dtype if stated in (None, "") else stated).removeprefix("torch.")


def stated_deviations(case: CaseLike, subject: NamedSubject) -> "dict[str, Deviation]":
    """The attribute `deviates`, or what this function of the case returns: pattern of names -> how these tensors
    deviate; {} without it. Raises RequestError for what is no such mapping.
    """
    answer = answer_question("deviates", lambda: _of_case(getattr(subject.call, "deviates", None), case))
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
        dense = resolve(own.partition(" ")[0]) if isinstance(own, str) and ":" in own else own
        if not callable(dense) or offers(dense, "words"):
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
        """The deviation that a subject states: a sentence, or a sentence and a truth. None for any other value."""
        sentence, truth = stated if isinstance(stated, tuple) and len(stated) == 2 else (stated, None)
        if not isinstance(sentence, str) or not sentence.strip() or not (truth is None or callable(truth)):
            return None
        return cls(" ".join(sentence.replace(";", ",").split()), truth)  # "; " separates the parts of a list


def _of_case(stated: Any, case: CaseLike) -> Any:
    return stated(case) if callable(stated) else stated
