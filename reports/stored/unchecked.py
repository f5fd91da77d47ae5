"""What the verdicts of a run leave open: how many tensors they decide, by kind, and notes on what was not checked.

A tensor is decided if it was found right or wrong: returned, merged, in the truth, with limits that do not admit half
of it. A kind is the beginning of a name, in words: "gradients" for "grad/head.weight". Every case's own list is in
`verdicts.jsonl`; a note adds the cases up.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import pandas as pd

from shardproof.harness.checking.numeric_checks import name_of_kind
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.verdicts import words
from shardproof.harness.verdicts.facts import Note, NoteKind
from shardproof.harness.verdicts.verdict import FAIL, PASS, Verdict
from shardproof.reports.stored.frames import Run

_NUMBER = re.compile(r"(?<=[./])\d+(?=[./]|$)")
_COUNTED = "decided", "tensors"
_OWN = (NoteKind.UNDECIDED, NoteKind.NOT_IN_TRUTH)
"""Kinds of notes on returned tensors that stay undecided."""


def by_kind(records: Iterable[Verdict]) -> pd.DataFrame:
    """case, kind, decided, tensors: one row for each case and kind; empty if no verdict counts any."""
    rows = [(one.case, name_of_kind(kind), *counts) for one in records for kind, counts in one.decided.items()]
    frame = pd.DataFrame(rows, columns=["case", "kind", *_COUNTED])
    return frame.groupby(["case", "kind"], sort=False, as_index=False)[list(_COUNTED)].sum()


def by_case(records: Iterable[Verdict]) -> pd.DataFrame:
    """By case: decided, tensors."""
    return by_kind(records).groupby("case", sort=False)[list(_COUNTED)].sum()


def decided_words(records: Iterable[Verdict]) -> str:
    """All cases added up: "all 43 tensors decided", or the numbers of every kind that is not fully decided; "" if
    nothing was counted.
    """
    kinds = by_kind(records).groupby("kind", sort=False)[list(_COUNTED)].sum()
    return words.describe_decided(
        {str(kind): (int(row["decided"]), int(row["tensors"])) for kind, row in kinds.iterrows()}
    )


def unchecked_notes(run: Run) -> list[str]:
    """All notes, the most important first. Those by `_select_passed` are from checks that passed, others from all."""
    every_kind = (
        _note_undecided,
        _note_splits,
        _note_unreturned,
        _note_left_out_fields,
        _note_unnamed_groups,
        _note_deviations,
        _of_dtype,
        _note_lower_precision,
        _note_doubts,
        _note_groupings,
        _note_unseen_rows,
    )
    return [note for notes in every_kind for note in notes(run)]


def _note_undecided(run: Run) -> Iterator[str]:
    """A note for each kind with undecided tensors that were returned: how many, in how many cases, and which."""
    failed = {(one.case, name) for one in run.records for name in _wrong_names(one)}
    names: dict[str, Counter[str]] = {}
    cases: dict[str, set[str]] = {}
    for one in run.records:
        partly = {kind for kind, (decided, tensors) in one.decided.items() if decided < tensors}
        for name in (name for note in one.notes if note.kind in _OWN for name in note.names):
            kind, _, rest = name.partition("/")
            if kind in partly and one.check != "coverage" and (one.case, name) not in failed:
                names.setdefault(name_of_kind(kind), Counter())[f"{kind}/{_NUMBER.sub('*', rest)}"] += 1
                cases.setdefault(name_of_kind(kind), set()).add(one.case)
    counts = by_kind(run.records)
    for kind, found in names.items():
        own = counts[counts["case"].isin(cases[kind]) & (counts["kind"] == kind)]
        yield words.describe_undecided(kind, dict(found.most_common()), int(own["tensors"].sum()), len(own))


def _wrong_names(one: Verdict) -> Iterator[str]:
    """The tensors that a failed check found wrong: these are decided, even if another check could not decide."""
    if one.verdict == FAIL:
        yield from (wrong.name for wrong in one.failure.wrong) if one.failure else ()
        yield from [one.worst.name] if one.worst else []


def _note_splits(run: Run) -> Iterator[str]:
    """The percentages of a foreign subject's parameters that are split, the smallest first, and the cases with each."""
    if run.env.get("request", {}).get("subject") != SUBJECT:
        shares = Counter(note.numbers[0] for _, note in _select_passed(run, NoteKind.SPLIT_SHARE))
        if shares:
            yield words.split_shares(dict(sorted(shares.items())))


def _note_unreturned(run: Run) -> Iterator[str]:
    """How much of the truth the subjects returned, if not all of it; what is left out on purpose is counted apart."""
    kinds = (NoteKind.NOT_RETURNED, NoteKind.NOT_IN_TRUTH), (NoteKind.LEFT_OUT,)
    notes = []
    for one in run.records:
        if (one.check, one.verdict) == ("coverage", PASS):
            silent, on_purpose = ([n for note in one.notes if note.kind in own for n in note.names] for own in kinds)
            if silent or on_purpose:
                notes.append(words.describe_unreturned(one.statement, silent, on_purpose))
    yield from dict.fromkeys(notes)


def fields_left_out(one: Verdict) -> Iterator[tuple[str, ...]]:
    """The fields of calls that a stated closed form leaves out, so that any value of them passes; for most verdicts
    none.
    """
    if one.verdict == PASS:
        yield from (note.names for note in one.notes if note.kind == NoteKind.CLOSED_FORM and note.names)


def _note_left_out_fields(run: Run) -> Iterator[str]:
    """Fields of calls that no closed form states, and in how many cases."""
    found = Counter(names for one in run.records for names in fields_left_out(one))
    yield from (words.left_out_fields(names, cases) for names, cases in found.items())


def _note_unnamed_groups(run: Run) -> Iterator[str]:
    """Groups whose name is that of no axis, so that their ranks are not compared, and in how many cases."""
    found = Counter(note.reason for one, note in _select_notes(run, NoteKind.UNCHECKED) if one.check == "groups")
    yield from (words.not_checked(reason, cases) for reason, cases in found.items())


def _note_deviations(run: Run) -> Iterator[str]:
    """Deviations from the truth that the subjects state, with those that do not occur, and those that the truth has
    too.
    """
    for kind in (NoteKind.DEVIATES, NoteKind.DEVIATION_ABSENT, NoteKind.DEVIATION_APPLIED):
        names: dict[str, list[str]] = {}
        cases: dict[str, set[str]] = {}
        for one, note in _select_notes(run, kind):
            names.setdefault(note.reason, []).extend(note.names)
            cases.setdefault(note.reason, set()).add(one.case)
        for sentence, own in names.items():
            yield words.deviation(kind, sentence, [*dict.fromkeys(own)], len(cases[sentence]))


def _of_dtype(run: Run) -> Iterator[str]:
    """The operators by which dense models depend on the dtype, and in how many cases."""
    found = Counter(note.reason for _, note in _select_passed(run, NoteKind.DTYPE_DEPENDENT))
    yield from (words.dtype_dependent(reason, count) for reason, count in found.items())


def _note_lower_precision(run: Run) -> Iterator[str]:
    """The numbers of float64 cases in which the limits of a lower precision were used, and where."""
    found = {(one.case, note.names[0], note.reason) for one, note in _select_passed(run, NoteKind.LOWER_PRECISION)}
    counts = Counter((dtype, reason) for _, dtype, reason in sorted(found))
    yield from (words.lower_precision(dtype, reason, count) for (dtype, reason), count in counts.items())


def _note_doubts(run: Run) -> Iterator[str]:
    """Doubts of the ledgers (harness.ledger.Event.doubts), and in how many cases."""
    found = Counter(note.reason for _, note in _select_notes(run, NoteKind.DOUBT))
    yield from (words.doubt(reason, count) for reason, count in found.items())


def _note_groupings(run: Run) -> Iterator[str]:
    """The groupings of the same batch that could not be compared, by the reason."""
    reasons: dict[str, list[str]] = {}
    for one, note in _select_passed(run, NoteKind.UNFINISHED_GROUPING):
        reasons.setdefault(one.case, []).append(words.describe_grouping(note.names[0], note.reason))
    unfinished = Counter("; ".join(own) for own in reasons.values())
    yield from (words.unfinished_groupings(own, count) for own, count in unfinished.items())


def _note_unseen_rows(run: Run) -> Iterator[str]:
    """Rows that no token looks up: the most frequent list, and how many cases have another one."""
    lists = Counter(note.reason for _, note in _select_passed(run, NoteKind.UNREAD_ROWS))
    if lists:
        first, count = lists.most_common(1)[0]
        yield words.unread_rows(first, count, lists.total() - count)


def _select_notes(run: Run, kind: NoteKind) -> Iterator[tuple[Verdict, Note]]:
    """Every note of this kind with its verdict."""
    return ((one, note) for one in run.records for note in one.notes if note.kind == kind)


def _select_passed(run: Run, kind: NoteKind) -> Iterator[tuple[Verdict, Note]]:
    """Every note of this kind of a check that passed, with its verdict."""
    return ((one, note) for one, note in _select_notes(run, kind) if one.verdict == PASS)
