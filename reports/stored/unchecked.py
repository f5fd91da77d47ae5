"""Bounds of the verdicts of a run: how many tensors they decide, by kind, and notes on what they leave unchecked.

A tensor is decided when it was found right or wrong: returned, merged, known to the truth, with limits that admit no
half of it. A kind is what a name begins with, in words: "gradients" of "grad/head.weight". Notes name what is split,
not returned or not decided, lower precision, doubts on the ledger, groupings, unread rows. Every case's own
list is in `verdicts.jsonl`, and a note adds the cases up.
"""

import re
from collections import Counter
from collections.abc import Iterator

import pandas as pd

from shardproof.harness.checking.call_checks import SPLIT
from shardproof.harness.checking.coverage import ON_PURPOSE, UNREAD
from shardproof.harness.checking.numeric_checks import called
from shardproof.harness.checking.regrouping import OF_DTYPE
from shardproof.harness.dense_model import SUBJECT
from shardproof.reports.stored.frames import Run

_MOST_NAMES = 12
"""Patterns of names that a note lists; all names stand in verdicts.jsonl."""
_NUMBER = re.compile(r"(?<=[./])\d+(?=[./]|$)")
_COUNTED = "decided", "tensors"


def by_kind(verdicts: pd.DataFrame) -> pd.DataFrame:
    """case, kind, decided, tensors: one row a case and kind; empty where no verdict counts any."""
    rows = [
        (str(row["case"]), called(kind), int(decided), int(tensors))
        for row in verdicts.to_dict("records")
        for kind, decided, tensors in _counts(str(row["decided"]))
    ]
    frame = pd.DataFrame(rows, columns=["case", "kind", *_COUNTED])
    return frame.groupby(["case", "kind"], sort=False, as_index=False)[list(_COUNTED)].sum()


def by_case(verdicts: pd.DataFrame) -> pd.DataFrame:
    """By case: decided, tensors."""
    return by_kind(verdicts).groupby("case", sort=False)[list(_COUNTED)].sum()


def decided_words(verdicts: pd.DataFrame) -> str:
    """All cases added up: "all 43 tensors decided", or the numbers of every kind that is not decided whole; "" where
    nothing was counted.
    """
    kinds = by_kind(verdicts).groupby("kind", sort=False)[list(_COUNTED)].sum()
    if kinds.empty:
        return ""
    decided, tensors = (int(kinds[name].sum()) for name in _COUNTED)
    if decided == tensors:
        return f"all {tensors:,} tensors decided"
    partly = kinds[kinds["decided"] < kinds["tensors"]]
    shares = [f"{kind} {row['decided']:,} of {row['tensors']:,}" for kind, row in partly.iterrows()]
    others = ["all others"] if len(partly) < len(kinds) else []
    return f"{decided:,} of {tensors:,} tensors decided: {', '.join(shares + others)}"


def undecided_notes(run: Run) -> list[str]:
    """A note for each kind of which returned tensors stay undecided: how many, in how many cases, and which."""
    missing = {case: _missing(own) for case, own in run.verdicts.groupby("case", sort=False)}
    names: dict[str, Counter[str]] = {}
    cases: dict[str, set[str]] = {}
    for row in run.verdicts.to_dict("records"):
        case = str(row["case"])
        kinds = {kind for kind, decided, tensors in _counts(str(row["decided"])) if decided < tensors}
        for name in str(row["unchecked"]).split("; "):
            prefix, _, rest = name.partition("/")
            if prefix in kinds and " " not in name and name not in missing[case]:
                names.setdefault(called(prefix), Counter())[_NUMBER.sub("*", f"{prefix}/{rest}")] += 1
                cases.setdefault(called(prefix), set()).add(case)
    counts = by_kind(run.verdicts)
    return [
        _note(kind, found, counts[counts["case"].isin(cases[kind]) & (counts["kind"] == kind)])
        for kind, found in names.items()
    ]


def _note(kind: str, names: Counter[str], counts: pd.DataFrame) -> str:
    listed = [name if count == 1 else f"{name} ({count})" for name, count in names.most_common(_MOST_NAMES)]
    more = f" and {len(names) - _MOST_NAMES} more patterns of names" if len(names) > _MOST_NAMES else ""
    where = f"{len(counts)} case{'s' if len(counts) > 1 else ''}"
    tally = f"{names.total():,} of {int(counts['tensors'].sum()):,} {kind} in {where}"
    return (
        f"undecided: {tally}, since rounding explains any error of them or they do not merge: {', '.join(listed)}{more}"
    )


def _missing(verdicts: pd.DataFrame) -> set[str]:
    """The names that a case did not return, which have a note of their own."""
    found = verdicts.loc[verdicts["check"] == "coverage", "unchecked"]
    return {name.removesuffix(ON_PURPOSE) for text in found for name in str(text).split("; ")}


def _counts(text: str) -> Iterator[tuple[str, int, int]]:
    """Kind of name, how many are decided, of how many, from "grad 8/23; loss 2/2"."""
    for part in filter(None, text.split("; ")):
        kind, _, numbers = part.rpartition(" ")
        decided, _, tensors = numbers.partition("/")
        yield kind, int(decided), int(tensors)


_STATED, _ABSENT = " (stated deviation: ", "stated deviation that does not occur: "
_ROUNDED = "errors below those of "
_DOUBTS = ("axis ", "step: ", "phase: ")
_MOST = 3
"""Different amounts, of tokens or of what is split, that a note lists."""


def unchecked_notes(run: Run) -> list[str]:
    """All notes, the most important first; but for undecided tensors only checks that passed have something to add."""
    every_kind = (undecided_notes, _split, _unreturned, _deviating, _of_dtype, _rounded, _doubts, _regrouped, _rows)
    return [note for notes in every_kind for note in notes(run)]


def _split(run: Run) -> list[str]:
    """The shares of a foreign subject's parameters that are split, the least first, and the cases that they hold in."""
    if run.env.get("request", {}).get("subject") == SUBJECT:
        return []
    parts = [message.rpartition("; ")[2] for message, _ in _passed(run, "parallelism")]
    shares = Counter(int(part.removesuffix(SPLIT)) for part in parts if part.endswith(SPLIT))
    parts = [f"{share} % ({_cases(shares[share])})" for share in sorted(shares)]
    more = f"; more in other cases, up to {max(shares)} %" if len(parts) > _MOST else ""
    return [f"share of the parameters that is split: {'; '.join(parts[:_MOST])}{more}"] if parts else []


def _unreturned(run: Run) -> list[str]:
    """How much of the truth the subjects returned, where that is not all of it; what is left out on purpose apart."""
    notes: dict[str, None] = {}
    for message, unchecked in _passed(run, "coverage"):
        names = [name for name in unchecked.split("; ") if name and UNREAD not in name]
        silent = [name for name in names if not name.endswith(ON_PURPOSE)]
        on_purpose = [name.removesuffix(ON_PURPOSE) for name in names if name.endswith(ON_PURPOSE)]
        words = f"; not returned, so not checked: {_kinds(silent)}" if silent else ""
        words += f"; left out on purpose, so not checked: {_kinds(on_purpose)}" if on_purpose else ""
        if words:
            notes[f"{message}{words}"] = None
    return list(notes)


def _deviating(run: Run) -> list[str]:
    """Deviations from the truth that the subjects state, and stated ones that do not occur."""
    names: dict[str, list[str]] = {}
    cases: dict[str, set[str]] = {}
    absent: dict[str, set[str]] = {}
    for row in run.verdicts.to_dict("records"):
        for part in str(row["unchecked"]).split("; "):
            name, found, sentence = part.partition(_STATED)
            if found:
                names.setdefault(sentence[:-1], []).append(name)
                cases.setdefault(sentence[:-1], set()).add(str(row["case"]))
        for part in str(row["message"]).split("; "):
            if part.startswith(_ABSENT):
                absent.setdefault(part, set()).add(str(row["case"]))
    notes = []
    for sentence, those in names.items():
        of = f"{_kinds(list(dict.fromkeys(those)))}; {_cases(len(cases[sentence]))}"
        notes.append(f"stated deviation, not checked: {sentence} ({of})")
    return notes + [f"{part} in {_cases(len(found))}" for part, found in absent.items()]


def _of_dtype(run: Run) -> list[str]:
    """The operators by which dense models depend on the dtype, and in how many cases."""
    found = Counter(unchecked for _, unchecked in _passed(run, "truth") if unchecked.startswith(OF_DTYPE))
    return [f"not checked: {one} ({_cases(found[one])}); legal: state that number, or prove float64" for one in found]


def _rounded(run: Run) -> list[str]:
    """Where float64 cases were held to the limits of a lower precision, and how many."""
    passed = run.verdicts[run.verdicts["verdict"] == "pass"]
    found = {
        (str(row["case"]), part)
        for row in passed.to_dict("records")
        for part in str(row["unchecked"]).split("; ")
        if part.startswith(_ROUNDED)
    }
    counts = Counter(part for _, part in sorted(found))
    return [f"not checked: {part} in {_cases(counts[part])}" for part in counts]


def _doubts(run: Run) -> list[str]:
    """Doubts of the ledgers (harness.ledger.Event.doubts), and in how many cases."""
    found = run.verdicts.loc[run.verdicts["check"] == "ledger", "unchecked"]
    doubts = Counter(part for unchecked in found for part in str(unchecked).split("; "))
    return [f"not certain: {part} ({_cases(doubts[part])})" for part in doubts if part.startswith(_DOUBTS)]


def _kinds(names: list[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in Counter(name.partition("/")[0] for name in names).items())


def _regrouped(run: Run) -> list[str]:
    """The groupings of the same batch that could not be compared, by the reason."""
    reasons = [unchecked.split("; ") for _, unchecked in _passed(run, "regrouping") if unchecked]
    parts = ["; ".join(part for part in one if not part.startswith(_ROUNDED)) for one in reasons]
    unfinished = Counter(filter(None, parts))
    return [
        f"regrouping: the subject does not finish {words} in {_cases(count)}; subject.refuses can state why"
        for words, count in unfinished.items()
    ]


def _rows(run: Run) -> list[str]:
    """Rows that no token looks up: the most frequent list, and in how many cases it is another."""
    parts = (part for _, unchecked in _passed(run, "coverage") for part in unchecked.split("; "))
    lists = Counter(part for part in parts if UNREAD in part)
    if not lists:
        return []
    first, count = lists.most_common(1)[0]
    others = lists.total() - count
    more = f"; other rows in {_cases(others)}" if others else ""
    return [f"not checked: {first} in {_cases(count)}{more}"]


def _passed(run: Run, check: str) -> list[tuple[str, str]]:
    """Message and unchecked names of this check in every case where it passed."""
    found = run.verdicts[(run.verdicts["check"] == check) & (run.verdicts["verdict"] == "pass")]
    return [(str(row["message"]), str(row["unchecked"])) for row in found.to_dict("records")]


def _cases(count: int) -> str:
    return f"{count} case{'s' if count > 1 else ''}"
