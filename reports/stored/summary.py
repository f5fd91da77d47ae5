"""Sums of a run: calls and bytes by mode, phase, op and axis beside the expectation, a line a case, pipelines.

Functions from a `Run` to frames; nothing is printed here. Calls and bytes are those of one rank over the whole run (the
maximum over ranks), as in `summary.csv`. Several cases of a mode on as many ranks are added up. NA stands for "without
expectation": a subject without a closed form, or with one that leaves out phase, op, axis or numbers. A pipeline is
measured where ranks are real processes, not where they take turns. Times are microseconds.
"""

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from shardproof.harness.ledger import NO_PHASE
from shardproof.harness.verdicts.sentences.formats import join_names
from shardproof.harness.verdicts.verdict import UNKNOWN, Verdict
from shardproof.reports.stored.frames import Run, in_order
from shardproof.reports.stored.unchecked import by_case, decided_words, fields_left_out

RANKING = ("pass", "skip", "unknown", "fail")
"""Verdicts from good to bad. A case has the verdict of its worst check."""
_TRAFFIC = ("calls", "payload_bytes", "wire_bytes")
_EXPECTED = ("expected_calls", "expected_payload_bytes")
_COUNTING = ("ledger",)
"""Checks whose worst item is a number of events, and no error of a tensor."""


def worst_first(verdicts: pd.DataFrame) -> pd.DataFrame:
    """The verdicts, failures on top, then unknown ones; the order of the run within each."""
    return verdicts.sort_values("verdict", key=lambda words: -words.map(badness_of), kind="stable", ignore_index=True)


def worst_verdict(verdicts: pd.DataFrame) -> str:
    """The worst verdict of these; "unknown" without any, since an unchecked case is no pass."""
    words = [str(word) for word in verdicts["verdict"]]
    return max(words, key=badness_of, default="unknown")


def badness_of(verdict: str) -> int:
    """The place of a verdict from good to bad; an unknown word is as bad as "unknown"."""
    return RANKING.index(verdict if verdict in RANKING else "unknown")


def headline(run: Run) -> pd.DataFrame:
    """Rows of cases, by mode and ranks.

    mode, ranks, case (its whole text), words (of it, without mode and data), forward_calls, backward_calls,
    unplaced_calls (of which no phase is known). payload_bytes, expected_payload_bytes (NA without expectation), stated
    ("as stated" where the calls meet a closed form that leaves fields out, else ""). saved_bytes (of the fullest rank;
    NA when not measured). worst_error and worst_allowed (of the check that came closest to its limit, in a case that
    fails among its failed checks; NaN when nothing was measured), dtype ("" where it is not known). decided and tensors
    (how many were found right or wrong, of how many; NA when not counted), verdict, against (what its tensors were held
    against, in words).
    """
    lines = run.summary.groupby("case", sort=False)
    worst = worst_first(run.verdicts).drop_duplicates("case").set_index("case")["verdict"]
    stated = _partly_stated(run)
    closest, decided = _closest_to_limit(run.verdicts), by_case(run.records)
    case = run.cases["case"]
    columns = {
        "mode": run.cases["mode"],
        "ranks": run.cases["world_size"].astype("Int64"),
        "case": case,
        "words": case.map(lambda text: words_but(text, "mode", "data")),
        "forward_calls": case.map(_count_calls(run, "forward")).fillna(0).astype("Int64"),
        "backward_calls": case.map(_count_calls(run, "backward")).fillna(0).astype("Int64"),
        "unplaced_calls": case.map(_count_unplaced(run)).fillna(0).astype("Int64"),
        "payload_bytes": case.map(lines["payload_bytes"].sum()).fillna(0).astype("Int64"),
        "expected_payload_bytes": case.map(lines["expected_payload_bytes"].agg(_known_sum)).astype("Int64"),
        "stated": [stated.get(text, "") for text in case],
        "saved_bytes": case.map(run.memory.groupby("case")["saved_bytes"].max()).astype("Int64"),
        "worst_error": case.map(closest["worst_error"]).astype("float64"),
        "worst_allowed": case.map(closest["worst_allowed"]).astype("float64"),
        "dtype": [one if isinstance(one, str) else "" for one in run.cases.get("dtype", [""] * len(case))],
        "decided": case.map(decided["decided"]).astype("Int64"),
        "tensors": case.map(decided["tensors"]).astype("Int64"),
        "verdict": case.map(lambda text: worst.get(text, "unknown")).astype("str"),
        "against": [_held_against(run)] * len(case),
    }
    return in_order(pd.DataFrame(columns)).sort_values(["mode", "ranks"], kind="stable", ignore_index=True)


LAUNCH = "launch A"
"""What the second of two launches is compared with; no calls are recorded then."""


def _held_against(run: Run) -> str:
    request = run.env.get("request", {})
    truth = str(request.get("truth", ""))
    if request.get("engine") in ("launches", "recordings"):
        return LAUNCH
    if not truth.startswith(("itself on", "the subject ")):
        return "the dense model"
    return truth.partition(",")[0].replace("itself", "the subject", 1)


def _partly_stated(run: Run) -> dict[str, str]:
    """Case -> "as stated", if its calls meet a closed form that leaves fields out."""
    return {one.case: "as stated" for one in run.records for _ in fields_left_out(one)}


def tally_of_run(headline: pd.DataFrame, records: Sequence[Verdict]) -> str:
    """The run in one line, from `headline`: cases by verdict, those that did not run, and how many tensors are decided.

    "3 cases: 2 pass, 1 fail, 0 unknown, 0 skip; all 129 tensors decided". Checks that are unknown in failed cases are
    named.
    """
    ran = headline[headline["case"].isin([one.case for one in records])]
    counts = ran["verdict"].value_counts()
    counted = [f"{int(counts.get(word, 0))} {word}" for word in ("pass", "fail", "unknown", "skip")]
    counted += [f"{len(headline) - len(ran)} not run"] if len(ran) < len(headline) else []
    decided, none = decided_words(records), int(ran["tensors"].isna().sum())
    decided += f" ({none} case{'s' * (none != 1)} left none to decide)" if decided and none else ""
    parts = [f"{len(headline)} case{'s' if len(headline) != 1 else ''}: {', '.join(counted)}"]
    parts += [_open_beside_failures(ran, records), decided]
    return "; ".join(filter(None, parts))


def _open_beside_failures(ran: pd.DataFrame, records: Sequence[Verdict]) -> str:
    """The checks that are unknown in failed cases, which are counted as failed; "" without any."""
    failed = set(ran.loc[ran["verdict"].eq("fail"), "case"])
    found = [one for one in records if one.case in failed and one.verdict == UNKNOWN]
    checks, cases = [*dict.fromkeys(one.check for one in found)], len({one.case for one in found})
    verb, many = "are" if len(checks) > 1 else "is", f" in {cases} of these" if cases < len(failed) else ""
    return f"{join_names(checks)} {verb} unknown beside the failure{'s' * (cases > 1)}{many}" if checks else ""


def group_headline(headline: pd.DataFrame) -> pd.DataFrame:
    """Rows for all cases of a mode on as many ranks, from `headline`.

    mode, ranks, cases, least_ and most_ of forward_calls, backward_calls, unplaced_calls and payload_bytes, expected
    (how many cases have an expectation), as_expected (how many meet its bytes). saved_bytes (the most), worst_error and
    worst_allowed (of the case that came closest to its limit), its dtype, verdict (the worst), alike (how many cases
    have it).
    """
    rows = []
    for (mode, ranks), own in headline.groupby(["mode", "ranks"], sort=False, observed=True, dropna=False):
        counts = own[["forward_calls", "backward_calls", "unplaced_calls", "payload_bytes"]]
        verdict = max(own["verdict"], key=badness_of)
        closest = own.assign(share=_share_of_limit(own["worst_error"], own["worst_allowed"]))
        worst = closest.sort_values(["share", "worst_error"], ascending=False, kind="stable").iloc[0]
        rows.append(
            {"mode": mode, "ranks": ranks, "cases": len(own)}
            | {f"least_{name}": least for name, least in counts.min().items()}
            | {f"most_{name}": most for name, most in counts.max().items()}
            | {
                "expected": int((own["expected_payload_bytes"].notna() | own["stated"].ne("")).sum()),
                "as_expected": int(
                    (own["payload_bytes"].eq(own["expected_payload_bytes"]).fillna(False) | own["stated"].ne("")).sum()
                ),
                "saved_bytes": own["saved_bytes"].max(),
                "worst_error": worst["worst_error"],
                "worst_allowed": worst["worst_allowed"],
                "dtype": worst["dtype"],
                "verdict": verdict,
                "alike": int((own["verdict"] == verdict).sum()),
            }
        )
    return pd.DataFrame(rows)


def _known_sum(numbers: "pd.Series[int]") -> int | None:
    """Their sum; None if one of them is not known."""
    return None if numbers.isna().any() or numbers.empty else int(numbers.sum())


def _count_unplaced(run: Run) -> "pd.Series[int]":
    """By case, the number of calls without a phase, which are counted as data; the check ledger reports them."""
    doubtful = {one.case for one in run.records for note in one.notes if note.reason == NO_PHASE}
    calls = _count_calls(run, "data")
    return calls[calls.index.isin(doubtful)]


def _count_calls(run: Run, phase: str) -> "pd.Series[int]":
    lines = run.summary[run.summary["phase"] == phase]
    return lines.groupby("case", sort=False)["calls"].sum()


def words_but(case: str, *keys: str) -> str:
    """The words of a case's text without these keys."""
    return " ".join(word for word in case.split() if word.partition("=")[0] not in keys)


def split_common_words(texts: Iterable[str]) -> tuple[str, list[str]]:
    """The words that all of several texts have in common, and the rest of each text."""
    words = [text.split() for text in texts]
    if len(words) < 2:
        return "", [" ".join(own) for own in words]
    shared = [word for word in words[0] if all(word in own for own in words)]
    return " ".join(shared), [" ".join(word for word in own if word not in shared) for own in words]


def _closest_to_limit(verdicts: pd.DataFrame) -> pd.DataFrame:
    """By case, error and limit of the check that came closest to its limit, or went furthest beyond it.

    For a case that fails, only failed checks count, since a small error beside a large limit would look right. Among
    these, checks with a limit above 0 come first: replicas, for which nothing is allowed, may differ by rounding alone.
    """
    fails = verdicts["verdict"].eq("fail")
    verdicts = verdicts[fails | ~verdicts["case"].isin(verdicts.loc[fails, "case"])]
    measured = verdicts[~verdicts["check"].isin(_COUNTING)].dropna(subset=["worst_error", "worst_allowed"])
    share = _share_of_limit(measured["worst_error"], measured["worst_allowed"])
    rank = (measured["verdict"].eq("fail") & measured["worst_allowed"].gt(0) & share.gt(1)).astype("int64")
    ranked = measured.assign(share=share, rank=rank)
    ranked = ranked.sort_values(["rank", "share", "worst_error"], ascending=False, kind="stable")
    return ranked.drop_duplicates("case").set_index("case")[["worst_error", "worst_allowed"]]


def _share_of_limit(error: "pd.Series[float]", allowed: "pd.Series[float]") -> "pd.Series[float]":
    """The error in units of its limit. For exact checks, which allow 0, no error ranks last and any error first."""
    exact = error.map({0.0: -1.0}).fillna(math.inf)
    return (error / allowed.where(allowed > 0)).where(allowed > 0, exact).where(error.notna())


def traffic(run: Run, *more: str) -> pd.DataFrame:
    """Calls and bytes by mode, ranks, phase, op and axis beside the expectation, added up over cases.

    mode, ranks, phase, op, axis (and `more` columns of the summary, as "case"), cases, calls, expected_calls,
    payload_bytes, expected_payload_bytes, wire_bytes, agrees. `agrees` is "yes" when every rank of every case meets its
    own expectation line by line, else "no", or "" if one is missing. Sums may hide errors that cancel, `agrees` cannot.
    """
    keys = [*more, "mode", "ranks", "phase", "op", "axis"]
    ranks = run.summary["case"].map(dict(zip(run.cases["case"], run.cases["world_size"], strict=True)))
    lines = run.summary.assign(agrees=_agrees_with_expectation(run.summary), ranks=ranks.fillna(0).astype("int64"))
    groups = lines.groupby(keys, observed=True, sort=True)
    sums = groups[list(_TRAFFIC)].sum()
    expected = groups[list(_EXPECTED)].agg(_known_sum).astype("Int64")
    agrees = groups["agrees"].agg(lambda marks: next((mark for mark in ("no", "") if mark in set(marks)), "yes"))
    frame = sums.join(expected).assign(cases=groups["case"].nunique(), agrees=agrees).reset_index()
    order = ["cases", "calls", "expected_calls", "payload_bytes", "expected_payload_bytes", "wire_bytes", "agrees"]
    return frame[[*keys, *order]]


def _agrees_with_expectation(lines: pd.DataFrame) -> "pd.Series[str]":
    """For each line of the summary, whether calls and bytes of every rank are those expected of that rank."""
    # Filled where ranks differ.
    apart = lines.get("ranks_apart", pd.Series(pd.NA, index=lines.index, dtype="Int64"))
    alike = lines["calls"].eq(lines["expected_calls"]) & lines["payload_bytes"].eq(lines["expected_payload_bytes"])
    same = apart.eq(0).where(apart.notna(), alike)
    known = lines[list(_EXPECTED)].notna().all(axis=1)
    return same.fillna(False).map({True: "yes", False: "no"}).where(known, "").astype("str")


_COMPUTED = ("F", "B")


def cores_of_machine(run: Run) -> str:
    """The number of cores of the run's machine."""
    return str(run.env.get("machine", {}).get("cores") or "an unknown number of")


def last_steps(run: Run) -> dict[str, pd.DataFrame]:
    """Case -> the spans of its last step (Run.spans), by rank and start."""
    spans = run.spans
    last = spans[spans["step"] == spans.groupby("case")["step"].transform("max")]
    ordered = last.sort_values(["rank", "start_us"], kind="stable")
    return {str(case): own.reset_index(drop=True) for case, own in ordered.groupby("case", sort=False)}


def measure_pipelines(run: Run) -> pd.DataFrame:
    """A row for every pipeline: case, ranks, step, step_us, bubble, bubble_stated, calls_us, overlapped_us.

    step_us is from the first forward to the last backward, `bubble` the share of all ranks' time in it in which they
    compute nothing. `bubble_stated` is its closed form (missing: none is known). calls_us is how long asynchronous
    calls were under way until their ranks waited for them, overlapped_us the part of it in which the rank computed.
    """
    stated = pd.to_numeric(run.cases.set_index("case").reindex(columns=["bubble_stated"])["bubble_stated"])
    rows = []
    for case, spans in last_steps(run).items():
        lasted_us, is_computed = spans["end_us"] - spans["start_us"], spans["kind"].isin(_COMPUTED)
        computed = spans[is_computed]
        whole_us = float(computed["end_us"].max() - computed["start_us"].min())
        ranks = computed["rank"].nunique()
        bubble = 1 - float(lasted_us[is_computed].sum()) / (ranks * whole_us)
        share = bubble, float(stated.get(case, math.nan))
        calls_us = float(lasted_us[~is_computed].sum())
        rows.append((case, ranks, int(spans["step"].iloc[0]), whole_us, *share, calls_us, overlapped_us(spans)))
    columns = ["case", "ranks", "step", "step_us", "bubble", "bubble_stated", "calls_us", "overlapped_us"]
    return pd.DataFrame(rows, columns=columns)


def overlapped_us(spans: pd.DataFrame) -> float:
    """How long calls of these spans were in progress while their own rank computed, added up over calls."""
    found = 0.0
    for _, own in spans.groupby("rank"):
        times = own[["start_us", "end_us"]].set_axis(own["kind"].isin(_COMPUTED))
        computed, calls = (list(times[times.index == kind].itertuples(index=False)) for kind in (True, False))
        found += sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in calls for b in computed)
    return found
