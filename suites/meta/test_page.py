"""The page: self-contained, small, complete, and nothing that a run wrote can break out of it. Plots alike."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from reports import page, plots, summary
from reports.frames import Run, in_order, load
from suites.meta import sample_run

VOID = {"meta", "br", "hr", "img", "link", "input", "path", "use", "rect", "line", "circle"}


class Structure(HTMLParser):
    """Tags in order, ids, and whether every tag that opens also closes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.scripts = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the tag, its id and its links."""
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "srcset", "action", "data"):
                self.targets.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A tag that closes itself."""
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        """Only the tag opened last may close."""
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load(sample_run.write(tmp_path_factory.mktemp("page") / "run", failing=True))


@pytest.fixture(scope="module")
def html(failing: Run) -> str:
    return page.render(failing)


def test_nothing_is_loaded_from_outside(html: str) -> None:
    assert "http://" not in html
    assert "https://" not in html
    assert all(target.startswith("#") for target in Structure(html).targets)
    assert not re.search(r"@import|url\((?!#)", html)
    assert "<script" not in html


def test_every_tag_closes_and_ids_are_unique(html: str) -> None:
    structure = Structure(html)
    assert structure.open == []
    assert len(structure.ids) == len(set(structure.ids))


def test_links_inside_the_page_lead_somewhere(html: str) -> None:
    structure = Structure(html)
    assert {target[1:] for target in structure.targets} <= set(structure.ids)


def test_the_page_tells_the_whole_run(html: str) -> None:
    sections = {"cases", "failures", "traffic", "plots", "verdicts", "environment"}
    assert sections <= set(Structure(html).ids)
    assert "1 pass, 1 fail" in html
    assert "0.012 / 1e-09" in html
    assert "2.13.0" in html
    assert "logits/0 and 2 more" in html, "what nobody checked is said"
    for line in sample_run.MESSAGE.replace("<b>", "&lt;b&gt;").replace('"', "&#34;").splitlines():
        assert line in html, "all six lines"
    assert Structure(html).tags.count("table") == 1 + 2 + 2 + 1 + 1, "headline, 2 modes, 2 cases, verdicts, environment"


def test_the_page_of_a_passing_run_has_no_failures(tmp_path: Path) -> None:
    html = page.render(load(sample_run.write(tmp_path / "run")))
    assert "What went wrong" not in html
    assert "2 pass" in html


def test_nothing_a_run_wrote_becomes_markup(failing: Run) -> None:
    bomb = "</pre><script>alert(1)</script><img src=x onerror=y>"
    hostile = dataclasses.replace(
        failing,
        verdicts=failing.verdicts.assign(message=bomb, check=bomb, worst_name=bomb),
        env={bomb: bomb},
        notes=(bomb,),
        cases=failing.cases.assign(case=failing.cases["case"] + bomb),
        summary=failing.summary.assign(case=failing.summary["case"] + bomb),
    )
    html = page.render(hostile)
    assert "<script" not in html
    assert "<img" not in html
    assert Structure(html).open == []


def test_a_thousand_cases_stay_under_a_megabyte(failing: Run) -> None:
    def many(frame: pd.DataFrame) -> pd.DataFrame:
        return pd.concat([frame.assign(case=f"mode=tp tp=2 seed={seed}") for seed in range(600)], ignore_index=True)

    verdicts = many(failing.verdicts.assign(verdict="fail", message=sample_run.MESSAGE))
    big = dataclasses.replace(
        failing, cases=many(failing.cases), summary=many(failing.summary), verdicts=verdicts, ledger=failing.ledger
    )
    html = page.render(big)
    assert len(html.encode()) < 2**20
    assert "all of them stand in verdicts.jsonl" in html
    assert "more stand in verdicts.jsonl" in html


def test_a_run_killed_at_once_has_a_page_with_its_notes(tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text("{}")
    html = page.write(load(tmp_path), tmp_path / "report.html").read_text()
    assert "ledger.csv is missing" in html
    assert Structure(html).open == []


# Plots


def test_bars_are_one_a_label_and_one_colour_a_phase(failing: Run) -> None:
    svg = plots.traffic_bars(summary.bars(failing), "Bytes")
    assert svg.startswith("<svg role=")
    for label in (">tp<", "seq=64", "forward", "loss", "backward"):
        assert label in svg
    for phase in ("forward", "loss", "backward"):
        assert plots.PHASE_COLOURS[phase] in svg
    assert plots.PHASE_COLOURS["recompute"] not in svg
    assert "xmlns" not in svg and "currentColor" in svg


def test_bars_stand_on_each_other(failing: Run) -> None:
    one = failing.summary[failing.summary["case"] == sample_run.TP]
    svg = plots.traffic_bars(summary.bars(dataclasses.replace(failing, summary=one)), "Bytes")

    def span(phase: str) -> tuple[float, float]:
        path = max(re.findall(rf'<path d="([^"]*)"[^>]*fill: {plots.PHASE_COLOURS[phase]}', svg), key=len)
        across = [float(x) for x in re.findall(r"[ML] (\S+)", path)]
        return min(across), max(across)

    forward, loss, backward = span("forward"), span("loss"), span("backward")
    assert forward[1] == pytest.approx(loss[0], abs=0.01)
    assert loss[1] == pytest.approx(backward[0], abs=0.01)
    assert (forward[1] - forward[0]) / (loss[1] - loss[0]) == pytest.approx(3, rel=0.01), "three calls and one"


def test_equal_frames_give_equal_drawings(failing: Run) -> None:
    bars = summary.bars(failing)
    assert plots.traffic_bars(bars, "Bytes") == plots.traffic_bars(bars, "Bytes")


def test_every_crossing_is_marked_and_named() -> None:
    rows = [(mode, t, c + s * t) for mode, c, s in (("mtp", 0, 5), ("isp", 1e6, 1)) for t in (1000, 1000000)]
    growth = in_order(pd.DataFrame(rows, columns=["mode", "tokens", "wire_bytes"]))
    crossings = pd.DataFrame([("isp", "mtp", 250000.0, 1.25e6)], columns=["mode", "other", "tokens", "wire_bytes"])
    svg = plots.break_even(growth, crossings, 'a <title> & "more"')
    assert "T* = 250,000: isp below mtp" in svg
    assert 'aria-label="a &lt;title> &amp; &quot;more&quot;"' in svg
    assert "T*" not in plots.break_even(growth, crossings.iloc[:0], "none")
    assert Structure(svg).open == []


def test_a_run_with_growth_shows_break_even_in_table_and_plot(failing: Run) -> None:
    event = failing.ledger[failing.ledger["region"] == "layers.0.attention.wo"].head(1)
    cases, ledger = [], []
    for mode, constant, slope in (("mtp", 0, 50), ("isp", 10000, 10)):
        for tokens in (100, 400):
            text = f"mode={mode} tp=2 seq={tokens}"
            cases.append({"case": text, "mode": mode, "world_size": 2, "tokens": tokens, "micro": 1, "steps": 1})
            ledger.append(event.assign(case=text, wire_bytes=constant + slope * tokens))
    grown = dataclasses.replace(failing, cases=in_order(pd.DataFrame(cases)), ledger=pd.concat(ledger))
    html = page.render(grown)
    assert "T* = 250: isp below mtp" in html
    assert "cheaper beyond T*" in html
