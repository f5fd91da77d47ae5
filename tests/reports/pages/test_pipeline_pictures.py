"""A pipeline that ran on real processes: its bubble beside the closed form, its picture, its track in the trace."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path

import pandas as pd
import pytest

from parallel.schedules.pipeline import Pipeline, orders
from parallel.schedules.timing import bubble_stated, timeline
from reports.commands.show import show_run
from reports.commands.trace import trace_events
from reports.pages import page
from reports.stored import stages
from reports.stored.frames import Run, load
from tests.reports import sample_run
from tests.reports.commands.test_trace import broken

SHAPE = Pipeline(schedule="1f1b", ranks=2, micro=5)


def spans_of(shape: Pipeline) -> pd.DataFrame:
    """The schedule at one millisecond a computation, and a call of 2 ms of which the rank computes half."""
    rows = [
        (sample_run.TP, rank, 2, str(span.action.kind), span.action.micro, span.action.chunk, start, end, -1)
        for rank, own in enumerate(timeline(shape, orders(shape)))
        for span in own
        for start, end in [(1000.0 * float(span.start), 1000.0 * float(span.end))]
    ]
    last = max(end for *_, end, _ in rows)
    rows.append((sample_run.TP, 1, 2, "all_reduce", 0, -1, last - 2000.0, last, 5))  # the last ms is rank 0's alone
    columns = ["case", "rank", "step", "kind", "micro", "chunk", "start_us", "end_us", "call_index"]
    return pd.DataFrame(rows, columns=columns)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = load(sample_run.write(tmp_path / "run"))
    cases = found.cases.assign(bubble_stated=[float(bubble_stated(SHAPE) or 0), math.nan])
    return dataclasses.replace(found, cases=cases, spans=spans_of(SHAPE))


def test_the_measured_bubble_of_equal_stages_and_no_messages_is_the_closed_form(run: Run) -> None:
    (row,) = stages.measured(run).to_dict("records")
    assert row["bubble"] == pytest.approx(1 / 6) and row["bubble_stated"] == pytest.approx(1 / 6)
    assert (row["ranks"], row["step"], row["calls_us"]) == (2, 2, 2000.0)
    waits = run.spans.assign(end_us=run.spans["end_us"].where(run.spans["kind"] != "F", run.spans["end_us"] - 500.0))
    assert stages.measured(dataclasses.replace(run, spans=waits))["bubble"].iloc[0] > 0.25


@pytest.mark.parametrize(("call", "overlapped"), [((0.0, 4000.0), 3000.0), ((0.0, 1000.0), 0.0)])
def test_what_is_overlapped_is_the_time_in_which_the_calls_own_rank_computes(
    run: Run, call: tuple[float, float], overlapped: float
) -> None:
    """Rank 1 begins with the second millisecond."""
    spans = run.spans[run.spans["call_index"] < 0]
    one = run.spans[run.spans["call_index"] >= 0].assign(start_us=call[0], end_us=call[1])
    assert stages.overlapped_us(pd.concat([spans, one])) == overlapped


def test_page_and_tables_show_it_and_a_run_without_one_shows_nothing(run: Run) -> None:
    html, text = page.render(run), io.StringIO()
    show_run(run, text)
    assert 'id="pipelines"' in html and f'aria-label="Last step of {sample_run.TP}"' in html
    assert text.getvalue().count("16.7%") == 2 and "all ranks shared" in text.getvalue()
    assert html.count(">16.7%<") == 2 and "call under way" in html
    bare = dataclasses.replace(run, spans=run.spans[:0])
    assert 'id="pipelines"' not in page.render(bare)


def test_the_trace_has_a_track_of_computations_and_the_time_between_them(run: Run) -> None:
    events = list(trace_events(run))
    assert broken({"traceEvents": events}) == []
    drawn = [event for event in events if event.get("cat") == "stage" and event["pid"] == 0]
    computed = [event["name"] for event in drawn if event["name"] != "waits"]
    order = [span.action for span in timeline(SHAPE, orders(SHAPE))[0]]
    assert computed == [f"{'forward' if a.kind == 'F' else 'backward'} {a.micro}" for a in order]
    waits = sum(event["dur"] for event in drawn if event["name"] == "waits")
    whole = drawn[-1]["ts"] + drawn[-1]["dur"] - drawn[0]["ts"]
    assert whole == pytest.approx(waits + 15_000.0) and waits > 0
