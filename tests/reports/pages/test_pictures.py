"""Pictures of a page: bars, the map of a failure, pipelines; each figure read back, wrong ones found."""

import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from shardproof.harness.verdicts.facts import First, Worst, state_text
from shardproof.harness.verdicts.verdict import Verdict
from shardproof.parallel.communication.schedules import Pipeline, bubble_closed_form
from shardproof.reports.commands.show import show_run
from shardproof.reports.commands.trace import trace_events
from shardproof.reports.pages import drawings, page
from shardproof.reports.stored import failures, summary
from shardproof.reports.stored.frames import Run, load
from tests.parallel.schedules.laws import orders, timeline
from tests.reports import sample_run
from tests.reports.commands.test_trace import broken
from tests.reports.pages.page_figures import compared, map_flaws


def test_a_bar_is_one_case_and_as_long_as_its_bytes(folder: Path) -> None:
    html = page.render_page(load(folder))
    found = compared(html, folder)
    assert found.apart == [] and found.figures["bars"] == 1 + 2 * 2 + 4 * (3 + 1 + 2 + 1)
    assert 'aria-label="wire: forward 12 KiB, loss 4 KiB, backward 8 KiB"' in html
    wider = html.replace('width="50.000" height="10"', 'width="51.000" height="10"', 1)
    assert wider != html and "bar of forward of mode=tp tp=2: 0.000 51.000" in compared(wider, folder).apart[0]
    other = html.replace('data-value="8192.0">8 KiB</td>', 'data-value="8192.0">9 KiB</td>', 1)
    assert other != html and compared(other, folder).apart


def test_lines_put_failures_first_and_few_ranks_before_many(failing: Run) -> None:
    def lines(run: Run) -> Sequence[drawings.CaseBars]:
        return drawings.lines_of_cases(run, summary.headline(run))[0]

    assert [(line.verdict, line.mode) for line in lines(failing)] == [("fail", "tp"), ("pass", "tp-sp")]
    wide = dataclasses.replace(failing, cases=failing.cases.assign(world_size=[2, 4]), verdicts=failing.verdicts[:6])
    swapped = dataclasses.replace(wide, cases=wide.cases.assign(world_size=[4, 2], mode="tp"))
    assert [line.mode for line in lines(wide)] == ["tp", "tp-sp"]
    assert [(line.mode, line.begins) for line in lines(swapped)] == [("tp", False), ("tp", True)]
    assert [line.ranks for line in lines(swapped)] == ["2", "4"]


def test_a_failing_case_has_a_map_of_layers_by_phases_with_the_first_place_marked(failing: Run, html: str) -> None:
    cells, flaws = map_flaws(html, failing.path)
    assert flaws == [] and cells == 3 * (2 + 2), "three layers; forward and backward, then forward and step"
    assert '<td class="heat-3 first" title="grad/layers.0.mlp.w1.weight">1e7x first</td>' in html
    assert html.index('<section id="failures">') < html.index('<section id="cases">'), "the page opens with it"
    for there, planted in (
        ("heat-3 first", "heat-2 first"),
        (">1e7x first<", ">1e6x first<"),
        ('class="heat-4 later"', 'class="heat-ok later"'),
        (">inf<", ">ok<"),
        (" first</td>", "</td>"),
        ('<th scope="row">layers.0<', '<th scope="row">layers.1<'),
    ):
        assert html.count(there) == 1 and map_flaws(html.replace(there, planted), failing.path)[1], "a wrong cell"


def test_what_overflows_on_ranks_and_in_the_control_run_is_beyond_every_limit(failing: Run) -> None:
    """An infinite error beside an infinite limit: their ratio is no number."""
    path = failing.path / "errors.csv"
    errors = pd.read_csv(path, dtype="str", keep_default_na=False)
    ours = errors["phase"].eq("step")
    assert ours.any()
    errors.assign(error=errors["error"].mask(ours, "inf"), allowed=errors["allowed"].mask(ours, "inf")).to_csv(
        path, index=False
    )
    (drawn,) = failures.maps_of_cases(failing.path, {sample_run.TP}).values()
    assert {(cell.text, cell.heat) for _, cells in drawn.rows for cell in cells if cell.text == "inf"} == {("inf", "4")}
    over = failing.verdicts.assign(worst_error=math.inf, worst_allowed=math.inf)
    (told,) = [one for one in failing.records if one.verdict == "fail"]
    beyond = Worst(name="loss/0", error=math.inf, allowed=math.inf, epsilons=math.inf)
    assert len(failures.bugs_of_run([dataclasses.replace(told, worst=beyond)])) == 1
    headline = summary.headline(dataclasses.replace(failing, verdicts=over))
    assert drawings.lines_of_cases(failing, headline)[0][0].share == math.inf


def test_failures_with_one_first_place_are_one_block(failing: Run) -> None:
    told = failing.records[-1]
    assert told.failure is not None
    head = dataclasses.replace(told.failure, first=First(phase="forward", region="head", name="logits/0"))
    elsewhere = dataclasses.replace(told, failure=head)
    records = [told, elsewhere, dataclasses.replace(told, case=sample_run.TP_SP)]
    found = failures.group_by_place(records, failing.path, failing.ledger)
    assert [(group.place, len(group.cases), len(group.others)) for group in found] == [
        ("backward of layers.0.mlp in step 0", 2, 1),
        ("forward of head", 1, 0),
    ]
    html = page.render_page(sample_run.with_records(failing, [*failing.records, *[told] * 200]))
    assert "200 more failed checks with this first place" in html and "170 more stand in verdicts.jsonl" in html


def test_a_reason_that_leaves_checks_open_is_said_once_for_all_of_its_cases() -> None:
    def verdict(case: str, check: str, verdict: str, why: str) -> Verdict:
        return Verdict(case=case, check=check, verdict=verdict, facts=(state_text(why),))

    records = [
        *(verdict(f"tp={size}", "waits", "unknown", "no wait was seen") for size in range(2, 7)),
        verdict("tp=9", "waits", "unknown", "another reason"),
        verdict("tp=9", "update", "skip", "no optimizer"),
        verdict("tp=9", "loss", "pass", ""),
    ]
    assert [(one.title, one.lines) for one in failures.open_checks(reversed(records))] == [
        ("unknown (waits): tp=9", ("another reason",)),
        ("unknown (waits): tp=6; tp=5; tp=4 and 2 more", ("no wait was seen",)),
        ("skip: tp=9", ("no optimizer",)),
    ]


def test_times_of_ranks_that_take_turns_are_said_to_be_no_speed(failing: Run) -> None:
    for engine, said in (("inproc", True), ("pool", False)):
        run = dataclasses.replace(failing, env={"request": {"engine": engine}})
        assert ("Ranks take turns: no picture of speed" in page.render_page(run)) is said


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
def run(run: Run) -> Run:
    cases = run.cases.assign(bubble_stated=[float(bubble_closed_form(SHAPE) or 0), math.nan])
    return dataclasses.replace(run, cases=cases, spans=spans_of(SHAPE))


def test_the_measured_bubble_of_equal_stages_and_no_messages_is_the_closed_form(run: Run) -> None:
    (row,) = summary.measure_pipelines(run).to_dict("records")
    assert row["bubble"] == pytest.approx(1 / 6) and row["bubble_stated"] == pytest.approx(1 / 6)
    assert (row["ranks"], row["step"], row["calls_us"]) == (2, 2, 2000.0)
    waits = run.spans.assign(end_us=run.spans["end_us"].where(run.spans["kind"] != "F", run.spans["end_us"] - 500.0))
    assert summary.measure_pipelines(dataclasses.replace(run, spans=waits))["bubble"].iloc[0] > 0.25


def test_what_is_overlapped_is_the_time_in_which_the_calls_own_rank_computes(run: Run) -> None:
    """Rank 1 begins with the second millisecond."""
    spans = run.spans[run.spans["call_index"] < 0]
    for end_us, overlapped_us in ((4000.0, 3000.0), (1000.0, 0.0)):
        one = run.spans[run.spans["call_index"] >= 0].assign(start_us=0.0, end_us=end_us)
        assert summary.overlapped_us(pd.concat([spans, one])) == overlapped_us


def test_page_and_tables_show_it_and_a_run_without_one_shows_nothing(run: Run) -> None:
    html, text = page.render_page(run), io.StringIO()
    show_run(run, text)
    assert 'id="pipelines"' in html and f'aria-label="Last step of {sample_run.TP}"' in html
    assert text.getvalue().count("16.7%") == 2 and "all ranks shared" in text.getvalue()
    assert html.count(">16.7%<") == 2 and "call under way" in html
    bare = dataclasses.replace(run, spans=run.spans[:0])
    assert 'id="pipelines"' not in page.render_page(bare)


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
