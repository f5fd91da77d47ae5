"""Which cases a subject takes: the modes it claims, the cases it refuses, the names it leaves out on purpose.

And the modules whose state its ranks cannot share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.cases import check_modes, known_modes
from harness.errors import RequestError
from harness.protocols import CaseLike, Subject
from harness.subject.call import NamedSubject, answered, named, offers, words_of
from harness.subject.cases import own_cases, vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """`modes` can be requested, in the subject's order; `unknown` ones no case can have. `own`: of its own words."""

    subject: str
    modes: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    own: bool = False

    def chosen(self, text: str) -> tuple[str, ...]:
        """Those that an option names, comma separated, or "all". Raises RequestError for any other."""
        if text == "all":
            return self.modes
        if not self.own:
            check_modes(text)
        named = tuple(dict.fromkeys(text.split(",")))
        if other := [mode for mode in named if mode not in self.modes]:
            claimed = ", ".join((*self.modes, *self.unknown))
            raise RequestError(f"modes={','.join(other)}: {self.subject} claims {claimed}; legal: --modes all")
        return named


def refusal(case: CaseLike, subject: NamedSubject) -> str:
    """Why the subject does not take this case, "" when it does. Raises RequestError when its own words fail."""
    modes = claimed(subject)
    if modes is not None and case.mode not in modes:
        return f"{subject.name} claims the modes {', '.join(modes) or 'none'}, not {case.mode}"
    asked: Any = subject.call
    return answered("refuses", lambda: str(asked.refuses(case) or "")) if offers(asked, "refuses") else ""


def claims(subject: NamedSubject) -> Claims:
    """What this subject claims; all modes when it says nothing, those of its own cases when these are in its own words.

    Raises RequestError for what is no tuple of words, or when no case can have any of them.
    """
    if vocabulary(subject) is not None:
        own = own_cases(subject)
        if own is None:  # nobody else knows which of its words to run
            rule = "has words of its own, so a case must be given, or named in its attribute cases"
            raise RequestError(f"subject={subject.name}: {rule}; legal: cases = ('tp=2 dp=3',)")
        return Claims(subject=subject.name, modes=tuple(dict.fromkeys(case.mode for case in own)), own=True)
    known = known_modes()
    said = claimed(subject)
    if said is None:
        return Claims(subject=subject.name, modes=known)
    words = tuple(dict.fromkeys(said))
    modes = tuple(mode for mode in words if mode in known)
    if not modes:
        rule = "names no mode that a case can have"
        raise RequestError(f"subject={subject.name}: modes={tuple(said)!r} {rule}; legal: {'|'.join(known)}")
    return Claims(subject=subject.name, modes=modes, unknown=tuple(mode for mode in words if mode not in known))


def claimed(subject: NamedSubject) -> tuple[str, ...] | None:
    """The words of the attribute `modes`, None without it. Raises RequestError for what is no tuple of words."""
    return words_of(subject, "modes", "('tp',)")


def left_out(subject: NamedSubject) -> tuple[str, ...]:
    """The patterns of names in the attribute `unchecked`, () without it. Raises RequestError for what is no tuple of
    words.
    """
    return words_of(subject, "unchecked", "('grad/*.bias',)") or ()


def kept_per_rank(subject: Subject) -> tuple[str, ...]:
    """The modules in the attribute `per_rank`, () without it. Raises RequestError for what is no tuple of words."""
    if not offers(subject, "per_rank"):
        return ()
    return words_of(named(subject), "per_rank", "('megatron.core.parallel_state',)") or ()
