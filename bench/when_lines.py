"""Runs every statement of a printed line `when:` again: nothing is known but its text.

    only with tp=2|4 and zero=1, perhaps act=relu; right with tp=1, with zero=0 but for replicas (tried on 'zero=1 ..')

The case of `tried on` must fail with every combination of the values in `only with`. With the words of each `with`
behind it the case must pass, or fail in the checks behind `but for` alone. A refused or skipped case proves nothing.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

from shardproof.harness.errors import ShardproofError
from shardproof.harness.running.result import CaseResult
from shardproof.harness.verdicts.verdict import FAIL, PASS

_NEEDED = re.compile(
    r"only with (?P<fails>.+?)(, perhaps .+?)?; right with (?P<right>.+?)"
    r"( \(tried on (?P<on>'.*?'|\".*?\")\))?( \(no time was left .*\))?"
)
_PLAINEST = re.compile(r"no word is known to be needed.*?; (?P<on>'.*?'|\".*?\") fails.*")
_CHECKS = " but for "


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A case by its text, and whether it is said to fail; `but_for` may fail where it is said to be right."""

    case: str
    fails: bool
    but_for: frozenset[str] = frozenset()

    def holds(self, prove: Callable[[str], CaseResult]) -> bool:
        """Whether the case does so when it is run."""
        try:
            result = prove(self.case)
        except (ShardproofError, ValueError):
            return False
        failed = {one.check for one in result.verdicts if one.verdict == FAIL}
        if self.fails:
            return bool(failed)
        return failed == self.but_for if self.but_for else result.verdict == PASS


def statements(line: str, failing: str = "") -> list[Statement]:
    """The statements of a line, the plainest case that fails first; none where nothing was found.

    `failing` is the case of a line that names none. Raises ValueError for a line that cannot be read.
    """
    if plainest := _PLAINEST.fullmatch(line):
        return [Statement(case=plainest["on"][1:-1], fails=True)]
    if line.startswith(("no other case", "nothing that", "not searched")):
        return []
    read = _NEEDED.fullmatch(line)
    if not read:
        raise ValueError(f"when={line!r} is no line of this kind; legal: only with tp=2; right with tp=1")
    on = read["on"][1:-1] if read["on"] else failing
    fails = itertools.product(*map(_values, read["fails"].split(" and ")))
    found = [Statement(case=f"{on} {' '.join(words)}", fails=True) for words in fails]
    for each in read["right"].split(", with "):
        words, _, checks = each.partition(_CHECKS)
        first, *further = words.split()
        for value in _values(first):
            but_for = frozenset(filter(None, checks.split("|")))
            found.append(Statement(case=" ".join((on, value, *further)), fails=False, but_for=but_for))
    return found


def false_statements(line: str, prove: Callable[[str], CaseResult], failing: str = "") -> list[Statement]:
    """The statements of a line that are not so when they are run again; `prove` runs the case of a text."""
    return [each for each in statements(line, failing) if not each.holds(prove)]


def _values(text: str) -> list[str]:
    """Each value of a word: "tp=2|4" is "tp=2" and "tp=4"."""
    word, _, values = text.partition("=")
    return [f"{word}={value}" for value in values.split("|")]
