"""What a page opens with: bars of bytes and memory, the map of a failure; each figure read back, wrong ones found."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from reports.pages import drawings, page
from reports.stored import failures
from reports.stored.frames import Run, load
from tests.reports import sample_run
from tests.reports.pages.map_figures import map_flaws
from tests.reports.pages.page_figures import compared


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load(sample_run.write(tmp_path_factory.mktemp("pictures") / "run", failing=True))


@pytest.fixture(scope="module")
def html(failing: Run) -> str:
    return page.render(failing)


def test_a_bar_is_one_case_and_as_long_as_its_bytes(tmp_path: Path) -> None:
    folder = sample_run.write(tmp_path / "run")
    html = page.render(load(folder))
    found = compared(html, folder)
    assert found.apart == () and found.figures["bars"] == 1 + 2 * 2 + 4 * (3 + 1 + 2 + 1)
    assert 'aria-label="wire MiB: forward 0.012, loss 0.004, backward 0.008"' in html
    wider = html.replace('width="50.000" height="10"', 'width="51.000" height="10"', 1)
    assert wider != html and "bar of forward of mode=tp tp=2: 0.000 51.000" in compared(wider, folder).apart[0]
    other = html.replace('">0.008</td>', '">0.009</td>', 1)
    assert other != html and compared(other, folder).apart


def test_lines_put_failures_first_and_few_ranks_before_many(failing: Run) -> None:
    assert [(line.verdict, line.mode) for line in drawings.lines(failing)[0]] == [("fail", "tp"), ("pass", "tp-sp")]
    wide = dataclasses.replace(failing, cases=failing.cases.assign(world_size=[2, 4]), verdicts=failing.verdicts[:6])
    swapped = dataclasses.replace(wide, cases=wide.cases.assign(world_size=[4, 2]))
    assert [line.mode for line in drawings.lines(wide)[0]] == ["tp", "tp-sp"]
    assert [(line.mode, line.begins) for line in drawings.lines(swapped)[0]] == [("tp-sp", False), ("tp", True)]


def test_a_failing_case_has_a_map_of_layers_by_phases_with_the_first_place_marked(failing: Run, html: str) -> None:
    cells, flaws = map_flaws(html, failing.path)
    assert flaws == [] and cells == 3 * (2 + 2), "three layers; forward and backward, then forward and step"
    assert '<td class="heat-3 first" title="grad/layers.0.mlp.w1.weight">1e7x first</td>' in html
    assert html.index('<section id="failures">') < html.index('<section id="cases">'), "the page opens with it"


@pytest.mark.parametrize(
    ("there", "planted"),
    [
        ("heat-3 first", "heat-2 first"),
        (">1e7x first<", ">1e6x first<"),
        ('class="heat-4 later"', 'class="heat-ok later"'),
        (">inf<", ">ok<"),
        (" first</td>", "</td>"),
        ('<th scope="row">layers.0<', '<th scope="row">layers.1<'),
    ],
)
def test_a_wrong_cell_of_the_map_is_found(failing: Run, html: str, there: str, planted: str) -> None:
    assert html.count(there) == 1 and map_flaws(html.replace(there, planted), failing.path)[1]


def test_failures_with_one_first_place_are_one_block(failing: Run) -> None:
    told = failing.verdicts.iloc[-1:]
    elsewhere = told.assign(message=sample_run.MESSAGE.replace("act_grad/layers.0.mlp", "forward of head: logits/0"))
    rows = pd.concat([told, elsewhere, told.assign(case=sample_run.TP_SP)])
    found = failures.groups(rows, failing.path)
    assert [(group.place, len(group.cases), len(group.others)) for group in found] == [
        ("act_grad/layers.0.mlp", 2, 1),
        ("forward of head", 1, 0),
    ]
    html = page.render(dataclasses.replace(failing, verdicts=pd.concat([failing.verdicts, *[told] * 200])))
    assert "200 more failed checks with this first place" in html and "170 more stand in verdicts.jsonl" in html


def test_times_of_ranks_that_take_turns_are_said_to_be_no_speed(failing: Run) -> None:
    for engine, said in (("inproc", True), ("pool", False)):
        run = dataclasses.replace(failing, env={"request": {"engine": engine}})
        assert ("Ranks take turns: no picture of speed" in page.render(run)) is said


def test_a_page_without_a_break_even_loads_no_plotting_library(tmp_path: Path) -> None:
    folder = sample_run.write(tmp_path / "run")
    imports = "import sys; from reports.pages import page; from reports.stored import frames"
    program = f"{imports}; page.render(frames.load({str(folder)!r})); "
    told = "print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program + told], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
