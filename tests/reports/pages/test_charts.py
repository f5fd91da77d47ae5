"""Charts: modes on one model, both sides of a comparison; the page and the comment of a comparison; what was proved."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from shardproof.reports.comparing.comparison import compare
from shardproof.reports.comparing.snapshot import read_side
from shardproof.reports.pages import page
from shardproof.reports.pages.charts import chart_comparison, chart_models
from shardproof.reports.pages.comparison_page import render_comparison, render_comparison_comment
from shardproof.reports.pages.opening import describe_proof
from shardproof.reports.stored.frames import Run, load
from shardproof.reports.stored.summary import headline
from tests.harness.command_line import CommandLine
from tests.reports import sample_run
from tests.reports.pages.test_page import Structure


@pytest.fixture
def one_model(folder: Path) -> Run:
    """The sample run with both of its modes on one model."""
    for file in folder.iterdir():
        file.write_text(file.read_text().replace(" seq=64", ""))
    return load(folder)


def test_modes_on_one_model_stand_beside_each_other_and_others_do_not(one_model: Run, failing: Run) -> None:
    """By hand: tp sends 6 all-reduces of 4 KiB, tp-sp 8 halves of 4 KiB; two ranks, the fuller of which saves 8 KiB."""
    (chart,) = chart_models(one_model)
    assert (chart.title, chart.headers[1:]) == ("tp=2, 2 ranks", ("bytes sent by phase", "calls", "memory saved"))
    assert [(mode, *(cell.text for cell in cells)) for mode, cells in chart.rows] == [
        ("tp", "24 KiB", "6", "8 KiB"),
        ("tp-sp", "16 KiB", "8", "8 KiB"),
    ]
    sent = [re.findall(r'width="([\d.]+)"', str(cells[0].bar)) for _, cells in chart.rows]
    assert sent == [["50.000", "16.667", "33.333"], ["33.333", "33.333"]], "one scale, a part a phase"
    html = page.render_page(one_model)
    assert html.index('<section id="modes">') < html.index('<section id="cases">') and "24 KiB<svg" in html
    assert chart_models(failing) == [] and '<section id="modes">' not in page.render_page(failing)


def test_the_first_sentence_says_what_is_proved_and_how_much_is_not(run: Run, failing: Run) -> None:
    counted = [dataclasses.replace(one, decided={"grad": (3, 3)}) for one in run.records if one.check == "gradients"]
    told = sample_run.with_records(run, counted)
    cases = told.cases.assign(dtype="float64")
    assert describe_proof(dataclasses.replace(told, cases=cases), headline(told)) == (
        "Proved for modes tp, tp-sp on 2 ranks in float64: 6 tensors equal those of the dense model within rounding; "
        "all 14 calls and 56 KiB of payload that one rank issues are those of the closed form."
    )
    partly = describe_proof(failing, headline(failing))
    assert partly.startswith("Proved for mode tp-sp on 2 ranks: all 8 calls and 32 KiB of payload")
    assert partly.endswith("Not proved: 1 of 2 cases.")
    assert '<p class="proof">Proved for mode tp-sp' in page.render_page(failing)
    alone = headline(failing)
    assert describe_proof(failing, alone[alone["verdict"] == "fail"]) == "Nothing is proved: no case passed."


def test_both_sides_of_a_comparison_are_pictures_by_phase_and_by_op(runs: dict[str, Path]) -> None:
    """By hand: 12 all-reduces of 256 B each way, and 6 all-gathers of 512 B more."""
    comparison = compare(read_side(str(runs["right"])), read_side(str(runs["gather"])))
    ((mode, (phases, ops)),) = chart_comparison(comparison)
    assert mode == "tp"
    assert [(row, *(cell.text for cell in cells)) for row, cells in phases.rows] == [
        ("forward", "3 KiB", "3 KiB", "12", "12"),
        ("backward", "3 KiB", "6 KiB", "12", "18"),
    ]
    assert [(row, *(cell.text for cell in cells)) for row, cells in ops.rows] == [
        ("all_reduce", "6 KiB", "6 KiB", "24", "24"),
        ("all_gather", "0", "3 KiB", "0", "6"),
    ]
    assert 'width="50.000"' in str(phases.rows[0][1][0].bar), "base and now share a scale"


def test_a_comparison_is_one_page_and_one_comment(
    shardproof: CommandLine, runs: dict[str, Path], tmp_path: Path
) -> None:
    sides = str(runs["right"]), str(runs["gather"])
    status, out, _ = shardproof("compare", *sides, "-o", "report.html")
    assert (status, out) == (1, "report.html\n")
    html = Path("report.html").read_text()
    structure = Structure(html)
    assert structure.open == [] and len(set(structure.ids)) == len(structure.ids)
    assert not re.search(r"https?://|<script", html) and len(re.findall("<h[1-6]", html)) <= 6
    assert '<span class="is-fail">fail</span>: 1 kind of events differs' in html
    sentence = "tp: new all_gather in backward of layers.1: 6 calls, 3 KiB more on a rank"
    assert f'<p class="proof">{sentence}</p>' in html
    status, out, _ = shardproof("compare", *sides, "--markdown")
    assert status == 1 and out.startswith(f"## shardproof compare: fail\n\n```text\n{sentence}\n")
    bars = {line.split()[0]: line.count("#") for line in out.splitlines() if line.strip().startswith(("tp b", "now"))}
    assert bars == {"tp": 15, "now": 30}, "backward: half of what it is now"
    assert "| new | backward | layers.1 | all_gather of float32 8x16 | " in out
    assert "times show nothing: " in out or "interval: 99.9%" in out, "two runs of one machine may differ in time"
    for words in (("-o", "x.html"), ("--markdown",)):
        assert f"legal: shardproof page {sides[0]}" in shardproof.refused("compare", sides[0], *words)
    assert "cannot be written" in shardproof.refused("compare", *sides, "-o", str(tmp_path))
    status, out, _ = shardproof("compare", sides[0], sides[0], "-o", "same.html", "--json")
    assert status == 0 and json.loads(out)["changes"] == ["tp: no event differs: 24 calls, 6 KiB on a rank"]


def test_what_a_run_wrote_is_no_markup_in_a_comparison(runs: dict[str, Path]) -> None:
    bomb = "</p><script>alert(1)</script>```\n# x"
    base, new = (dataclasses.replace(read_side(str(runs[way])), name=bomb) for way in ("right", "gather"))
    comparison = dataclasses.replace(compare(base, new), notes=(bomb,), changes=(bomb,), lines=(bomb,))
    assert "<script" not in render_comparison(comparison)
    assert render_comparison_comment(comparison).count("```") == 2
