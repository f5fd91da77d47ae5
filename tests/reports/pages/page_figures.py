"""Figures of cases, bars and traffic on a page, compared with `summary.csv`: `compared(document, folder)`.

And every cell of its maps of errors, compared with `errors.csv`: `map_flaws(document, folder)`.

Both are made here from the file's rows, with nothing of `reports` but the colours of its bars. A size is right when it
is the file's to the last digit shown. A bar is right when it is as long as its bytes beside the longest of all bars.
"""

import csv
import html
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shardproof.reports.pages.drawings import PHASE_COLOURS

Row = dict[str, Any]
Figure = tuple[str, str, float | str]
"""Where it stands, what is shown, what the file says: bytes, a count, or a word."""
_NUMBERS = ("calls", "payload_bytes", "wire_bytes", "expected_calls", "expected_payload_bytes")
_KEYS = ("mode", "ranks", "phase", "op", "axis")
_NONE = "-"
MOST_CASES = 64
"""Cases up to which a page has a table of each."""


class Compared(NamedTuple):
    """How many figures of each section were compared, and those that differ."""

    figures: dict[str, int]
    apart: list[str]


def compared(document: str, folder: Path) -> Compared:
    """Hold all figures of a document against the summary of this run."""
    rows, saved, shown = _rows(folder), _saved(folder), list(_cases_shown(document, folder))
    found: dict[str, list[Figure]] = {
        "cases": list(_headline(shown, _by("case", rows), saved)),
        "traffic": list(_traffic(document, _by("mode", rows), _by("case", rows))),
        "bars": list(_bars(shown, _by("case", rows), saved)),
    }
    found["cases"].append(("cases that are shown", str(len(shown)), len(_cases(folder))))
    apart = [
        f"{section}, {where}: {text} is shown, {stored} is stored"
        for section, figures in found.items()
        for where, text, stored in figures
        if not _same(text, stored)
    ]
    return Compared({section: len(figures) for section, figures in found.items()}, apart)


def _same(shown: str, stored: float | str) -> bool:
    """Is this the number, to the last digit shown? Bytes have a unit and four digits, counts are whole."""
    if isinstance(stored, str):
        return shown == stored
    number, _, unit = shown.replace(",", "").partition(" ")
    if not unit:
        return number == str(int(stored))
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    return number == f"{stored / factor:.4g}" and (unit == "B" or float(number) >= 1)


def _shown(document: str, section: str) -> Iterator[tuple[str, Row]]:
    """Every row of the tables of a section by its headers, with the title of its table; cells as they are written.

    In a browser the script of the page puts each header of a table that sorts into a button: its words are the same.
    """
    begin = document.index(f'<section id="{section}">')
    for title, table in re.findall(
        r'role="region" tabindex="0" aria-label="([^"]*)"><table[^>]*>(.*?)</table>',
        document[begin : document.index("</section>", begin)],
        re.DOTALL,
    ):
        headers = [re.sub(r"<[^>]*>", "", head) for head in re.findall(r"<th [^>]*>(.*?)</th>", table, re.DOTALL)]
        for row in re.findall(r"<tr[^>]*>(<td.*?)</tr>", table, re.DOTALL):
            cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
            yield html.unescape(title), dict(zip(headers, map(html.unescape, cells), strict=True))


def _cases(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "cases.jsonl").read_text(encoding="utf-8").splitlines()]


def _rows(folder: Path) -> list[Row]:
    with (folder / "summary.csv").open(newline="", encoding="utf-8") as file:
        rows: list[Row] = list(csv.DictReader(file))
    ranks = {case["case"]: str(case["world_size"]) for case in _cases(folder)}
    for row in rows:
        row |= {name: int(row[name]) if row[name] else None for name in _NUMBERS}
        row["ranks"] = ranks[row["case"]]
    return rows


def _saved(folder: Path) -> dict[str, int]:
    """Case -> bytes that its fullest rank saved."""
    most: dict[str, int] = {}
    with (folder / "memory.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            most[row["case"]] = max(most.get(row["case"], 0), int(row["saved_bytes"]))
    return most


def _by(key: str, rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def _sum(rows: Iterable[Row], name: str, **keys: str) -> float | str:
    """The sum over rows with these keys; "-" of rows without a number."""
    numbers = [row[name] for row in rows if all(row[key] == value for key, value in keys.items())]
    known = [number for number in numbers if number is not None]
    return sum(known) if known or not numbers else _NONE


def _cases_shown(document: str, folder: Path) -> Iterator[tuple[Row, str]]:
    """Each line with its case, of which words that all share are left out.

    Lines with most words are found first, for fewer words fit more cases.
    """
    left = _cases(folder)
    for _, line in sorted(_shown(document, "cases"), key=lambda shown: -len(shown[1]["case"])):
        words = {*line["case"].split()} - {_NONE}
        of_kind = [case for case in left if (case["mode"], str(case["world_size"])) == (line["mode"], line["ranks"])]
        found = min((case for case in of_kind if words <= {*case["case"].split()}), key=lambda case: len(case["case"]))
        left.remove(found)
        yield line, found["case"]


def _headline(shown: list[tuple[Row, str]], rows: dict[str, list[Row]], saved: dict[str, int]) -> Iterator[Figure]:
    for line, case in shown:
        yield f"{case} wire", line["wire"], _sum(rows[case], "wire_bytes")
        yield f"{case} payload", line["payload"], _sum(rows[case], "payload_bytes")
        yield f"{case} saved", line["saved"], saved[case]


def _traffic(document: str, modes: dict[str, list[Row]], cases: dict[str, list[Row]]) -> Iterator[Figure]:
    """Tables by mode, then by case: the title is the one or the other."""
    columns = {"calls": "calls", "expected": "expected_calls", "payload": "payload_bytes", "wire": "wire_bytes"}
    columns["expected payload"] = "expected_payload_bytes"
    seen = set()
    for title, line in _shown(document, "traffic"):
        rows = (modes if title in modes else cases).get(title, [])
        own = [row for row in rows if all(row[name] == line[name] for name in _KEYS)]
        seen.add((title, *(line[name] for name in _KEYS)))
        where = f"{title} {' '.join(line[name] for name in _KEYS)}"
        for header, name in columns.items():
            yield f"{where} {header}", line[header], _sum(own, name)
        right = all((r["calls"], r["payload_bytes"]) == (r["expected_calls"], r["expected_payload_bytes"]) for r in own)
        yield f"{where} agrees", line["agrees"], "yes" if right else "no"
    tables = (modes, cases) if len(cases) <= MOST_CASES else (modes,)
    due = {(title, *(row[name] for name in _KEYS)) for table in tables for title, rows in table.items() for row in rows}
    yield "lines", str(len(seen & due)), len(due)


def _bars(shown: list[tuple[Row, str]], rows: dict[str, list[Row]], saved: dict[str, int]) -> Iterator[Figure]:
    """The parts of both bars of each line: where each begins and how long it is, in 100ths of its cell."""
    longest = max(float(_sum(rows[case], "wire_bytes")) for _, case in shown)
    for line, case in shown:
        sent = {phase: float(_sum(rows[case], "wire_bytes", phase=phase)) for phase in PHASE_COLOURS}
        yield from _bar(line["sent by phase"], {name: size for name, size in sent.items() if size}, longest, case)
        yield from _bar(line["memory"], {"saved": float(saved[case])}, max(saved.values()), case)
    yield "bars", str(sum(line[name].count("<svg") for line, _ in shown for name in _BARS)), len(_BARS) * len(shown)


_BARS = ("sent by phase", "memory")


def _bar(drawn: str, sizes: dict[str, float], full: float, case: str) -> Iterator[Figure]:
    parts = re.findall(r'<rect x="([\d.]+)" width="([\d.]+)" height="10" fill="(#\w+)"', drawn)
    figures = re.findall(r"(\w+) ([\d.,]+ \w+|0)(?:, |\")", drawn[: drawn.index(" class=")].partition('label="')[2])
    begin = 0.0
    yield f"parts of {case}", str(len(parts)), len(sizes)
    for (x, width, colour), (word, figure), (name, size) in zip(parts, figures, sizes.items(), strict=False):
        due = f"{100 * begin / full:.3f} {100 * size / full:.3f}"
        near = abs(float(x) - 100 * begin / full) < 0.002 and abs(float(width) - 100 * size / full) < 0.002
        yield f"bar of {name} of {case}", due if near else f"{x} {width}", due
        yield f"colour of {name} of {case}", colour, PHASE_COLOURS.get(name, colour)
        yield f"name of a part of {case}", word, name
        yield f"label of {name} of {case}", figure, size
        begin += size


_LIMITS = (1e3, 1e6, 1e9)
_Place = tuple[str, bool, str]


def map_flaws(document: str, folder: Path) -> tuple[int, list[str]]:
    """How many cells were compared, and one sentence for each that differs."""
    cells, flaws = 0, []
    for label, table in re.findall(
        r'aria-label="Error by layer and phase, ([^"]*)"><table class="map">(.*?)</table>', document, re.DOTALL
    ):
        case = html.unescape(label)
        due = _due(folder, case)
        groups = re.findall(r'<th scope="colgroup"[^>]*colspan="(\d+)">([^<]*)<', table)
        steps = [name == "later steps" for size, name in groups for _ in range(int(size))]
        phases = re.findall(r'<th scope="col"(?: class="later")?>(\w+)</th>', table)
        shown: dict[_Place, tuple[str, str]] = {}
        for layer, row in re.findall(r'<th scope="row">([^<]*)</th>(.*?)</tr>', table, re.DOTALL):
            drawn = re.findall(r'<td class="([^"]*)"[^>]*>([^<]*)</td>', row)
            for later, phase, (kind, text) in zip(steps, phases, drawn, strict=True):
                shown[layer, later, phase] = " ".join(word for word in kind.split() if word != "later"), text.strip()
        cells += len(shown)
        flaws += [
            f"{case}, {place}: {shown.get(place)} is shown, {due.get(place)} is stored"
            for place in {**shown, **due}
            if shown.get(place, ("", "")) != due.get(place, ("", ""))
        ]
    return cells, flaws


def _due(folder: Path, case: str) -> dict[_Place, tuple[str, str]]:
    """Class and text of every cell that is not empty."""
    worst: dict[_Place, float] = {}
    first: _Place | None = None
    with (folder / "errors.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            place = _layer(row["region"]), int(row["step"]) > 0, row["phase"]
            if row["case"] == case and row["first"]:
                first = place
            elif row["case"] == case:
                error, allowed = float(row["error"]), float(row["allowed"])
                share = error / allowed if allowed else math.inf if error else 0.0
                worst[place] = max(worst.get(place, 0.0), share)
    due = {place: _cell(share) for place, share in worst.items()}
    if first:
        kind, text = due.get(first, ("", ""))
        due[first] = f"{kind} first".strip(), f"{text} first".strip()
    return due


def _layer(region: str) -> str:
    parts = region.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: numbered + 1]) or "whole model"


def _cell(share: float) -> tuple[str, str]:
    if share <= 1:
        return "heat-ok", "ok"
    kind = f"heat-{1 + sum(share >= limit for limit in _LIMITS)}"
    if math.isinf(share):
        return kind, "inf"
    return kind, f"{share:.2g}x" if share < 1000 else f"1e{round(math.log10(share))}x"
