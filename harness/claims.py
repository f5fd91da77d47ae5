"""What a subject claims: its modes, those that a case can have and others, and the names that it leaves out on purpose.

The harness knows no modes: which there are is asked of the case's own list, by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.asking import answered
from harness.errors import RequestError
from harness.resolve import resolve

__all__ = ["MODES", "Claims", "claimed", "claims"]

MODES = "reference.rules:MODES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """`modes` can be asked for, in the subject's order; `unknown` ones no case can have."""

    subject: str
    modes: tuple[str, ...]
    unknown: tuple[str, ...] = ()

    def chosen(self, text: str) -> tuple[str, ...]:
        """Those that an option names, comma separated, or "all". Raises RequestError for any other."""
        if text == "all":
            return self.modes
        named = tuple(dict.fromkeys(text.split(",")))
        if other := [mode for mode in named if mode not in self.modes]:
            lacking = [mode for mode in other if mode in self.unknown]
            rule = f"{self.subject} claims {', '.join((*self.modes, *self.unknown))}"
            rule += f", and no case has the mode {', '.join(lacking)}" if lacking else ""
            raise RequestError(f"modes={','.join(other)}: {rule}; legal: --modes all")
        return named


def claims(subject: str) -> Claims:
    """What this subject claims; all modes when it says nothing. Raises RequestError for what is no tuple of words, or
    when no case can have any of them.
    """
    known: tuple[str, ...] = resolve(MODES)  # type: ignore[assignment]
    said = claimed(resolve(subject), subject)
    if said is None:
        return Claims(subject=subject, modes=known)
    words = tuple(dict.fromkeys(said))
    modes = tuple(mode for mode in words if mode in known)
    if not modes:
        rule = "names no mode that a case can have"
        raise RequestError(f"subject={subject}: modes={tuple(said)!r} {rule}; legal: {'|'.join(known)}")
    return Claims(subject=subject, modes=modes, unknown=tuple(mode for mode in words if mode not in known))


def claimed(found: object, subject: str) -> tuple[str, ...] | None:
    """The words that the subject of this name has as its `modes`, None when it has none. Raises RequestError for what
    is no tuple of words.
    """
    return _words(found, subject, "modes", "('tp',)")


def left_out(found: object, subject: str) -> tuple[str, ...]:
    """The patterns of names that the subject of this name declares as its `unchecked`, () when it has none. Raises
    RequestError for what is no tuple of words.
    """
    return _words(found, subject, "unchecked", "('grad/*.bias',)") or ()


def _words(found: object, subject: str, attribute: str, legal: str) -> tuple[str, ...] | None:
    said = answered(attribute, lambda: getattr(found, attribute, None))
    if said is None:
        return None
    if not isinstance(said, tuple | list) or not all(isinstance(word, str) for word in said):
        rule = f"{attribute}={said!r} must be a tuple of words; legal: {attribute} = {legal}"
        raise RequestError(f"subject={subject}: {rule}")
    return tuple(said)
