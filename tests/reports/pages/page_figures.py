"""Figures of cases, bars and traffic on a page, compared with `summary.csv`: read from the browser's own document.

    apart(document, folder)      what differs, one sentence a figure; what was compared is counted beside it

Sums are made here from the file's rows, with nothing of `reports` but the colours of its bars. A size is right when it
is the file's to the last digit shown. A bar is right when it is as long as its bytes beside the longest of all bars.
"""

import csv
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from reports.pages.drawings import PHASE_COLOURS

Row = dict[str, Any]
Figure = tuple[str, str, float | str]
"""Where it stands, what is shown, what the file says: bytes, a count, or a word."""
_NUMBERS = ("calls", "payload_bytes", "wire_bytes", "expected_calls", "expected_payload_bytes")
_NONE = "-"
MOST_CASES = 64
"""Cases up to which a page has a table of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """How many figures of each section were compared, and those that differ."""

    figures: dict[str, int]
    apart: tuple[str, ...]


def compared(document: str, folder: Path) -> Compared:
    """Hold all figures of a document against the summary of this run."""
    page, rows = _Page(), _rows(folder)
    page.feed(document)
    found: dict[str, list[Figure]] = {
        "cases": list(_headline(page, rows, folder)),
        "traffic": list(_traffic(page, rows)),
        "bars": list(_bars(document, rows, folder)),
    }
    wrong = [
        f"{section}, {where}: {shown} is shown, {told} is stored"
        for section, figures in found.items()
        for where, shown, told in figures
        if not _same(shown, told)
    ]
    return Compared(figures={section: len(figures) for section, figures in found.items()}, apart=tuple(wrong))


def _same(shown: str, told: float | str) -> bool:
    """Is this the number, to the last digit shown? MiB are given with a point, counts without."""
    if isinstance(told, str):
        return shown == told
    number = shown.replace(",", "")
    if number == "<0.001":
        return 0 < told < 0.0005 * 2**20
    digits = len(number.partition(".")[2])
    return number == str(int(told)) if not digits else abs(float(number) - told / 2**20) <= 0.5001 * 10**-digits


@dataclass(slots=True)
class _Table:
    section: str
    title: str
    headers: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


class _Page(HTMLParser):
    """The tables of a page with their sections."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[_Table] = []
        self._section, self._cell = "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note where we are."""
        words = dict(attrs)
        if tag == "section":
            self._section = words.get("id") or ""
        elif words.get("role") == "region":
            self.tables.append(_Table(self._section, words.get("aria-label") or ""))
        elif tag == "tr" and self.tables:
            self.tables[-1].rows.append([])
        if tag in {"td", "th"}:
            self._cell = ""
        elif tag == "span":
            self._cell += " "

    def handle_data(self, data: str) -> None:
        """Gather the text of a cell."""
        self._cell += data if data.strip() else " "

    def handle_endtag(self, tag: str) -> None:
        """Keep what is complete."""
        if tag == "th":
            self.tables[-1].headers.append(self._cell)
        elif tag == "td":
            self.tables[-1].rows[-1].append(self._cell)

    def of(self, section: str) -> Iterator[tuple[_Table, Row]]:
        """Every row of the tables of a section, by its headers."""
        for table in self.tables:
            if table.section == section:
                for row in table.rows:
                    if row:
                        yield table, dict(zip(table.headers, row, strict=True))


def _rows(folder: Path) -> list[Row]:
    with (folder / "summary.csv").open(newline="", encoding="utf-8") as file:
        rows: list[Row] = list(csv.DictReader(file))
    ranks = {case["case"]: str(case["world_size"]) for case in _cases(folder)}
    for row in rows:
        row |= {name: int(row[name]) if row[name] else None for name in _NUMBERS}
        row["ranks"] = ranks[row["case"]]
    return rows


def _cases(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "cases.jsonl").read_text(encoding="utf-8").splitlines()]


def _sum(rows: Iterable[Row], name: str) -> float | str:
    """The sum; "-" of rows without a number."""
    numbers = [row[name] for row in rows]
    known = [number for number in numbers if number is not None]
    return sum(known) if known or not numbers else _NONE


def _own(rows: Iterable[Row], **keys: str) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in keys.items())]


def _the_case(shown: Row, left: list[Row]) -> Row:
    """The case of a row of a table with columns mode, ranks and case, where those words that all share are left out."""
    fits: Callable[[Row], bool] = lambda case: (  # noqa: E731
        (case["mode"], str(case["world_size"])) == (shown["mode"], shown["ranks"])
        and {*shown["case"].split()} - {_NONE} <= {*case["case"].split()}
    )
    found = min(filter(fits, left), key=lambda case: len(case["case"].split()))
    left.remove(found)
    return found


def _headline(page: _Page, rows: list[Row], folder: Path) -> Iterator[Figure]:
    left = _cases(folder)
    shown = [row for _, row in page.of("cases")]
    for row in sorted(shown, key=lambda row: -len(row["case"])):
        case = _the_case(row, left)["case"]
        own = _own(rows, case=case)
        yield f"{case} wire", row["wire MiB"], _sum(own, "wire_bytes")
        yield f"{case} payload", row["payload MiB"], _sum(own, "payload_bytes")
        yield f"{case} saved", row["saved MiB"], _saved(folder)[case]
    yield "cases that are shown", str(len(shown)), len(shown) + len(left)


def _traffic(page: _Page, rows: list[Row]) -> Iterator[Figure]:
    """Tables by mode, then by case: the title is the one or the other."""
    columns = {"calls": "calls", "expected": "expected_calls", "payload MiB": "payload_bytes", "wire MiB": "wire_bytes"}
    columns["expected MiB"] = "expected_payload_bytes"
    seen = set()
    for table, row in page.of("traffic"):
        by = "mode" if table.title in {line["mode"] for line in rows} else "case"
        keys = {name: row[name] for name in ("mode", "ranks", "phase", "op", "axis")}
        own = _own(rows, **{**keys, by: table.title})
        seen.add((table.title, *keys.values()))
        where = f"{table.title} {' '.join(keys.values())}"
        for header, name in columns.items():
            yield f"{where} {header}", row[header], _sum(own, name)
        right = all((r["calls"], r["payload_bytes"]) == (r["expected_calls"], r["expected_payload_bytes"]) for r in own)
        yield f"{where} agrees", row["agrees"], "yes" if right else "no"
    keys_of = ("mode", "ranks", "phase", "op", "axis")
    shown = ("mode", "case") if len({row["case"] for row in rows}) <= MOST_CASES else ("mode",)
    due = {(row[by], *(row[name] for name in keys_of)) for row in rows for by in shown}
    yield "lines", str(len(seen & due)), len(due)


def _bars(document: str, rows: list[Row], folder: Path) -> Iterator[Figure]:
    """The parts of all bars, line by line: where each begins and how long it is, in 100ths of its cell."""
    cases = document[document.index('<section id="cases">') : document.index('<section id="modes">')]
    bars = re.findall(r'<svg role="img" aria-label="(wire|saved) MiB: ([^"]*)"[^>]*>(.*?)</svg>', cases)
    part = re.compile(r'<rect x="([\d.]+)" width="([\d.]+)" height="10" fill="(#\w+)"')
    page, left = _Page(), _cases(folder)
    page.feed(document)
    of_line = _of_lines([line for _, line in page.of("cases")], left)
    kept = _saved(folder)
    wire = {case: float(_sum(_own(rows, case=case), "wire_bytes")) for case in of_line}
    yield "bars", str(len(bars)), 2 * len(of_line)
    for (what, told, drawn), case in zip(bars, (case for case in of_line for _ in "ws"), strict=False):
        sizes = {"saved": float(kept[case])} if what == "saved" else {}
        for phase in PHASE_COLOURS if what == "wire" else ():
            sizes |= {phase: float(_sum(_own(rows, case=case, phase=phase), "wire_bytes"))}
        sizes = {name: size for name, size in sizes.items() if size}
        full, begin = max(kept.values()) if what == "saved" else max(wire.values()), 0.0
        parts = part.findall(drawn)
        yield f"parts of {what} of {case}", str(len(parts)), len(sizes)
        for (x, width, colour), (name, size), figure in zip(
            parts, sizes.items(), html.unescape(told).split(", "), strict=False
        ):
            near = abs(float(x) - 100 * begin / full) < 0.002 and abs(float(width) - 100 * size / full) < 0.002
            due = f"{100 * begin / full:.3f} {100 * size / full:.3f}"
            yield f"bar of {name} of {case}", due if near else f"{x} {width}", due
            yield f"colour of {name} of {case}", colour, PHASE_COLOURS.get(name, colour)
            yield f"name of a part of {case}", figure.split()[0], name
            yield f"label of {name} of {case}", figure.split()[1], size
            begin += size


def _of_lines(lines: list[Row], left: list[Row]) -> list[str]:
    """The case of every line; those with most words are found first, for fewer words fit more cases."""
    order = sorted(range(len(lines)), key=lambda place: -len(lines[place]["case"]))
    found = {place: str(_the_case(lines[place], left)["case"]) for place in order}
    return [found[place] for place in range(len(lines))]


def _saved(folder: Path) -> dict[str, int]:
    """Case -> bytes that its fullest rank saved."""
    most: dict[str, int] = {}
    with (folder / "memory.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            most[row["case"]] = max(most.get(row["case"], 0), int(row["saved_bytes"]))
    return most
