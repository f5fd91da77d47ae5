"""How numbers are written: frames to tables of text, the same in the terminal, in markdown and on the page.

Bytes are written in B, KiB (2**10), MiB or GiB, errors with two significant digits; "-" is an unknown number.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from shardproof.reports.stored.summary import LAUNCH, group_headline, split_common_words

NOTHING = "-"
MOST_CASES = 24
"""The most rows of a run's table; of more cases each mode has a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Headers, and cells as text; `numbers` align right, `note` is below. Raises ValueError for an uneven row."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headers):
                raise ValueError(f"rows={row}: needs {len(self.headers)} cells, one a header; legal: {self.headers}")


def count(value: object) -> str:
    """A whole number."""
    return NOTHING if _absent(value) else f"{int(str(value)):,}"


def whole(value: object) -> str:
    """A measured number to the nearest whole one."""
    return NOTHING if _absent(value) else f"{round(float(str(value))):,}"


def byte_size(value: object) -> str:
    """Bytes in the unit that they need, with four digits: 12 B, 4 KiB, 1.906 MiB, 3.5 GiB."""
    if _absent(value):
        return NOTHING
    size = float(str(value))
    for unit in ("B", "KiB", "MiB"):
        if float(f"{size:.4g}") < 1024:
            return f"{size:.4g} {unit}" if size else "0"
        size /= 1024
    return f"{size:,.4g} GiB" if size < 10_000 else f"{size:,.0f} GiB"


def small(value: object) -> str:
    """An error: 0, 2.1e-16, 1e-09."""
    if _absent(value):
        return NOTHING
    return "0" if float(str(value)) == 0 else f"{float(str(value)):.2g}"


def milliseconds(value: object) -> str:
    """Microseconds as ms: 12.3, 0.012."""
    if _absent(value):
        return NOTHING
    spent_ms = float(str(value)) / 1000
    return f"{spent_ms:,.1f}" if spent_ms >= 10 else f"{spent_ms:.3f}"


def percent(value: object) -> str:
    """A share: 33.3%."""
    return NOTHING if _absent(value) else f"{float(str(value)):.1%}"


def pair(value: object) -> str:
    """Two numbers already written, "12 / 8"."""
    return str(value)


def mark(value: object) -> str:
    """A word, or "-" for an empty one."""
    return str(value) or NOTHING


def figure(value: float) -> str:
    """A number with three significant digits, never fewer than those before its point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def gibibytes(value: object) -> str:
    """Bytes as GiB with three digits."""
    return NOTHING if _absent(value) else figure(float(str(value)) / 2**30)


def three(value: object) -> str:
    """A number with three digits at most."""
    return NOTHING if _absent(value) else f"{float(str(value)):.3g}"


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as JSON can hold them, by column: what is not known is null."""
    known = frame.astype("object").where(frame.notna(), None)
    return [{str(key): value for key, value in row.items()} for row in known.to_dict("records")]


_TEXTS = (str, mark)
"""The writers of texts; columns of all others are numbers, and align right."""
Columns = tuple[Callable[[object], str], str]
"""A writer, and the columns that it writes: "header: column | ..."; the header alone if the column has that name."""


def _absent(value: object) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def table(title: str, frame: pd.DataFrame, *columns: Columns, note: str = "") -> Table:
    """A table of these columns of the frame, from left to right. Numbers align right."""
    named = [(*name.partition(": "), write) for write, names in columns for name in names.split(" | ") if name]
    cells = [[write(value) for value in frame[column or header].astype("object")] for header, _, column, write in named]
    return Table(
        title=title,
        headers=tuple(header for header, *_ in named),
        rows=tuple(zip(*cells, strict=True)),
        numbers=frozenset(place for place, (*_, write) in enumerate(named) if write not in _TEXTS),
        note=note,
    )


def shorten_table(shown: Table, most: int, where: str) -> Table:
    """The first `most` rows of a table. A note says how many it has, and `where` the others are."""
    if len(shown.rows) <= most:
        return shown
    note = f"{most:,} of {len(shown.rows):,} rows; {where}"
    return replace(shown, rows=shown.rows[:most], note=f"{shown.note}; {note}" if shown.note else note)


_OF_ONE_RANK = (
    "calls and bytes (payload): one rank, the whole run; saved: the most bytes that autograd held on a rank; "
)


def headline_table(headline: pd.DataFrame) -> Table:
    """The one table of a run, from `summary.headline`."""
    shared, own = split_common_words(headline["words"])
    words = [one or shared for one in own]
    frame = headline.assign(
        own_words=words,
        both_calls=[placed_calls(row) for row in headline.to_dict("records")],
        both_errors=_pairs(headline["worst_error"], headline["worst_allowed"], small),
        tensors_decided=_pairs(headline["decided"], headline["tensors"], count, " of "),
        expectation=[
            byte_size(size) if not _absent(size) else stated or NOTHING
            for size, stated in zip(
                headline["expected_payload_bytes"].astype("object"), headline["stated"], strict=True
            )
        ],
    )
    launches = (headline["against"] == LAUNCH).all()  # calls and saved bytes are not recorded then
    return table(
        _title_of_comparison(headline) + (f"; all have {shared}" if shared else ""),
        frame,
        (str, "mode"),
        (count, "ranks"),
        (pair, "" if launches else "calls fwd / bwd: both_calls"),
        (byte_size, "" if launches else "bytes per rank: payload_bytes"),
        (pair, "" if launches else "expected: expectation"),
        (byte_size, "" if launches else "saved: saved_bytes"),
        (pair, "max error / allowed: both_errors"),
        (mark, _column_of_dtypes(headline)),
        (pair, "decided: tensors_decided"),
        (str, "verdict"),
        (mark, "case: own_words"),
        note=("" if launches else _OF_ONE_RANK)
        + "error: the largest beside its limit; decided: tensors whose limit is small enough to judge",
    )


def _column_of_dtypes(frame: pd.DataFrame) -> str:
    """The column with the dtype of each limit, "" (none) if all are of float64."""
    return "dtype" if set(frame["dtype"]) - {"", "float64"} else ""


def placed_calls(row: Mapping[Any, Any]) -> str:
    """Calls of forward and backward of a row of `summary.headline`: "3 / 2"; "3 / 2 ? 5" with 5 of unknown phase."""
    placed, unplaced = f"{count(row['forward_calls'])} / {count(row['backward_calls'])}", row["unplaced_calls"]
    return (f"{placed} ? {count(unplaced)}" if placed != "0 / 0" else f"? {count(unplaced)}") if unplaced else placed


def first_table(headline: pd.DataFrame) -> Table:
    """The table that a run prints: a row for each case, or for each mode if there are more than MOST_CASES."""
    return headline_table(headline) if len(headline) <= MOST_CASES else grouped_table(headline)


def grouped_table(headline: pd.DataFrame) -> Table:
    """All cases of a mode on as many ranks in one row, from `summary.headline`."""
    frame = group_headline(headline)
    *calls, unplaced = (_ranges(frame, f"{phase}_calls", count) for phase in ("forward", "backward", "unplaced"))
    pairs = [" / ".join(texts) for texts in zip(*calls, strict=True)]
    met = zip(frame["as_expected"], frame["expected"], strict=True)
    verdicts = zip(frame["verdict"], frame["alike"], frame["cases"], strict=True)
    frame = frame.assign(
        both_calls=[pair if some == "0" else f"{pair} ? {some}" for pair, some in zip(pairs, unplaced, strict=True)],
        payload=_ranges(frame, "payload_bytes", byte_size),
        met=[f"{as_expected} of {expected}" if expected else NOTHING for as_expected, expected in met],
        both_errors=_pairs(frame["worst_error"], frame["worst_allowed"], small),
        verdict_of_cases=[word if alike == cases else f"{word} {alike} of {cases}" for word, alike, cases in verdicts],
    )
    return table(
        _title_of_comparison(headline),
        frame,
        (str, "mode"),
        (count, "ranks | cases"),
        (pair, "calls fwd / bwd: both_calls | bytes per rank: payload | expected: met"),
        (byte_size, "saved: saved_bytes"),
        (pair, "max error / allowed: both_errors"),
        (mark, _column_of_dtypes(frame)),
        (str, "verdict: verdict_of_cases"),
        note="calls and bytes (payload): one rank, the whole run, the least to the most of these cases; expected: "
        "cases with the bytes of the closed form; saved: the most bytes that autograd held on a rank; error: the "
        "largest beside its limit",
    )


def _ranges(frame: pd.DataFrame, name: str, write: Callable[[object], str]) -> list[str]:
    """The least and the most of a number: "20-32", or "20" when both are written alike."""
    ends = zip(frame[f"least_{name}"].astype("object"), frame[f"most_{name}"].astype("object"), strict=True)
    texts = [(write(least), write(most)) for least, most in ends]
    return [least if least == most else f"{least}-{most}" for least, most in texts]


def _title_of_comparison(headline: pd.DataFrame) -> str:
    """The title, by what the cases were compared with: dry ranks have no numbers, a case that never ran has nothing."""
    if headline["worst_error"].notna().any():
        against = headline["against"].iloc[0]
        return f"Launch B against {against}" if against == LAUNCH else f"Every case against {against}"
    known = headline["expected_payload_bytes"].notna().any()
    return "Every case against its expected ledger" if known else "Every case"


def _pairs(left: pd.Series, other: pd.Series, write: Callable[[object], str], between: str = " / ") -> list[str]:
    texts = [(write(a), write(b)) for a, b in zip(left.astype("object"), other.astype("object"), strict=True)]
    return [NOTHING if a == b == NOTHING else f"{a}{between}{b}" for a, b in texts]


def traffic_table(traffic: pd.DataFrame, title: str = "Calls and bytes beside the expectation") -> Table:
    """Traffic beside its expectation, from `summary.traffic`."""
    return table(
        title,
        traffic,
        (str, "mode"),
        (count, "ranks"),
        (str, "phase | op | axis"),
        (count, "calls | expected: expected_calls"),
        (byte_size, "payload: payload_bytes | expected payload: expected_payload_bytes | wire: wire_bytes"),
        (mark, "agrees"),
        note="one rank; payload: what calls hand over, expected: the same by closed form, wire: what the rank sends "
        "then (ring model); cases of one mode on as many ranks are added up; agrees: every rank with its own "
        "expectation, line by line in every case",
    )


def verdict_table(verdicts: pd.DataFrame) -> Table:
    """Table of checks: the verdict of each and the tensor that came closest to its limit."""
    return table(
        "Verdicts",
        verdicts,
        (str, "verdict | check | case | worst tensor: worst_name"),
        (small, "error: worst_error | allowed: worst_allowed | in epsilons: worst_epsilons"),
        (str, "not checked: unchecked"),
    )


def pipeline_table(measured: pd.DataFrame, cores: str) -> Table:
    """The bubble of every pipeline beside its closed form, from `summary.measure_pipelines`; `cores` of its machine."""
    return table(
        "Pipelines",
        measured,
        (str, "case"),
        (count, "ranks | step"),
        (milliseconds, "ms: step_us"),
        (percent, "bubble | closed form: bubble_stated"),
        (milliseconds, "calls ms: calls_us | overlapped ms: overlapped_us"),
        note="last step, from the first forward to the last backward; bubble: the share of the ranks' time in which "
        "they compute no forward or backward; closed form: equal stages, messages that take no time, a core for each "
        f"rank, and here all ranks shared {cores} cores: times are those of this machine; calls: asynchronous ones of "
        "all ranks until they are waited for; overlapped: the rank computed meanwhile",
    )
