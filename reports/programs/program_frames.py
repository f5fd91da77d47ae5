"""The figures of a recorded program, or of traces, as frames by name: what the tables show and the page draws.

They include its speed, as tokens and bandwidth, and its step beside the case that describes it: calls and bytes of rank
0, in the median recorded step and in the closed form.
"""

import math
from collections import Counter
from collections.abc import Iterator

import pandas as pd

from shardproof.harness.dense_model import SUBJECT, read_case
from shardproof.harness.errors import ShardproofError
from shardproof.harness.protocols import CaseLike
from shardproof.harness.subject import named_axes, resolve_subject, state_terms
from shardproof.harness.terms import closed_forms
from shardproof.reports.programs import figures
from shardproof.reports.programs.figures import add_group_ranks, is_traced, steps_by_rank
from shardproof.reports.programs.unlike import list_unlike_steps, median_over_steps
from shardproof.reports.stored.frames import Run


def step_s(run: Run) -> float:
    """Seconds of a step: the median over steps of the slowest rank."""
    return float(steps_by_rank(run).groupby("step")["step_us"].max().median()) / 1e6


def tokens_per_second(run: Run) -> Iterator[tuple[str, str]]:
    """Names and amounts: tokens a second, if the recording was given their number."""
    took = step_s(run)
    if math.isnan(took) or not took:
        return
    if tokens := run.env.get("stated", {}).get("tokens"):
        yield "tokens a second", f"{tokens / took:,.0f}"
        yield "tokens a second and rank", f"{tokens / took / max(1, run.ledger['rank'].nunique()):,.0f}"


def bandwidth_by_size(run: Run) -> pd.DataFrame:
    """Bandwidth of calls of known duration.

    op, axis, group_size, payload_bytes (of traces), calls, wire_bytes, gb_s (wire bytes over the time inside the calls,
    waiting for late ranks included).
    """
    events = add_group_ranks(run)
    events = events[(events["duration_us"] > 0) & (events["wire_bytes"] > 0).fillna(False)]
    keys = ["op", "axis", "group_size", *(["payload_bytes"] if is_traced(run) else [])]
    sums = events.groupby(keys, observed=True).agg(
        calls=("op", "size"), wire_bytes=("wire_bytes", "sum"), us=("duration_us", "sum")
    )
    return sums.assign(gb_s=sums["wire_bytes"] / sums["us"] / 1e3).reset_index().drop(columns="us")


_Kind = tuple[str, int]
"""Op and size of the group, since a program's axes may have other names than the case's."""


def compare_with_case(run: Run) -> tuple[pd.DataFrame, str]:
    """op, group_size, calls, payload_bytes, predicted_calls, predicted_bytes; and why there are none, or "".

    Calls and bytes are those of rank 0 in the median recorded step, and in the closed form of the case.
    """
    text = str(run.env.get("stated", {}).get("case", ""))
    names = ["op", "group_size", "calls", "payload_bytes", "predicted_calls", "predicted_bytes"]
    if not text:
        return pd.DataFrame(columns=names), ""
    try:
        case = read_case(text)
        predicted = _stated_calls(case)
    except ShardproofError as problem:
        return pd.DataFrame(columns=names), f"case {text!r} is not compared: {problem}"
    recorded = _recorded_calls(run)
    nothing = (0.0, 0.0)
    rows = [
        (*kind, *(recorded.get(kind, nothing)), *(predicted.get(kind, nothing)))
        for kind in sorted({*recorded, *predicted})
        if recorded.get(kind, nothing)[0] or kind in predicted
    ]
    return pd.DataFrame(rows, columns=names), ""


def _stated_calls(case: CaseLike) -> dict[_Kind, tuple[float, float]]:
    subject, short = resolve_subject(SUBJECT).call, case.but(steps=1)
    form = closed_forms(state_terms(short, subject) or (), (0,), named_axes(short, subject))[0]
    calls: Counter[_Kind] = Counter()
    sent: Counter[_Kind] = Counter()
    for line, number in form.complete.items():
        if line.group_size == 1:
            continue
        calls[line.op, line.group_size] += number
        sent[line.op, line.group_size] += number * line.payload_bytes
    return {kind: (float(calls[kind]), float(sent[kind])) for kind in calls}


def _recorded_calls(run: Run) -> dict[_Kind, tuple[float, float]]:
    events = run.ledger[(run.ledger["rank"] == 0) & (run.ledger["group_size"] > 1)].astype({"op": "str"})
    number = max(1, events["step"].nunique())
    found = {}
    for kind, rows in events.groupby(["op", "group_size"], observed=True):
        op, size = (str(part) for part in kind) if isinstance(kind, tuple) else ("", "0")
        each = rows.groupby("step")["payload_bytes"]
        found[op, int(size)] = (median_over_steps(each.size(), number), median_over_steps(each.sum(), number))
    return found


def program_frames(run: Run) -> dict[str, pd.DataFrame]:
    """Frames by name.

    traffic    calls and bytes by phase, op and axis (`figures.program_traffic`; per_step: calls in the median step)
    bandwidth  gb_s by op, axis and, of traces, payload_bytes
    ranks      a row a rank: calls, late_us, latest (share of collectives in which it came last)
    device     a row a rank and step of a trace with kernels: device_us, compute_us, communication_us, exposed_us, share
    steps      a row a step: calls, payload_bytes of the rank that has most; unlike: whether its calls are not those of
               the most typical step
    largest    the three places with the largest payloads: op, axis, phase, region (module), caller (line)
    """
    return {
        "traffic": figures.program_traffic(run),
        "bandwidth": bandwidth_by_size(run),
        "ranks": figures.by_rank(run),
        "device": figures.device_steps(run),
        "steps": _measure_steps(run),
        "largest": figures.largest_payloads(run),
    }


def _measure_steps(run: Run) -> pd.DataFrame:
    events = run.ledger[run.ledger["step"] >= 0]
    by_rank = events.groupby(["step", "rank"]).agg(calls=("op", "size"), payload_bytes=("payload_bytes", figures.total))
    frame = by_rank.groupby("step").agg(calls=("calls", "max"), payload_bytes=("payload_bytes", figures.most))
    return frame.reset_index().assign(unlike=lambda rows: rows["step"].isin(list_unlike_steps(run)))
