"""The page: self-contained, small, complete, and nothing that a run wrote can break out of it. Plots alike."""

import dataclasses
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from shardproof.harness.verdicts.facts import First, Note, NoteKind, Worst, state_text
from shardproof.harness.verdicts.verdict import Verdict
from shardproof.reports.commands.cli import main
from shardproof.reports.pages import page, plots
from shardproof.reports.pages.comment import render_comment
from shardproof.reports.pages.drawings import build_tree, by_module, draw_timeline, last_micro_batch, lines_of_cases
from shardproof.reports.pages.opening import pairs_of_features
from shardproof.reports.stored.frames import Run, in_order, load
from shardproof.reports.stored.summary import headline
from tests.reports import sample_run
from tests.reports.stored.test_summary import grown

VOID = {"meta", "br", "hr", "img", "link", "input", "path", "use", "rect", "line", "circle"}
LINKS = {"src", "href", "srcset", "action", "data"}


class Structure(HTMLParser):
    """Ids, targets of links, and whether every tag that opens also closes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.targets += [value or "" for name, value in attrs if name in LINKS]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Only the tag opened last may close."""
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"


def test_nothing_is_loaded_from_outside(html: str) -> None:
    assert not re.search(r"https?://", html)
    assert all(target.startswith("#") for target in Structure(html).targets)
    assert not re.search(r"@import|url\((?!#)", html)
    assert html.count("<script") == 1, "our own, which the page does without"


def test_every_tag_closes_ids_are_unique_and_links_lead_to_them(html: str) -> None:
    structure = Structure(html)
    assert structure.open == []
    assert len(structure.ids) == len(set(structure.ids))
    assert {target[1:] for target in structure.targets} <= set(structure.ids)


def test_the_page_tells_the_whole_run(html: str) -> None:
    sections = {"cases", "failures", "traffic", "modules", "timelines", "verdicts", "environment"}
    assert sections <= set(Structure(html).ids)
    assert "1 pass, 1 fail" in html
    assert "0.012 / 1e-09" in html
    assert "2.13.0" in html
    assert "undecided: logits/0, logits/1, act/head" in html, "what nobody checked is said"
    for line in sample_run.MESSAGE.replace("<b>", "&lt;b&gt;").replace('"', "&#34;").splitlines():
        assert line in html, "all six lines"
    # a map, cases, traffic of 2 modes and of 2 cases, verdicts, environment
    assert len(re.findall("<table[ >]", html)) == 1 + 1 + 2 + 2 + 1 + 1
    assert len(re.findall("<h[1-6]", html)) <= 6
    assert "Proved for mode tp-sp on 2 ranks: 8 calls and 32 KiB of payload" not in html
    assert '<li class="is-fail"><b>1</b>failed</li>' in html and "<b>2 of 2</b>cases with the bytes expected" in html


def test_pages_of_a_passing_run_and_of_one_killed_at_once(run: Run, tmp_path: Path) -> None:
    html = page.render_page(run)
    assert "What went wrong" not in html and "2 pass" in html
    (tmp_path / "env.json").write_text('{"layout": 3}')
    html = page.write_page(load(tmp_path), tmp_path / "report.html").read_text()
    assert "ledger.csv is missing" in html
    assert Structure(html).open == []


def _exploding(verdict: Verdict, bomb: str) -> Verdict:
    """The verdict with this text in place of each of its own."""
    worst = Worst(name=bomb, error=1.0, allowed=0.0, epsilons=1.0)
    notes = (Note(kind=NoteKind.UNDECIDED, names=(bomb,), reason=bomb),)
    failure = verdict.failure and dataclasses.replace(
        verdict.failure, first=First(phase="forward", region=bomb, name=bomb, event=bomb), repeat=bomb
    )
    return dataclasses.replace(
        verdict, check=bomb, facts=(state_text(bomb),), worst=worst, notes=notes, failure=failure
    )


def test_nothing_a_run_wrote_becomes_markup(failing: Run) -> None:
    bomb = "</pre><script>alert(1)</script><img src=x onerror=y>"
    named: dict[str, Any] = {"cases": failing.cases, "summary": failing.summary}
    hostile = dataclasses.replace(
        sample_run.with_records(failing, [_exploding(one, bomb) for one in failing.records]),
        env={bomb: bomb},
        notes=(bomb,),
        **{name: frame.assign(case=frame["case"] + bomb) for name, frame in named.items()},
    )
    html = page.render_page(hostile)
    assert html.count("<script") == 1 and bomb not in html
    assert "<img" not in html
    assert Structure(html).open == []


def test_a_thousand_cases_stay_under_two_megabytes(failing: Run) -> None:
    def many(frame: pd.DataFrame) -> pd.DataFrame:
        return pd.concat([frame.assign(case=f"mode=tp tp=2 seed={seed}") for seed in range(1000)], ignore_index=True)

    told = failing.records[-1]
    records = [dataclasses.replace(told, case=f"mode=tp tp=2 seed={seed}") for seed in range(1000) for _ in range(7)]
    big: dict[str, Any] = {"cases": many(failing.cases), "summary": many(failing.summary)}
    html = page.render_page(sample_run.with_records(dataclasses.replace(failing, **big), records))
    assert len(html.encode()) <= 2_000_000
    assert "all of them stand in verdicts.jsonl" in html
    assert "more stand in verdicts.jsonl" in html


# Modules, timeline, kill matrix


def test_modules_unfold_and_add_up(failing: Run) -> None:
    modules = by_module(failing)
    (outside, layer) = sorted(
        build_tree(modules[modules["mode"] == "tp"]), key=lambda node: node.name != "outside modules"
    )
    assert (outside.name, outside.calls, outside.other_bytes) == ("outside modules", 1, 4096)
    assert (layer.name, layer.calls, layer.payload_bytes) == ("layers.0", 5, 5 * 4096)
    assert [(part.name, part.calls) for part in layer.parts] == [("attention.wo", 3), ("mlp.w1", 2)]
    assert (layer.forward_bytes, layer.backward_bytes, layer.other_bytes) == (3 * 4096, 2 * 4096, 0)


def test_many_layers_are_one() -> None:
    rows = [("tp", "forward", f"layers.{n}.mlp.{w}", 1, 8) for n in range(100) for w in ("w1", "w2")]
    (node,) = build_tree(pd.DataFrame(rows, columns=["mode", "phase", "region", "calls", "payload_bytes"]))
    assert (node.name, node.calls, node.payload_bytes) == ("layers.*.mlp", 200, 1600)
    assert [part.name for part in node.parts] == ["w1", "w2"]


def test_the_timeline_draws_and_names_every_call_of_the_last_micro_batch(failing: Run) -> None:
    calls = last_micro_batch(failing.ledger[failing.ledger["case"] == sample_run.TP])
    svg = draw_timeline(calls, "a <b>")
    assert sum(path.count("z") for path in re.findall(r'd="([^"]*)"', svg)) == len(calls) == 12
    assert "rank 0" in svg and "rank 1" in svg and "a &lt;b&gt;: 12 calls on 2 ranks in 0.512 ms" in svg
    assert "<title>forward: all_reduce, 4,096 bytes, layers.0.attention.wo</title>" in svg, "under the pointer"
    assert "<title>loss: all_reduce, 4,096 bytes, outside modules</title>" in svg
    assert Structure(svg).open == []
    assert draw_timeline(calls.iloc[:0], "none") == ""


def test_a_kill_matrix_is_shown_when_it_is_there(folder: Path) -> None:
    columns = "name,kind,stands_for,mode,phase,region,killed_by,killed,equivalent,seconds,region_right,cause_right"
    rows = "drop,fault,issue 1,tp,forward,layers.0,ledger forward,True,False,1.0,True,True\n"
    rows += "late,fault,issue 2,tp,backward,layers.1,,False,False,1.0,,\n"
    (folder / "kill_matrix.csv").write_text(f"{columns}\n{rows}")
    html = page.render_page(load(folder))
    assert "1 of 2 planted bugs were noticed" in html
    assert html.index(">late<") < html.index(">drop<"), "what survived comes first"


def test_a_comment_has_the_verdict_the_failures_and_the_table(failing: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["page", str(failing.path), "--markdown"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("## shardproof: fail\n\n2 cases: 1 pass, 1 fail")
    assert f"```text\n{sample_run.MESSAGE}" in told and "| mode | ranks |" in told and "**1** failed" in told
    bomb = "```\n# not a title"
    hostile = sample_run.with_records(failing, [_exploding(one, bomb) for one in failing.records])
    assert render_comment(hostile).count("```") == 2 * render_comment(hostile).count("```text")


def test_a_margin_is_a_way_to_the_limit_by_powers_of_ten(failing: Run) -> None:
    def margin(error: float) -> str:
        told = failing.verdicts.assign(worst_error=error, worst_allowed=1e-9)
        run = dataclasses.replace(failing, verdicts=told)
        return str(lines_of_cases(run, headline(run))[0][0].margin)

    for error, width in ((1e-9, "100.0"), (2e-9, "100.0"), (1e-12, "50.0"), (1e-16, "0.0"), (0.0, "0.0")):
        assert f'width="{width}"' in margin(error)
    assert margin(1e-9) != margin(2e-9), "the other colour"


def test_the_first_call_of_a_wrong_place_has_its_line_of_source(failing: Run, tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text("import torch\n\ny = all_reduce(x, axis)\n")
    told = failing.records[-1]
    assert told.failure is not None
    first = First(phase="backward", region="layers.0.mlp.w1", step=0, name="act_grad/x")
    told = dataclasses.replace(told, failure=dataclasses.replace(told.failure, first=first))
    ledger = failing.ledger.assign(caller=f"{source}:3")
    html = page.render_page(sample_run.with_records(dataclasses.replace(failing, ledger=ledger), [told]))
    assert f"First call there: <code>{source}:3: y = all_reduce(x, axis)</code>" in html


def test_pairs_of_features_are_counted_in_passed_cases_alone() -> None:
    features = {"a": ["mode=tp", "context"], "b": ["mode=tp", "context", "pipeline"], "c": ["mode=isp", "packing"]}
    table = pairs_of_features([("a", "pass"), ("b", "pass"), ("c", "fail")], features.__getitem__)
    assert table and table.headers == ("feature", "context", "pipeline")
    assert table.rows == (("context", "2", "1"), ("pipeline", "1", "1"), ("mode=tp", "2", "1"))
    assert pairs_of_features([("c", "fail")], features.__getitem__) is None


# Everybody can read it


def test_tables_and_drawings_have_names_and_headers(html: str) -> None:
    assert html.count('role="region" tabindex="0" aria-label="') == len(re.findall("<table[ >]", html))
    assert 'aria-label=""' not in html
    assert not re.search(r"<th(?! scope)[ >]", html)
    assert html.count("<svg") == html.count('<svg role="img" aria-label="')
    levels = [int(level) for level in re.findall(r"<h([1-6])", html)]
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels)), "no level is left out"


def test_colours_can_be_told_from_the_paper(html: str) -> None:
    light, dark = re.findall(r":root \{(.*?)\}", html, re.DOTALL)[:2]
    for scheme in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
        for name in ("ink", "quiet", "good", "bad", "open", "focus"):
            for ground in ("paper", "band"):
                assert contrast(colours[name], colours[ground]) >= 4.5, f"{name} on {ground}"
        for heat in ("ok", "1", "2", "3", "4"):
            assert contrast(colours["ink"], colours[f"heat-{heat}"]) >= 4.5, f"a cell's text on heat-{heat}"


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast of two colours."""

    def light(colour: str) -> float:
        parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, lighter = sorted((light(one), light(other)))
    return (lighter + 0.05) / (darker + 0.05)


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
    """By hand: isp sends 10,000 bytes and 10 a token, mtp 50 a token."""
    html = page.render_page(grown(failing, {"mtp": {100: 5000, 400: 20000}, "isp": {100: 11000, 400: 14000}}))
    assert "T* = 250: isp below mtp" in html
    assert "cheaper beyond T*" in html


def test_a_page_is_written_where_no_compiled_template_can_be_stored(
    failing: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "missing"):
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        assert page.render_page(failing).startswith("<!doctype html>")
