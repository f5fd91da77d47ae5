"""The line `when:` is tried before it is printed: each of its statements is read as it will be printed, and run.

A statement that is a case which the search has run is not run twice. A value that does not fail, or is not right, as it
is stated, is left out, and so is one that is refused then.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shardproof.harness.diagnosing.words_text import Change, Needed, NeededWords, Right, changes_text
from shardproof.harness.errors import ShardproofError
from shardproof.harness.protocols import CaseLike, case_text
from shardproof.harness.verdicts.facts import WhenKind

Proved = tuple["bool | None", tuple[str, ...]]
"""Whether a case fails for the same reason, and the checks that fail; None where it shows nothing."""
_COMBINED = 8
"""Most combinations that another value of a word is run in."""


class OutOfTime(Exception):
    """No further case can be run."""


def combine_words(
    first: Mapping[str, Any], others: Mapping[str, Sequence[Any]], fails: Callable[[Mapping[str, Any]], bool | None]
) -> dict[str, tuple[Any, ...]]:
    """The values of words with which a case fails in every combination: the first ones, and as many others as do."""
    found: dict[str, tuple[Any, ...]] = {word: (value,) for word, value in first.items()}
    for word, values in others.items():
        for value in values:
            rest = [[(one, each) for each in found[one]] for one in found if one != word]
            changes = [{word: value, **dict(each)} for each in itertools.product(*rest)]
            if len(changes) <= _COMBINED and all(fails(each) for each in changes):
                found[word] += (value,)
    return found


def confirm_words(
    found: NeededWords, failed: CaseLike, read: Callable[[str], CaseLike], proves: Callable[[CaseLike], Proved]
) -> NeededWords:
    """The words that are found, without the statements that are not so when they are read and run again.

    `proves` raises OutOfTime when no case can be run any more. Words that were not run then are named as that.
    """
    if not found.needed and not found.left:
        return found
    trial = _Trial(found, read, proves)
    if not trial.outcome(())[0]:
        return replace(found, needed=(), unproved=WhenKind.NOT_RUN_AGAIN if trial.is_over else WhenKind.REFUTED)
    right = {one.word: [trial.right(one, value) for value in one.right[:1]] for one in found.needed}
    kept = [one for one in found.needed if any(right[one.word])]
    values = combine_words(
        {one.word: one.fails[0] for one in kept},
        {one.word: one.fails[1:] for one in kept},
        lambda changes: trial.outcome(tuple(changes.items()))[0],
    )
    needed = []
    for one in found.needed:
        every = [*right[one.word], *(trial.right(one, value) for value in one.right[1:])]
        true = tuple(value for value in every if value)
        if true and getattr(failed, one.word) in (fails := values.get(one.word, one.fails[:1])):
            needed.append(Needed(word=one.word, fails=fails, right=true))
    left_out = [one.word for one in found.needed if one.word not in {each.word for each in needed}]
    return replace(
        found,
        needed=tuple(needed),
        untried=(*(word for word in left_out if word in trial.not_run), *found.untried),
        beside=(*(word for word in left_out if word not in trial.not_run), *found.beside),
    )


class _Trial:
    """The statements of one line as cases, each run once."""

    def __init__(
        self, found: NeededWords, read: Callable[[str], CaseLike], proves: Callable[[CaseLike], Proved]
    ) -> None:
        self._case, self._read, self._proves = found.case, read, proves
        self._known: dict[str, Proved] = {}
        self.is_over = False
        self.not_run: set[str] = set()
        """Words of the statements for which no time was left."""

    def parse_changed_case(self, changes: Sequence[Change]) -> CaseLike | None:
        """The case that a reader makes of the words behind `tried on` and these, None where that is refused."""
        with suppress(ShardproofError, ValueError):
            return self._read(f"{self._case} {changes_text(changes)}".strip() or case_text(self._case))
        return None

    def outcome(self, changes: Sequence[Change]) -> Proved:
        """How the case with these changes fails when it is run again."""
        changes = [(word, value) for word, value in changes if value != getattr(self._case, word)]
        case = self.parse_changed_case(changes)
        if case is None:
            return None, ()
        if str(case) not in self._known and not self.is_over:
            try:
                self._known[str(case)] = self._proves(case)
            except OutOfTime:
                self.is_over = True
        if str(case) not in self._known:
            self.not_run |= {word for word, _ in changes}
        return self._known.get(str(case), (None, ()))

    def right(self, one: Needed, value: Right) -> Right | None:
        """This value of a word with as few further words as make the same case, None where it is not right so."""
        change = (one.word, value.value)
        if value.further and self.parse_changed_case([change]) == self.parse_changed_case([change, *value.further]):
            value = replace(value, further=())
        fails, checks = self.outcome([change, *value.further])
        return replace(value, but_for=checks) if fails is False else None
