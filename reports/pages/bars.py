"""One line a case with its bars: wire bytes by phase, memory saved for backward; what a page opens with.

A bar is a drawing of 100 by 10 units that stretches with its cell, so it needs no library; all bars of a column have
one scale, and no bar adds up two cases. Bytes are those of one rank over the whole run: the most that any rank sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from markupsafe import Markup, escape

from harness.ledger import PHASES
from reports.printing.tables import count, mebibytes, small
from reports.stored.frames import Run
from reports.stored.summary import apart, badness, headline

_COLOURS = "#8d99ae #3b82c4 #8e6bbf #e08a2e #d1495b #5b5f97 #2a9d6f #a1785a #2fa7b5 #6d6875"
PHASE_COLOURS = dict(zip(PHASES, _COLOURS.split(), strict=True))
_SAVED = "#7a8450"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseBars:
    """One case: what it is, its bars as markup, and its figures as text."""

    verdict: str
    mode: str
    ranks: str
    case: str
    wire: Markup
    wire_mib: str
    payload_mib: str
    saved: Markup
    saved_mib: str
    error: str
    decided: str
    begins: bool
    """Whether this is the first line of so many ranks."""


def lines(run: Run) -> tuple[tuple[CaseBars, ...], str]:
    """The lines, failures first, then by ranks and mode; and the words that all of their cases share."""
    frame = headline(run)
    shared, own = apart(frame["words"])
    frame = frame.assign(own=own, bad=-frame["verdict"].map(badness))
    wire: dict[str, dict[str, float]] = {case: {} for case in frame["case"]}
    for line in run.summary[["case", "phase", "wire_bytes"]].to_dict("records"):
        sent = wire.setdefault(line["case"], {})
        sent[line["phase"]] = sent.get(line["phase"], 0.0) + line["wire_bytes"]
    longest = max((sum(sizes.values()) for sizes in wire.values()), default=0.0)
    fullest = max((float(size) for size in frame["saved_bytes"].dropna()), default=0.0)
    made: list[CaseBars] = []
    for row in frame.sort_values(["bad", "ranks", "mode"], kind="stable").to_dict("records"):
        sent = wire[row["case"]]
        parts = [(phase, sent[phase], colour) for phase, colour in PHASE_COLOURS.items() if sent.get(phase)]
        kept = 0.0 if pd.isna(row["saved_bytes"]) else float(row["saved_bytes"])
        ranks = count(row["ranks"])
        made.append(
            CaseBars(
                verdict=row["verdict"],
                mode=str(row["mode"]),
                ranks=ranks,
                case=row["own"] or "-",
                wire=_bar(parts, longest, "wire MiB"),
                wire_mib=mebibytes(sum(sent.values())),
                payload_mib=mebibytes(row["payload_bytes"]),
                saved=_bar([("saved", kept, _SAVED)], fullest, "saved MiB"),
                saved_mib=mebibytes(row["saved_bytes"]),
                error=_pair(row["worst_error"], row["worst_allowed"]),
                decided="-" if pd.isna(row["tensors"]) else f"{count(row['decided'])} of {count(row['tensors'])}",
                begins=bool(made) and (made[-1].ranks, made[-1].verdict) != (ranks, row["verdict"]),
            )
        )
    return tuple(made), shared


def _pair(error: float, allowed: float) -> str:
    return "-" if pd.isna(error) else f"{small(error)} / {small(allowed)}"


def _bar(parts: Sequence[tuple[str, float, str]], full: float, what: str) -> Markup:
    """Parts (name, bytes, colour) beside each other; `full` bytes are as long as the cell."""
    drawn, left = [], 0.0
    for _, size, colour in parts:
        wide = 100 * size / full if full else 0.0
        drawn.append(f'<rect x="{left:.3f}" width="{wide:.3f}" height="10" fill="{colour}"/>')
        left += wide
    told = ", ".join(f"{name} {mebibytes(size)}" for name, size, _ in parts) or "none"
    label = f'role="img" aria-label="{what}: {escape(told)}"'
    head = f'<svg {label} class="bar" viewBox="0 0 100 10" preserveAspectRatio="none">'
    return Markup(head + "".join(drawn) + "</svg>")  # noqa: S704  (numbers, colours and our own names of phases)
