"""What bounds the verdicts of a run, in a few notes: what is split, not returned or not decided, lower precision,
doubts on the ledger, groupings, the corpus, its rows.

Every case's own list is in `verdicts.jsonl`; a note adds the cases up.
"""

from __future__ import annotations

from collections import Counter

from harness.checking.exact_checks import SPLIT
from reports.stored.decided import undecided_notes
from reports.stored.frames import Run

_ON_PURPOSE = " (left out on purpose)"
_STATED, _ABSENT = " (stated deviation: ", "stated deviation that does not occur: "
_READING = "statements about the data hold; "
_REPEATED = "it is repeated"
_ROUNDED = "errors below those of "
_DOUBTS = ("axis ", "step: ", "phase: ")
_OURS = "parallel.subject:subject"
"""Our own code, whose modes say what they split."""
_MOST = 3
"""Different amounts, of tokens or of what is split, that a note lists."""


def unchecked_notes(run: Run) -> list[str]:
    """All notes, the most important first; but for undecided tensors only checks that passed have something to add."""
    told = (undecided_notes, _split, _unreturned, _deviating, _rounded, _doubts, _regrouped, _read, _rows)
    return [note for notes in told for note in notes(run)]


def _split(run: Run) -> list[str]:
    """The shares of a foreign subject's parameters that are split, the least first, and the cases that they hold in."""
    if run.env.get("request", {}).get("subject") == _OURS:
        return []
    parts = [message.rpartition("; ")[2] for message, _ in _passed(run, "parallelism")]
    shares = Counter(int(part.removesuffix(SPLIT)) for part in parts if part.endswith(SPLIT))
    told = [f"{share} % ({_cases(shares[share])})" for share in sorted(shares)]
    more = f"; more in other cases, up to {max(shares)} %" if len(told) > _MOST else ""
    return [f"share of the parameters that is split: {'; '.join(told[:_MOST])}{more}"] if told else []


def _unreturned(run: Run) -> list[str]:
    """How much of the truth the subjects returned, where that is not all of it; what is left out on purpose apart."""
    notes: dict[str, None] = {}
    for message, unchecked in _passed(run, "coverage"):
        names = [name for name in unchecked.split("; ") if name]
        silent = [name for name in names if not name.endswith(_ON_PURPOSE)]
        said = [name.removesuffix(_ON_PURPOSE) for name in names if name.endswith(_ON_PURPOSE)]
        words = f"; not returned, so not checked: {_kinds(silent)}" if silent else ""
        words += f"; left out on purpose, so not checked: {_kinds(said)}" if said else ""
        if words:
            notes[f"{message}{words}"] = None
    return list(notes)


def _deviating(run: Run) -> list[str]:
    """What deviates from the truth as the subjects state, and what is stated to and does not."""
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
    told = []
    for sentence, those in names.items():
        of = f"{_kinds(list(dict.fromkeys(those)))}; {_cases(len(cases[sentence]))}"
        told.append(f"stated deviation, not checked: {sentence} ({of})")
    return told + [f"{part} in {_cases(len(found))}" for part, found in absent.items()]


def _rounded(run: Run) -> list[str]:
    """Where float64 cases were held to the limits of a lower precision, and how many."""
    passed = run.verdicts[run.verdicts["verdict"] == "pass"]
    found = {
        (str(row["case"]), part)
        for row in passed.to_dict("records")
        for part in str(row["unchecked"]).split("; ")
        if part.startswith(_ROUNDED)
    }
    told = Counter(part for _, part in sorted(found))
    return [f"not checked: {part} in {_cases(told[part])}" for part in told]


def _doubts(run: Run) -> list[str]:
    """What the ledgers are not certain of (harness.ledger.Event.doubts), and in how many cases."""
    told = Counter(part for _, unchecked in _passed(run, "ledger") for part in unchecked.split("; "))
    return [f"not certain: {part} ({_cases(told[part])})" for part in told if part.startswith(_DOUBTS)]


def _kinds(names: list[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in Counter(name.partition("/")[0] for name in names).items())


def _regrouped(run: Run) -> list[str]:
    """The groupings of the same batch that could not be compared, by the reason."""
    told = [unchecked.split("; ") for _, unchecked in _passed(run, "regrouping") if unchecked]
    parts = ["; ".join(part for part in one if not part.startswith(_ROUNDED)) for one in told]
    unfinished = Counter(filter(None, parts))
    return [
        f"regrouping: the subject does not finish {words} in {_cases(count)}; subject.refuses can state why"
        for words, count in unfinished.items()
    ]


def _read(run: Run) -> list[str]:
    """How much of the corpus the cases read; a corpus that is too short for some of them comes first."""
    amounts = Counter(message.partition(_READING)[2] for message, _ in _passed(run, "data"))
    order = sorted(amounts, key=lambda amount: (_REPEATED not in amount, -amounts[amount]))
    told = [f"{amount} ({_cases(amounts[amount])})" for amount in order[:_MOST] if amount]
    if rest := sum(amounts[amount] for amount in order[_MOST:]):
        told.append(f"other amounts ({_cases(rest)})")
    return [f"data: {'; '.join(told)}"] if told else []


def _rows(run: Run) -> list[str]:
    """Rows that no token looks up: the most frequent list, and in how many cases it is another."""
    lists = Counter(unchecked for _, unchecked in _passed(run, "data") if unchecked)
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
