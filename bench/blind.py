"""Measures what the default run says of planted bugs that no rule of diagnosis was written for.

    python -m bench.blind unseen --out blind.csv          (or: held_back; --part 1/2 shares the work)

For every bug the default cases run, the simplest first, until one fails. Then the words that the failure needs are
looked for, as `shardproof run` does. A row has the case, whether the first place is the bug's, and the causes with
their words. Then it has the line `when:` and whether that names exactly the words that the bug needs. The bug needs the
words of its condition, except those that others imply by the rules of the case language. Each statement of the line is
run again: `when_true` is "yes" if all of them hold. Causes of the unseen bugs are judged by hand, beside the sentence
`wrong` of the bug.

The statements are read from the text of the line alone. In

    fails with tp=2|4 and zero=1, perhaps act=relu; passes with tp=1, with zero=0 but for replicas (tried on 'zero=1')

the case of `tried on` must fail with every combination of the values in `fails with`. With the words after each `with`
of `passes` it must pass, or fail in no checks but those after `but for`. A refused or skipped case proves nothing.
"""

import argparse
import csv
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from shardproof.harness.diagnosing.words_text import NeededWords
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RequestError, ShardproofError
from shardproof.harness.mesh_axes import SLICES
from shardproof.harness.running.experiments import Failed, words_needed
from shardproof.harness.running.proof import prove
from shardproof.harness.running.result import CaseResult
from shardproof.harness.subject import NamedSubject, resolve_subject
from shardproof.harness.verdicts.verdict import FAIL, PASS
from shardproof.harness.verdicts.words import when_line
from shardproof.reference.case import Case
from shardproof.reference.case.default_cases import default_cases
from shardproof.reference.case.domains import domains, repair_words, words_of
from shardproof.reference.language.core import MODES
from shardproof.reports.options.request import REPEATED
from shardproof.suites.mutants.catalogue import HELD_BACK, UNSEEN, Mutant, holds
from shardproof.suites.mutants.kill_rows import cause_told, right_place

_NEEDED = re.compile(
    r"fails with (?P<fails>.+?)(, perhaps .+?)?; passes with (?P<right>.+?)"
    r"( \(tried on (?P<on>'.*?'|\".*?\")(; no time was left .*)?\))?"
)
_PLAINEST = re.compile(r"fails even in the simplest case tried: (?P<on>'.*?'|\".*?\").*")
_CHECKS = " but for "


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A case by its text, and whether it is said to fail. If it is said to be right, `but_for` are checks that fail."""

    case: str
    fails: bool
    but_for: frozenset[str] = frozenset()

    def holds(self, prove: Callable[[str], CaseResult]) -> bool:
        """Whether the statement is true when the case is run."""
        try:
            result = prove(self.case)
        except (ShardproofError, ValueError):
            return False
        failed = {one.check for one in result.verdicts if one.verdict == FAIL}
        if self.fails:
            return bool(failed)
        return failed == self.but_for if self.but_for else result.verdict == PASS


def statements(line: str, failing: str = "") -> list[Statement]:
    """The statements of a line, cases that fail first; empty for a line that found nothing.

    `failing` is the case for a line that names none. Raises ValueError for a line that cannot be read.
    """
    if plainest := _PLAINEST.fullmatch(line):
        return [Statement(case=plainest["on"][1:-1], fails=True)]
    if line.startswith(("no other case", "nothing that", "not searched", "not known")):
        return []
    read = _NEEDED.fullmatch(line)
    if not read:
        raise ValueError(f"when={line!r} is no line of this kind; legal: fails with tp=2; passes with tp=1")
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
    """The statements of a line that are not true when they are run again; `prove` runs the case of a text."""
    return [each for each in statements(line, failing) if not each.holds(prove)]


def _values(text: str) -> list[str]:
    """The word with each of its values: "tp=2" and "tp=4" for "tp=2|4"."""
    word, _, values = text.partition("=")
    return [f"{word}={value}" for value in values.split("|")]


_BUGS = {"unseen": UNSEEN, "held_back": HELD_BACK}
_WHEN_S, _TIMEOUT_S = 20.0, 60.0
"""The longest search for these words, and the longest run of a case; waiting for a processor does not count."""
_DERIVED = {"world": tuple(Case().mesh), "wdp": ("dp", SLICES), "padding": ("vocab", "family")}
"""Names in a condition that are no words of a case -> the words that they follow from."""


COLUMNS = "name killed case checks place_right first cause_right causes when_right when_true when needed wrong seconds"
"""Columns of the file; all but the bug's own are empty where the default run passes."""


def in_order(checkpoint: str) -> list[Case]:
    """The default cases, the simplest first; those that load a checkpoint follow the one that saves it."""
    cases = default_cases(checkpoint=checkpoint)
    size, first = dict[Case, tuple[object, ...]](), Case()
    for case in cases:  # a case that loads follows the case that saves, and gets its size
        first = first if case.load else case
        size[case] = Failed(case=first, verdicts=()).size
    return sorted(cases, key=size.__getitem__)


def measure_bug(bug: Mutant, engine: InprocEngine) -> dict[str, object]:
    """The row of one bug."""
    row: dict[str, object] = dict.fromkeys(COLUMNS.split(), "")
    row |= {"name": bug.name, "killed": False, "wrong": bug.wrong}
    row["needed"] = f"{bug.condition} modes={'|'.join(bug.modes)}"
    start_s = time.monotonic()
    with bug.subject() as planted, tempfile.TemporaryDirectory() as folder:
        subject = resolve_subject(planted)
        twice = default_cases(checkpoint=f"{folder}/checkpoint")[::REPEATED]
        for case in in_order(f"{folder}/checkpoint"):
            try:
                result = prove(case, subject, engine, timeout_s=_TIMEOUT_S, repeat=case in twice)
            except RequestError:  # a run of several cases skips those that the dense model cannot compute
                continue
            if result.verdict == FAIL:
                row |= _failure_columns(bug, result) | _when_columns(bug, result, subject, engine)
                break
    return row | {"seconds": round(time.monotonic() - start_s, 1)}


def _failure_columns(bug: Mutant, result: CaseResult) -> dict[str, object]:
    """Columns of the failure itself."""
    diagnosis = result.diagnosis
    failed = [verdict for verdict in result.verdicts if verdict.verdict == FAIL]
    first = diagnosis.first if diagnosis else None
    return {
        "killed": True,
        "case": result.text,
        "checks": " ".join(verdict.check for verdict in failed),
        "place_right": right_place(bug, diagnosis),
        "first": f"{first.phase} of {first.region or 'no module'}" if first else "",
        "cause_right": cause_told(bug, diagnosis) if bug.cause else "",
        "causes": "; ".join(cause.words for cause in diagnosis.causes) if diagnosis else "",
    }


def _when_columns(bug: Mutant, result: CaseResult, subject: NamedSubject, engine: InprocEngine) -> dict[str, object]:
    """Columns about the words that the failure needs. Each statement about them is run again."""
    failed = Failed(case=result.case, verdicts=result.verdicts)
    again = partial(prove, subject=subject, engine=engine, explain=False)
    found = words_needed(failed, subject, again, _WHEN_S)
    line = when_line(found.when)
    wrong = false_statements(line, lambda text: again(Case.parse(text), timeout_s=_TIMEOUT_S))
    return {"when_right": _judge_words(bug, found), "when_true": "no" if wrong else "yes", "when": line}


def _judge_words(bug: Mutant, found: NeededWords) -> str:
    """Whether the line names exactly the words that the bug needs, "yes" or "no".

    Words with their usual values do not count. "none" is for a line that names no words, unless the bug needs none and
    every word was tried.
    """
    words, case = {one.word for one in found.needed}, found.case
    if not isinstance(case, Case) or found.unproved or not words and found.untried:
        return "none"
    condition = f"{bug.condition} {bug.modes.get(case.mode, '')}"
    asked = {re.split(r"[!=<>%]", word)[0] for word in condition.split()}
    needed = {word for word in asked if word not in _DERIVED and not word.endswith("_rest")}
    if not words:
        return "none" if needed or {*bug.modes} != {*MODES} else "yes"
    allowed = {word for word in words if getattr(case, word) == getattr(Case(), word)}
    allowed |= {word for derived in asked & {*_DERIVED} for word in _DERIVED[derived]}
    allowed |= {"mode"} if {*bug.modes} != {*MODES} else set()
    named = all(word in words or _is_implied(word, words, case, condition) for word in needed)
    return "yes" if words - allowed <= needed and named and holds(condition, case) else "no"


def _is_implied(word: str, words: set[str], case: Case, condition: str) -> bool:
    """Whether the condition on `word` holds in every legal case in which these words keep their values."""
    fixed = {each: getattr(case, each) for each in words}
    others = (repair_words(words_of(case), {**fixed, word: value}, domains()) for value in domains().get(word, ()))
    about = " ".join(each for each in condition.split() if re.split(r"[!=<>%]", each)[0] == word)
    return all(holds(about, Case(**other)) for other in others if other)


def main(words: Sequence[str]) -> int:
    """Measure the bugs of one list; exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bugs", choices=_BUGS)
    parser.add_argument("--part", default="1/1", help="this share of them")
    parser.add_argument("--out", type=Path, required=True, help="the file of rows")
    asked = parser.parse_args(words)
    number, parts = map(int, asked.part.split("/"))
    torch.set_num_threads(1)
    with InprocEngine() as engine, asked.out.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS.split())
        table.writeheader()
        rows = []
        for bug in _BUGS[asked.bugs][number - 1 :: parts]:
            rows.append(measure_bug(bug, engine))
            table.writerow(rows[-1])
            file.flush()
    killed = [row for row in rows if row["killed"]]
    print(f"killed {len(killed)} of {len(rows)}")
    for column in ("place_right", "when_right", "when_true"):
        print(f"{column} {sum(row[column] == 'yes' for row in killed)} of {len(killed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
