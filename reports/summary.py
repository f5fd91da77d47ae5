"""What a run comes to: calls and bytes by mode, phase, op and axis beside the expectation, and one line a case.

Functions from a `Run` to frames; nothing is printed here. Calls and bytes are those of one rank over the whole run
(the maximum over ranks), as in `summary.csv`; several cases of a mode are added up. NA stands for "not expected by
anybody": a subject without a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

from reports.frames import Run, in_order

__all__ = ["apart", "bars", "headline", "overall", "traffic", "worst_first"]

RANKING = ("pass", "skip", "unknown", "fail")
"""Verdicts from good to bad; a case is as good as its worst check."""
_TRAFFIC = ("calls", "payload_bytes", "wire_bytes")
_EXPECTED = ("expected_calls", "expected_payload_bytes")
_COUNTING = ("ledger",)
"""Checks whose worst is a number of events and no error of a tensor."""
_MOST_BARS = 24


def worst_first(verdicts: pd.DataFrame) -> pd.DataFrame:
    """The verdicts, failures on top, then unknown ones; the order of the run within each."""
    return verdicts.sort_values("verdict", key=lambda words: -words.map(badness), kind="stable", ignore_index=True)


def overall(verdicts: pd.DataFrame) -> str:
    """The worst verdict of these; "unknown" when there is none, for a question not asked is not a pass."""
    words = [str(word) for word in verdicts["verdict"]]
    return max(words, key=badness, default="unknown")


def badness(verdict: str) -> int:
    """Place from good to bad; a word nobody knows is as bad as "unknown"."""
    return RANKING.index(verdict if verdict in RANKING else "unknown")


def headline(run: Run) -> pd.DataFrame:
    """One row a case, by mode and ranks.

    mode, ranks, case (its whole text), words (of it, without mode and data), forward_calls, backward_calls,
    payload_bytes, expected_payload_bytes (NA without expectation), saved_bytes (of the fullest rank; NA when nobody
    measured), worst_error and worst_allowed (of the check that came closest to its limit; NaN when nothing was
    measured), verdict.
    """
    lines = run.summary.groupby("case", sort=False)
    worst = worst_first(run.verdicts).drop_duplicates("case").set_index("case")["verdict"]
    closest = _closest(run.verdicts)
    case = run.cases["case"]
    columns = {
        "mode": run.cases["mode"],
        "ranks": run.cases["world_size"].astype("Int64"),
        "case": case,
        "words": case.map(lambda text: words_but(text, "mode", "data")),
        "forward_calls": case.map(_calls(run, "forward")).fillna(0).astype("Int64"),
        "backward_calls": case.map(_calls(run, "backward")).fillna(0).astype("Int64"),
        "payload_bytes": case.map(lines["payload_bytes"].sum()).fillna(0).astype("Int64"),
        "expected_payload_bytes": case.map(lines["expected_payload_bytes"].sum(min_count=1)).astype("Int64"),
        "saved_bytes": case.map(run.memory.groupby("case")["saved_bytes"].max()).astype("Int64"),
        "worst_error": case.map(closest["worst_error"]).astype("float64"),
        "worst_allowed": case.map(closest["worst_allowed"]).astype("float64"),
        "verdict": case.map(lambda text: worst.get(text, "unknown")).astype("str"),
    }
    return in_order(pd.DataFrame(columns)).sort_values(["mode", "ranks"], kind="stable", ignore_index=True)


def _calls(run: Run, phase: str) -> pd.Series[int]:
    lines = run.summary[run.summary["phase"] == phase]
    return lines.groupby("case", sort=False)["calls"].sum()


def words_but(case: str, *keys: str) -> str:
    """The words of a case's text without these keys."""
    return " ".join(word for word in case.split() if word.partition("=")[0] not in keys)


def apart(texts: Iterable[str]) -> tuple[str, list[str]]:
    """The words that all of several texts share, and what is left of each text without them."""
    words = [text.split() for text in texts]
    if len(words) < 2:
        return "", [" ".join(own) for own in words]
    shared = [word for word in words[0] if all(word in own for own in words)]
    return " ".join(shared), [" ".join(word for word in own if word not in shared) for own in words]


def _closest(verdicts: pd.DataFrame) -> pd.DataFrame:
    """By case, error and allowed error of the check that came closest to its limit, or went furthest beyond it."""
    measured = verdicts[~verdicts["check"].isin(_COUNTING)].dropna(subset=["worst_error", "worst_allowed"])
    error, allowed = measured["worst_error"], measured["worst_allowed"]
    # Exact checks allow 0: no error there is no news, any error is the worst news.
    exact = error.map({0.0: -1.0}).fillna(math.inf)
    share = (error / allowed.where(allowed > 0)).where(allowed > 0, exact)
    ranked = measured.assign(share=share).sort_values(["share", "worst_error"], ascending=False, kind="stable")
    return ranked.drop_duplicates("case").set_index("case")[["worst_error", "worst_allowed"]]


def traffic(run: Run, *more: str) -> pd.DataFrame:
    """Calls and bytes by mode, phase, op and axis beside the expectation, all cases of a mode added up.

    mode, phase, op, axis (and `more` columns of the summary, as "case"), cases, calls, expected_calls, payload_bytes,
    expected_payload_bytes, wire_bytes, agrees: "yes" when every case meets its expectation line by line, "no", or ""
    where nothing is expected. Sums could hide two errors that cancel; `agrees` cannot.
    """
    keys = [*more, "mode", "phase", "op", "axis"]
    lines = run.summary.assign(agrees=_agrees(run.summary))
    groups = lines.groupby(keys, observed=True, sort=True)
    sums = groups[list(_TRAFFIC)].sum()
    expected = groups[list(_EXPECTED)].sum(min_count=1)
    agrees = groups["agrees"].agg(lambda marks: next((mark for mark in ("no", "") if mark in set(marks)), "yes"))
    frame = sums.join(expected).assign(cases=groups["case"].nunique(), agrees=agrees).reset_index()
    order = ["cases", "calls", "expected_calls", "payload_bytes", "expected_payload_bytes", "wire_bytes", "agrees"]
    return frame[[*keys, *order]]


def _agrees(lines: pd.DataFrame) -> pd.Series[str]:
    """Per line of the summary: do calls and bytes meet the expectation, on every rank?"""
    same = lines["calls"].eq(lines["expected_calls"]) & lines["payload_bytes"].eq(lines["expected_payload_bytes"])
    for name in ("calls", "payload_bytes"):
        if f"min_{name}" in lines:
            same &= lines[f"min_{name}"].isna() | lines[f"min_{name}"].eq(lines[name])
    known = lines[list(_EXPECTED)].notna().all(axis=1)
    return same.fillna(False).map({True: "yes", False: "no"}).where(known, "").astype("str")


def bars(run: Run, by: str = "phase") -> pd.DataFrame:
    """Bytes to draw: label, phase (or op), payload_bytes. A bar is a case, or a mode's mean of too many cases."""
    lines = run.summary
    if lines["case"].nunique() <= _MOST_BARS:
        cases = list(lines["case"].unique())
        own = dict(zip(cases, apart(words_but(case, "mode", "data") for case in cases)[1], strict=True))
        label = (lines["mode"].astype("str") + "  " + lines["case"].map(own)).str.strip()
    else:
        label = lines["mode"].astype("str") + " (mean)"
    frame = lines.assign(label=label).sort_values("mode", kind="stable")
    of = frame.groupby("label", sort=False)["case"].nunique()
    total = frame.groupby(["label", by], observed=True, sort=False)["payload_bytes"].sum().reset_index()
    return total.assign(payload_bytes=total["payload_bytes"] / total["label"].map(of))
