"""Checks the statements of a `when:` line before it is printed: the case that each of them describes is run.

No case is run twice. A statement is left out if its run contradicts it, or if its case is refused.
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
"""Whether a case fails for the same reason (None if that cannot be told), and the checks that fail."""
_COMBINED = 8
"""A further value of a word is tried only if it makes at most this many combinations with the other words."""


class OutOfTime(Exception):
    """No further case can be run."""


def combine_words(
    first: Mapping[str, Any], others: Mapping[str, Sequence[Any]], fails: Callable[[Mapping[str, Any]], bool | None]
) -> dict[str, tuple[Any, ...]]:
    """The values of each word with which the case fails in every combination.

    The values of `first` are known to fail. One of `others` is added if it fails with all values found so far.
    """
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
    """`found` without the statements that a run contradicts.

    `read` parses the text of a case. `proves` runs a case and raises OutOfTime when there is no time for another one.
    Words whose cases could not be run in time are named as untried.
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
    """Runs the cases that the statements of one line describe, each case once."""

    def __init__(
        self, found: NeededWords, read: Callable[[str], CaseLike], proves: Callable[[CaseLike], Proved]
    ) -> None:
        self._case, self._read, self._proves = found.case, read, proves
        self._known: dict[str, Proved] = {}
        self.is_over = False
        self.not_run: set[str] = set()
        """Words of the statements for which no time was left."""

    def parse_changed_case(self, changes: Sequence[Change]) -> CaseLike | None:
        """The case that `when:` names behind `tried on`, with these changes; None if it is refused."""
        with suppress(ShardproofError, ValueError):
            return self._read(f"{self._case} {changes_text(changes)}".strip() or case_text(self._case))
        return None

    def outcome(self, changes: Sequence[Change]) -> Proved:
        """Whether and how the case with these changes fails."""
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
        """`value` if the case does not fail for the same reason with it, else None.

        Further words are dropped where the case is the same without them.
        """
        change = (one.word, value.value)
        if value.further and self.parse_changed_case([change]) == self.parse_changed_case([change, *value.further]):
            value = replace(value, further=())
        fails, checks = self.outcome([change, *value.further])
        return replace(value, but_for=checks) if fails is False else None
