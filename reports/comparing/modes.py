"""Modes against each other within one run: bytes, phases, axes, memory; and where one becomes cheaper than another.

Bytes and calls are those of the busiest rank over the whole run of a case, as in `summary.csv`; times are microseconds.

Weights cost the same at any length, activations grow with it, so a mode that sends weights (`isp`) wins beyond T*
tokens. The crossing is measured here from a run whose cases differ in mode and tokens only. `wire_bytes` is what one
rank puts on the wire in one micro-batch (ring model). counted="layers" leaves out all-to-alls and everything outside
the layers, as the closed form `T* = 3 Wl / ((2C + 4) h e)` does; counted="all" leaves out nothing.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd

from harness.ledger import PASSES, PHASES
from reports.printing.tables import Table, count, mark, mebibytes, milliseconds, pair, table
from reports.stored.frames import Run, in_order
from reports.stored.summary import words_but

_MOST_BYTES = ["payload_bytes", "wire_bytes"]


def side_by_side(run: Run) -> pd.DataFrame:
    """Rows of cases, by ranks and mode.

    ranks, mode, words (of the case, without mode and data), one column of payload bytes for each phase that talks
    ("forward_bytes"), payload_bytes, expected_payload_bytes. wire_bytes, least_ratio (of wire bytes, to the mode that
    sends least on as many ranks), axes ("tp 1.271, dp 0.250" MiB), saved_bytes. exposed_us (inside calls that are
    waited for at once, mean over ranks).
    """
    lines = run.summary
    phases = lines.pivot_table(index="case", columns="phase", values="payload_bytes", aggfunc="sum", observed=True)
    phases.columns = pd.Index([f"{phase}_bytes" for phase in phases.columns])
    sums = lines.groupby("case", sort=False)[_MOST_BYTES].sum()
    sums["expected_payload_bytes"] = lines.groupby("case", sort=False)["expected_payload_bytes"].sum(min_count=1)
    case = run.cases["case"]
    frame = pd.DataFrame(
        {
            "ranks": run.cases["world_size"].astype("Int64"),
            "mode": run.cases["mode"],
            "case": case,
            "words": case.map(lambda text: words_but(text, "mode", "data")),
        }
    )
    frame = frame.join(phases.fillna(0).astype("int64"), on="case").join(sums, on="case")
    waited = run.ledger[~run.ledger["is_async"]]
    spent = waited.groupby(["case", "rank"], observed=True)["duration_us"].sum().groupby("case").mean()
    frame = frame.assign(
        least_ratio=frame["wire_bytes"] / frame.groupby("ranks")["wire_bytes"].transform("min"),
        axes=case.map(_axes(lines)),
        saved_bytes=case.map(run.memory.groupby("case")["saved_bytes"].max()).astype("Int64"),
        exposed_us=case.map(spent).astype("float64"),
    )
    frame = frame[frame["payload_bytes"].notna()]
    return in_order(frame).sort_values(["ranks", "mode"], kind="stable", ignore_index=True)


def _axes(lines: pd.DataFrame) -> dict[str, str]:
    """Case -> MiB by axis, in words."""
    sizes = lines.groupby(["case", "axis"], observed=True, sort=True)["payload_bytes"].sum()
    texts: dict[str, str] = {}
    for row in sizes.reset_index().to_dict("records"):
        own = f"{row['axis']} {mebibytes(row['payload_bytes'])}"
        texts[row["case"]] = f"{texts[row['case']]}, {own}" if row["case"] in texts else own
    return texts


def modes_table(frame: pd.DataFrame) -> Table:
    """The modes side by side, from `side_by_side`."""
    phases = [phase for phase in PHASES if f"{phase}_bytes" in frame]
    ratio = frame.assign(times_least=[f"{value:.2f}" for value in frame["least_ratio"]])
    return table(
        "Modes side by side",
        ratio,
        (
            ("mode", "mode", str),
            ("ranks", "ranks", count),
            ("case", "words", mark),
            *((phase, f"{phase}_bytes", mebibytes) for phase in phases),
            ("payload MiB", "payload_bytes", mebibytes),
            ("expected", "expected_payload_bytes", mebibytes),
            ("wire MiB", "wire_bytes", mebibytes),
            ("x least", "times_least", pair),
            ("saved", "saved_bytes", mebibytes),
            ("exposed ms", "exposed_us", milliseconds),
            ("payload MiB by axis", "axes", str),
        ),
        note="one rank, the whole run; phases, payload and expected: MiB that calls hand over; wire: MiB that the rank "
        "sends then (ring model); x least: wire beside the mode that sends least on as many ranks; saved: the most "
        "that autograd held; exposed: inside calls that are waited for at once, mean over ranks",
    )


_VARIES = ("mode", "seq", "batch", "data", "delivery", "embedding", "head")
"""Words in which the cases of one comparison may differ: mode and tokens, and what a mode brings with it."""
_COLUMNS = ["mode", "tokens", "wire_bytes"]


def growth(run: Run, counted: str = "layers") -> pd.DataFrame:
    """mode, tokens, wire_bytes: the largest family of cases that differ in nothing but mode and tokens.

    Empty unless two modes were run at two sizes each, or when the run did not say how many tokens its cases have.
    Raises ValueError for another word than layers or all.
    """
    if counted not in ("layers", "all"):
        raise ValueError(f"counted={counted}: must say which bytes count; legal: layers, all")
    if not {"tokens", "micro", "steps"} <= set(run.cases):
        return pd.DataFrame(columns=_COLUMNS)
    cases = run.cases.assign(rest=run.cases["case"].map(lambda text: words_but(text, *_VARIES)))
    # Two modes at two token counts each, or there is nothing to compare.
    sizes = cases.groupby(["rest", "mode"], observed=True)["tokens"].nunique()
    comparing = (sizes >= 2).groupby("rest").sum()
    families = [group for _, group in cases[cases["rest"].map(comparing) >= 2].groupby("rest", sort=False)]
    if not families:
        return pd.DataFrame(columns=_COLUMNS)
    family = max(families, key=len)
    sent = _sent(run.ledger, counted)
    frame = family[["case", "mode", "tokens", "micro", "steps"]].astype({"mode": "str"})
    frame = frame.assign(wire_bytes=frame["case"].map(sent).fillna(0) / (frame["micro"] * frame["steps"]))
    dearest = frame.groupby(["mode", "tokens"])["wire_bytes"].max().reset_index()
    return in_order(dearest).sort_values(["mode", "tokens"], ignore_index=True)


def _sent(ledger: pd.DataFrame, counted: str) -> pd.Series[float]:
    """Wire bytes of the busiest rank by case."""
    if counted == "layers":
        inside = ledger["region"].str.startswith("layers.") & (ledger["op"] != "all_to_all")
        ledger = ledger[inside & ledger["phase"].isin(PASSES)]
    ranks = ledger.groupby(["case", "rank"], observed=True)["wire_bytes"].sum()
    return ranks.groupby("case").max().astype("float64")


def crossings(growth: pd.DataFrame) -> pd.DataFrame:
    """mode, other, tokens, wire_bytes: where `mode`, dearer at first, becomes the cheaper one.

    Bytes are a constant plus a share of the tokens in every mode, so a straight line through a mode's points is exact
    for them. Lines that do not cross at one token or more give no row.
    """
    lines = {}
    for mode, points in growth.groupby("mode", observed=True, sort=True):
        if points["tokens"].nunique() >= 2:
            slope, constant = np.polyfit(points["tokens"].astype("float64"), points["wire_bytes"].astype("float64"), 1)
            lines[str(mode)] = float(slope), float(constant)
    rows = []
    for (one, (slope, constant)), (two, (other_slope, other_constant)) in combinations(lines.items(), 2):
        # Parallel lines that differ by rounding only would cross at a meaningless token count.
        if abs(slope - other_slope) <= 1e-9 * max(abs(slope), abs(other_slope)):
            continue
        tokens = (constant - other_constant) / (other_slope - slope)
        if tokens >= 1:
            flatter, steeper = (one, two) if slope < other_slope else (two, one)
            rows.append((flatter, steeper, tokens, slope * tokens + constant))
    return pd.DataFrame(rows, columns=["mode", "other", "tokens", "wire_bytes"])


def compared(run: Run) -> pd.DataFrame:
    """All crossings of a run under both ways to count: counted, mode, other, tokens, wire_bytes."""
    found = [crossings(growth(run, counted)).assign(counted=counted) for counted in ("layers", "all")]
    return pd.concat(found, ignore_index=True)[["counted", "mode", "other", "tokens", "wire_bytes"]]
