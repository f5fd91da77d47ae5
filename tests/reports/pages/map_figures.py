"""Every cell of a page's maps of errors, compared with `errors.csv`: figure, colour, the mark of the first place.

The right content of each cell is made here from the file's rows, with nothing of `reports`.
"""

import csv
import html
import math
import re
from pathlib import Path

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
    due = {place: _shown(share) for place, share in worst.items()}
    if first:
        kind, text = due.get(first, ("", ""))
        due[first] = f"{kind} first".strip(), f"{text} first".strip()
    return due


def _layer(region: str) -> str:
    parts = region.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: numbered + 1]) or "whole model"


def _shown(share: float) -> tuple[str, str]:
    if share <= 1:
        return "heat-ok", "ok"
    kind = f"heat-{1 + sum(share >= limit for limit in _LIMITS)}"
    if math.isinf(share):
        return kind, "inf"
    return kind, f"{share:.2g}x" if share < 1000 else f"1e{round(math.log10(share))}x"
