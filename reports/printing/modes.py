"""Modes against each other within one run: bytes, phases, axes, memory.

Bytes and calls are those of the busiest rank over the whole run of a case, as in `summary.csv`; times are microseconds.
"""

import pandas as pd

from shardproof.harness.ledger import PHASES
from shardproof.reports.printing.text_tables import Table, byte_size, count, mark, milliseconds, pair, table
from shardproof.reports.stored.frames import Run, in_order
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
    # Of traces some bytes are not known, and then neither is their sum.
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
