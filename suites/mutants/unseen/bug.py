"""A planted bug with the words that are needed to show it, and how one is written down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from suites.mutants.mutant import EVERY, Change, Mutant

__all__ = ["Unseen", "bug"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """One planted bug that no rule of diagnosis was written for.

    mutant  its change of our source; `phase` and `region` are where training first goes wrong ("*": many modules)
    case    a case that shows it
    needed  the words of that case without which it is not seen; a default, or a word that another one implies, is left
            out
    cause   what is wrong, in one sentence
    """

    mutant: Mutant
    case: str
    needed: tuple[str, ...]
    cause: str


def bug(
    name: str,
    module: str,
    *changes: tuple[str, str],
    stands_for: str,
    case: str,
    cause: str,
    at: tuple[str, str],
    needed: str = "",
    modes: Iterable[str] = EVERY,
) -> Unseen:
    """The bug whose changes of this module read (old, new); `at` is the phase and the region of its first place."""
    words = tuple(needed.split())
    mutant = Mutant(
        name=name,
        stands_for=stands_for,
        modes=dict.fromkeys(modes, ""),
        changes=tuple(Change(module=module, old=old, new=new) for old, new in changes),
        condition=needed,
        phase=at[0],
        region=at[1],
    )
    return Unseen(mutant=mutant, case=case, needed=words, cause=cause)
