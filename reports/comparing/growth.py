"""Where one mode becomes cheaper than another within one run.

Weights cost the same at any length, activations grow with it, so a mode that sends weights (`isp`) wins beyond T*
tokens. The crossing is measured here from a run whose cases differ in mode and tokens only. `wire_bytes` is what one
rank puts on the wire in one micro-batch (ring model). counted="layers" leaves out all-to-alls and everything outside
the layers, as the closed form `T* = 3 Wl / ((2C + 4) h e)` does; counted="all" leaves out nothing.
"""

from itertools import combinations

import numpy as np
import pandas as pd

from shardproof.harness.ledger import PASSES
from shardproof.reports.printing.text_tables import Table, byte_size, table, whole
from shardproof.reports.stored.frames import Run, in_order
from shardproof.reports.stored.summary import words_but

WITH_MODE = ("mode", "data", "delivery", "embedding", "head")
"""Words in which cases of one model differ where their modes do: the mode, and what it brings with it."""
_VARIES = (*WITH_MODE, "seq", "batch")
"""Words in which the cases of one comparison may differ: mode and tokens."""
_COLUMNS = ["mode", "tokens", "wire_bytes"]


def growth_of_bytes(run: Run, counted: str = "layers") -> pd.DataFrame:
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
    sent = _sent_bytes(run.ledger, counted)
    frame = family[["case", "mode", "tokens", "micro", "steps"]].astype({"mode": "str"})
    frame = frame.assign(wire_bytes=frame["case"].map(sent).fillna(0) / (frame["micro"] * frame["steps"]))
    dearest = frame.groupby(["mode", "tokens"])["wire_bytes"].max().reset_index()
    return in_order(dearest).sort_values(["mode", "tokens"], ignore_index=True)


def _sent_bytes(ledger: pd.DataFrame, counted: str) -> "pd.Series[float]":
    """Wire bytes of the busiest rank by case."""
    if counted == "layers":
        inside = ledger["region"].str.startswith("layers.") & (ledger["op"] != "all_to_all")
        ledger = ledger[inside & ledger["phase"].isin(PASSES)]
    ranks = ledger.groupby(["case", "rank"], observed=True)["wire_bytes"].sum()
    return ranks.groupby("case").max().astype("float64")


def find_crossings(growth: pd.DataFrame) -> pd.DataFrame:
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


def compare_modes(run: Run) -> pd.DataFrame:
    """All crossings of a run under both ways to count: counted, mode, other, tokens, wire_bytes."""
    crossed = [find_crossings(growth_of_bytes(run, counted)).assign(counted=counted) for counted in ("layers", "all")]
    return pd.concat(crossed, ignore_index=True)[["counted", "mode", "other", "tokens", "wire_bytes"]]


def break_even_table(crossings: pd.DataFrame) -> Table:
    """Where one mode becomes cheaper than another, from `compare_modes`."""
    return table(
        "Break-even",
        crossings,
        (str, "cheaper beyond T*: mode | than: other"),
        (whole, "T* (tokens): tokens"),
        (byte_size, "bytes there: wire_bytes"),
        (str, "counted"),
        note="wire bytes of one rank, a micro-batch; layers: without all-to-alls, embedding and head; all: everything",
    )
