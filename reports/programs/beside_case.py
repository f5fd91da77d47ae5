"""A recorded program beside the case that describes its layout: calls and bytes of rank 0 in a step, and its time."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from harness.cases import read_case
from harness.engines.shapes.dry import DryEngine
from harness.errors import ShardproofError
from harness.predicting.cluster_presets import PRESETS
from harness.predicting.clusters import read
from harness.predicting.forecast import forecast
from harness.protocols import CaseLike
from harness.subject import named, named_axes, stated
from harness.terms import closed_forms
from reports.programs.figures import median
from reports.programs.speed import step_s
from reports.stored.frames import Run

_SUBJECT = "parallel.subject:subject"
_Kind = tuple[str, int]
"""Op and ranks of the group: a program's axes may have other names than the case's."""


def beside(run: Run) -> tuple[pd.DataFrame, str]:
    """op, group_size, calls, predicted_calls, payload_bytes, predicted_bytes; and a sentence on time, or why not.

    Calls and bytes are those of rank 0 in the median recorded step, and in the closed form of the case.
    """
    text = str(run.env.get("stated", {}).get("case", ""))
    if not text:
        return pd.DataFrame(), ""
    try:
        case = read_case(text)
        predicted = _predicted(case)
        time = _time(run, case)
    except ShardproofError as problem:
        return pd.DataFrame(), f"case {text!r} is not compared: {problem}"
    recorded = _recorded(run)
    nothing = (0.0, 0.0)
    rows = [
        (*kind, *(recorded.get(kind, nothing)), *(predicted.get(kind, nothing)))
        for kind in sorted({*recorded, *predicted})
        if recorded.get(kind, nothing)[0] or kind in predicted
    ]
    names = ["op", "group_size", "calls", "payload_bytes", "predicted_calls", "predicted_bytes"]
    return pd.DataFrame(rows, columns=names), time


def _predicted(case: CaseLike) -> dict[_Kind, tuple[float, float]]:
    subject, short = named(_SUBJECT).call, case.but(steps=1)
    form = closed_forms(stated(short, subject) or (), (0,), named_axes(short, subject))[0]
    calls: Counter[_Kind] = Counter()
    sent: Counter[_Kind] = Counter()
    for line, number in form.complete.items():
        if line.group_size == 1:
            continue
        calls[line.op, line.group_size] += number
        sent[line.op, line.group_size] += number * line.payload_bytes
    return {kind: (float(calls[kind]), float(sent[kind])) for kind in calls}


def _recorded(run: Run) -> dict[_Kind, tuple[float, float]]:
    events = run.ledger[(run.ledger["rank"] == 0) & (run.ledger["group_size"] > 1)].astype({"op": "str"})
    number = max(1, events["step"].nunique())
    found = {}
    for kind, rows in events.groupby(["op", "group_size"], observed=True):
        op, size = (str(part) for part in kind) if isinstance(kind, tuple) else ("", "0")
        each = rows.groupby("step")["payload_bytes"]
        found[op, int(size)] = (median(each.size(), number), median(each.sum(), number))
    return found


def _time(run: Run, case: CaseLike) -> str:
    name = run.env.get("stated", {}).get("cluster")
    if not name:
        return "its time is predicted when the recording names its --cluster"
    with DryEngine() as engine:
        told = forecast(case, named(_SUBJECT).call, read(str(name), PRESETS), engine)
    took = step_s(run)
    return f"a step took {took:.4g} s, predicted {told.step_s:.4g} s on {name}: {took / told.step_s:.3g} times as long"
