"""Tables of one run: its modes against each other, where one becomes cheaper, stated calls, rows that experts get."""

import re
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from shardproof.harness.ledger import PASSES, PHASES
from shardproof.harness.protocols import TermLike
from shardproof.reports.printing.text_tables import (
    NOTHING,
    Table,
    byte_size,
    count,
    mark,
    milliseconds,
    pair,
    table,
    three,
    whole,
)
from shardproof.reports.stored.frames import Run, csv_table, in_order
from shardproof.reports.stored.summary import words_but

_MOST_BYTES = ["payload_bytes", "wire_bytes"]


def side_by_side(run: Run) -> pd.DataFrame:
    """Rows of cases, by ranks and mode.

    ranks, mode, words (of the case, without mode and data), one column of payload bytes for each phase that talks
    ("forward_bytes"), payload_bytes, expected_payload_bytes. wire_bytes, least_ratio (of wire bytes, to the mode that
    sends least on as many ranks), axes ("tp 1.271 MiB, dp 256 KiB"), saved_bytes. exposed_us (inside calls that are
    waited for at once, mean over ranks).
    """
    lines = run.summary
    # Some bytes of traces are not known, and then neither is their sum.
    by_phase = lines.groupby(["case", "phase"], observed=True)["payload_bytes"].agg(_sum_known)
    phases = by_phase.unstack(fill_value=0)
    phases.columns = pd.Index([f"{phase}_bytes" for phase in phases.columns])
    sums = lines.groupby("case", sort=False)[_MOST_BYTES].agg(_sum_known)
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
    frame = frame.join(phases.astype("Int64"), on="case").join(sums, on="case")
    waited = run.ledger[~run.ledger["is_async"]]
    spent = waited.groupby(["case", "rank"], observed=True)["duration_us"].sum(min_count=1).groupby("case").mean()
    frame = frame.assign(
        least_ratio=frame["wire_bytes"] / frame.groupby("ranks")["wire_bytes"].transform("min"),
        axes=case.map(_traffic_by_axis(lines)),
        saved_bytes=case.map(run.memory.groupby("case")["saved_bytes"].max()).astype("Int64"),
        exposed_us=case.map(spent).astype("float64"),
    )
    frame = frame[case.isin(set(lines["case"]))]
    return in_order(frame).sort_values(["ranks", "mode"], kind="stable", ignore_index=True)


def _sum_known(sizes: pd.Series) -> object:
    return sizes.sum(skipna=False)


def _traffic_by_axis(lines: pd.DataFrame) -> dict[str, str]:
    """Case -> bytes by axis, in words."""
    sizes = lines.groupby(["case", "axis"], observed=True, sort=True)["payload_bytes"].agg(_sum_known)
    texts: dict[str, str] = {}
    for row in sizes.reset_index().to_dict("records"):
        own = f"{row['axis']} {byte_size(row['payload_bytes'])}"
        texts[row["case"]] = f"{texts[row['case']]}, {own}" if row["case"] in texts else own
    return texts


def modes_table(frame: pd.DataFrame) -> Table:
    """The modes side by side, from `side_by_side`."""
    ratio = frame.assign(times_least=["-" if pd.isna(value) else f"{value:.2f}" for value in frame["least_ratio"]])
    return table(
        "Modes side by side",
        ratio,
        (str, "mode"),
        (count, "ranks"),
        (mark, "case: words"),
        (byte_size, " | ".join(f"{phase}: {phase}_bytes" for phase in PHASES if f"{phase}_bytes" in frame)),
        (byte_size, "payload: payload_bytes | expected: expected_payload_bytes | wire: wire_bytes"),
        (pair, "x least: times_least"),
        (byte_size, "saved: saved_bytes"),
        (milliseconds, "exposed ms: exposed_us"),
        (str, "payload by axis: axes"),
        note="one rank, the whole run; phases, payload and expected: bytes that calls hand over; wire: what the rank "
        "sends then (ring model); x least: wire beside the mode that sends least on as many ranks; saved: the most "
        "that autograd held; exposed: inside calls that are waited for at once, mean over ranks",
    )


WITH_MODE = ("mode", "data", "delivery", "embedding", "head")
"""Words that cases of one model may differ in along with the mode: the mode, and what it brings with it."""
_VARIES = (*WITH_MODE, "seq", "batch")
"""Words that the cases of one comparison may differ in: mode and tokens."""
_COLUMNS = ["mode", "tokens", "wire_bytes"]


def growth_of_bytes(run: Run, counted: str = "layers") -> pd.DataFrame:
    """mode, tokens, wire_bytes (in a micro-batch): the largest family of cases that differ in mode and tokens alone.

    Empty unless two modes were run at two sizes each and the run says how many tokens its cases have. Raises ValueError
    for another word than layers (without all-to-alls, embedding and head) or all.
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
    """mode, other, tokens, wire_bytes: where `mode`, which sends more at first, begins to send less.

    In every mode bytes are a constant plus a multiple of the tokens, so a straight line through a mode's points is
    exact for them. Lines that do not cross at one token or more give no row.
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
    """Where one mode begins to send less than another, from `compare_modes`."""
    return table(
        "Break-even",
        crossings,
        (str, "cheaper beyond T*: mode | than: other"),
        (whole, "T* (tokens): tokens"),
        (byte_size, "bytes there: wire_bytes"),
        (str, "counted"),
        note="wire bytes of one rank, a micro-batch; layers: without all-to-alls, embedding and head; all: everything",
    )


_HEADERS = ("module", "phase", "op", "axis", "bytes", "formula", "calls", "at", "why")


def calls_table(case: str, terms: Iterable[TermLike]) -> Table:
    """The terms of a case. Terms that differ only in their module or their count share a line."""
    modules: dict[tuple[str, ...], dict[str, None]] = {}
    calls: dict[tuple[str, ...], int | None] = {}
    for term in terms:
        line = _line_of_term(term)
        modules.setdefault(line, {})[term.region or ""] = None
        known = calls.get(line, 0)
        calls[line] = None if known is None or term.calls is None else known + term.calls
    rows = tuple(
        (_pattern_of_modules(names), *line[:-2], count(calls[line]), *line[-2:]) for line, names in modules.items()
    )
    at = _HEADERS.index("at")
    kept = [place for place in range(len(_HEADERS)) if place != at or any(row[at] for row in rows)]
    return Table(
        title=f"Calls of {case}" if case else "Calls of the default case",
        headers=tuple(_HEADERS[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in rows),
        numbers=frozenset(kept.index(_HEADERS.index(name)) for name in ("bytes", "calls")),
        note="as stated, not measured; bytes: payload of one call, formula: dtype and elements of it, in words of the "
        "case; calls: of one rank, the whole run",
    )


def _line_of_term(term: TermLike) -> tuple[str, ...]:
    """The words of a term, without its module and its count."""
    op = f"{term.op or NOTHING} {term.reduce_op if term.reduce_op not in ('sum', None) else ''}".strip()
    at = ", ".join(f"{axis} {place}" for axis, place in getattr(term, "at", {}).items())
    axis = term.axis if term.group_size is None else f"{term.axis or NOTHING}={term.group_size}"
    elements = getattr(term, "elements", "")
    formula = f"{term.dtype}[{elements}]" if elements else term.dtype
    words = (term.phase, op, axis, count(term.payload_bytes), formula, at, getattr(term, "why", ""))
    return tuple(NOTHING if value is None else str(value) for value in words)


def _pattern_of_modules(modules: Iterable[str]) -> str:
    """Dotted names as few patterns: "layers.*.attention.{wq,wk,wv}"."""
    leaves: dict[str, list[str]] = {}
    for name in dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", module) for module in modules):
        above, _, leaf = name.rpartition(".")
        leaves.setdefault(above, []).append(leaf)
    sets = {above: f"{{{','.join(names)}}}" if len(names) > 1 else names[0] for above, names in leaves.items()}
    return ", ".join(f"{above}.{leaf}" if above else leaf for above, leaf in sets.items()) or NOTHING


_TYPES = {"case": "str", "step": "int64", "module": "str", "expert": "int64", "rows": "int64"}
_MOST = 64
"""The most experts whose rows are written out."""


def expert_tables(folder: Path) -> list[Table]:
    """The table of experts, a row for every case and module; none if no case of the run has any."""
    if not (folder / "experts.csv").is_file():
        return []
    rows = csv_table(folder / "experts.csv", _TYPES, tuple(_TYPES), [])
    places = rows.groupby(["case", "module"], sort=False)
    frame = pd.DataFrame(
        [{**dict(zip(("case", "module"), key, strict=True)), **_sum_place(part)} for key, part in places]
    )
    columns = (str, "case | module"), (count, "rows"), (str, "by expert: by_expert | busiest")
    note = "tokens that go to each expert, of all ranks, micro-batches and steps; balance: the busiest over the mean"
    return [table("Rows of experts", frame, *columns, (three, "balance | worst step: worst"), note=note)]


def _sum_place(rows: pd.DataFrame) -> dict[str, object]:
    """The rows of one module, added up over steps."""
    every = rows.groupby("expert")["rows"].sum()
    steps = rows.groupby("step")["rows"]
    more = f" and {len(every) - _MOST} more" if len(every) > _MOST else ""
    return {
        "rows": every.sum(),
        "by_expert": " ".join(str(one) for one in every.head(_MOST)) + more,
        "busiest": str(every.idxmax()),
        "balance": every.max() / every.mean() if every.sum() else 1.0,
        "worst": (steps.max() / steps.mean()).max() if every.sum() else 1.0,
    }
