"""The opening of a page: figures of the whole run, its table of modes, and which pairs of features passed together."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from typing import Any

import pandas as pd

from shardproof.harness.mesh_axes import AXES, EXPERT_AXES
from shardproof.harness.verdicts import words
from shardproof.harness.verdicts.facts import Note, NoteKind, WhenKind
from shardproof.harness.verdicts.verdict import FAIL, PASS
from shardproof.reports.printing.text_tables import NOTHING, Table, byte_size, count
from shardproof.reports.programs.program_tables import parts_of_page
from shardproof.reports.stored.failures import group_by_place, simplest_first
from shardproof.reports.stored.files import is_recording
from shardproof.reports.stored.frames import Run

_LABELS = {"pass": "passed", "fail": "failed", "unknown": "unknown"}
_MOST = 20
"""With more features a picture of their pairs is not readable."""
Figure = tuple[str, str, str]
"""A figure, what it counts, and the verdict that colours it, or ""."""


def opening_figures(run: Run, headline: pd.DataFrame) -> tuple[Figure, ...]:
    """Cases by verdict, ranks, cases with the expected bytes, seconds, torch and commit, as far as they are known.

    Seconds are those of all cases added up, which several processes may share.
    """
    verdicts = headline["verdict"].value_counts()
    counts = {word: int(verdicts.get(word, 0)) for word in _LABELS}
    headline_figures = [(str(count), _LABELS[word], word if count else "") for word, count in counts.items()]
    ranks = headline["ranks"].dropna()
    if len(ranks):
        least, most = count(ranks.min()), count(ranks.max())
        headline_figures.append((least if least == most else f"{least} to {most}", "ranks", ""))
    known = headline["expected_payload_bytes"].notna()
    if known.any():
        met = headline["payload_bytes"].eq(headline["expected_payload_bytes"]).fillna(False)[known]
        headline_figures.append((f"{int(met.sum())} of {len(met)}", "cases with the bytes expected", ""))
    if len(run.timings):
        headline_figures.append((f"{run.timings['seconds'].sum():.1f}", "seconds, cases added up", ""))
    versions = (("torch", run.env.get("versions", {}).get("torch")), ("commit", run.env.get("commit")))
    return (*headline_figures, *((str(value), label, "") for label, value in versions if value))


def describe_proof(run: Run, headline: pd.DataFrame) -> str:
    """What the cases that passed prove: modes, layouts, dtypes, tensors, calls and bytes; and how many did not pass."""
    passed = headline[headline["verdict"] == PASS]
    open_cases = len(headline) - len(passed)
    ending = f" Not proved: {open_cases} of {len(headline)} cases." if open_cases and len(passed) else ""
    if passed.empty:
        return "Nothing is proved: no case passed."
    cases = run.cases[run.cases["case"].isin(passed["case"])]
    modes = list(dict.fromkeys(passed["mode"].astype("str")))
    layouts = {(case_axes(text), size) for text, size in zip(cases["case"], cases["world_size"], strict=True)}
    ranks = sorted({int(size) for size in cases["world_size"].dropna()})
    where = f"mode{'s' if len(modes) > 1 else ''} {', '.join(modes)}"
    where += f" in {len(layouts)} layouts" if len(layouts) > 1 else ""
    where += (
        f" on {ranks[0]}{f' to {ranks[-1]}' if len(ranks) > 1 else ''} rank{'s' if ranks[-1:] != [1] else ''}"
        if ranks
        else ""
    )
    dtypes = sorted({str(one) for one in cases["dtype"].dropna()}) if "dtype" in cases else []
    where += f" in {', '.join(dtypes)}" if dtypes else ""
    parts = []
    if tensors := int(passed["decided"].fillna(0).sum()):
        truth = run.env.get("request", {}).get("truth", "the dense model")
        parts.append(f"{tensors:,} tensors equal those of {truth} within rounding")
    sent = f"{int(run.summary['calls'][run.summary['case'].isin(passed['case'])].sum()):,} calls"
    sent += f" and {byte_size(passed['payload_bytes'].sum())}"
    expected = int(passed["expected_payload_bytes"].notna().sum())
    if expected == len(passed):
        parts.append(f"all {sent} of payload that one rank issues are those of the closed form")
    else:
        stated = (
            f"a closed form is stated for {expected} of {len(passed)} cases"
            if expected
            else "no closed form is stated for them (subject.expected)"
        )
        parts.append(f"one rank's {sent} were recorded, and {stated}")
    return f"Proved for {where}: {'; '.join(parts)}.{ending}"


def case_axes(text: str) -> tuple[str, ...]:
    """The words of a case that state its layout on the ranks."""
    return tuple(word for word in text.split() if word.partition("=")[0] in (*AXES, *EXPERT_AXES, "wp"))


def pairs_of_features(cases: Iterable[tuple[str, str]], features_of: Callable[[str], Iterable[str]]) -> Table | None:
    """How many passed cases have both features of a pair; None for fewer than two features, or too many to read.

    `cases`: (text of a case, verdict). `features_of` gives the features of a case by its text; its mode is one.
    """
    alone, both = Counter[str](), Counter[tuple[str, str]]()
    for text, verdict in cases:
        if verdict == "pass":
            own = tuple(dict.fromkeys(features_of(text)))
            alone.update(own)
            both.update(permutations(own, 2))
    names = sorted(alone, key=lambda name: (name.startswith("mode="), name))
    columns = [name for name in names if not name.startswith("mode=")]
    if len(names) < 2 or not columns or len(columns) > _MOST:
        return None
    numbers = [[alone[name] if name == other else both[name, other] for other in columns] for name in names]
    rows = tuple((name, *(str(one or NOTHING) for one in row)) for name, row in zip(names, numbers, strict=True))
    note = "passed cases that have both; on the diagonal those that have the feature"
    note += "" if all(map(all, numbers)) else f"; {NOTHING}: no case of this run"
    return Table(title="Pairs of features that passed together", headers=("feature", *columns), rows=rows, note=note)


def tabulate_runs(run: Run) -> Table | None:
    """What was run, why, in how many cases and how long; None for a run without times."""
    if not {"part", "seconds"} <= {*run.timings}:
        return None
    refused = Counter(name for one in run.records for note in one.notes for name in _parts_not_run(note))
    rows = []
    for part, reason in words.PARTS.items():
        own = run.timings[run.timings["part"] == part]
        if len(own):
            rows.append((reason, count(own["case"].nunique()), f"{own['seconds'].sum():.1f}"))
        if refused[part]:
            rows.append((f"{reason}: {NoteKind.NOT_RUN.value}", count(refused[part]), "0.0"))
    searched = {one.failure.when for one in run.records if one.failure and one.failure.when}
    if searched:
        tried, seconds = sum(one.runs for one in searched), sum(one.seconds for one in searched)
        rows.append((words.PARTS["when"], count(tried), f"{seconds:.1f}"))
    if late := sum(one.kind == WhenKind.NOT_SEARCHED for one in searched):
        rows.append((f"{words.PARTS['when']}: {NoteKind.NOT_RUN.value}", count(late), "0.0"))
    return Table(title="What was run, and why", headers=("what", "cases", "seconds"), rows=tuple(rows))


def _parts_not_run(note: Note) -> tuple[str, ...]:
    return note.names if note.kind == NoteKind.NOT_RUN else ()


def program_parts(run: Run) -> dict[str, Any]:
    """Overview, findings and traffic of a recorded program; empty for any other run."""
    if not is_recording(run.path):
        return {}
    return parts_of_page(run)


def group_failures(run: Run) -> Sequence[object]:
    """Failed checks by their first place, the simplest case first; empty without any."""
    if not (run.verdicts["verdict"] == "fail").any():
        return ()
    return group_by_place([one for one in simplest_first(run) if one.verdict == FAIL], run.path, run.ledger)
