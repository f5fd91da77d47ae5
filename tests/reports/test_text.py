"""Printed output: plain text without a live reader, rich in a terminal, markdown for the CI page."""

import io
import re
from pathlib import Path

import pytest

from reports.printing import text, text_tables
from reports.printing.text_tables import Table
from reports.stored import summary
from reports.stored.frames import load
from tests.reports import sample_run

ANSI = re.compile(r"\x1b\[[0-9;]*m")
TABLE = Table(
    title="A title",
    headers=("word", "number"),
    rows=(("pass", "1"), ("a|b [red]<x>", "22,000")),
    numbers=frozenset({1}),
    note="a note",
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Return true."""
        return True


def test_plain_columns_are_aligned_and_numbers_stand_right() -> None:
    assert text.plain(TABLE).splitlines() == [
        "A title",
        "word          number",
        "------------  ------",
        "pass               1",
        "a|b [red]<x>  22,000",
        "a note",
    ]


def test_a_pipe_gets_no_escape_code_and_no_folded_line(tmp_path: Path) -> None:
    run = load(sample_run.write(tmp_path / "run"))
    headline = summary.headline(run).assign(words=["key=value " * 60, "other=value " * 60])
    stream = io.StringIO()
    text.show_table(text_tables.headline_table(headline), stream)
    assert "\x1b" not in stream.getvalue()
    assert sum("=value" in line for line in stream.getvalue().splitlines()) == 2, "one line a case"


def test_a_terminal_gets_every_cell_and_markup_in_cells_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    text.show_table(TABLE, stream)
    printed = stream.getvalue()
    assert "\x1b[32mpass" in printed, "a pass is green"
    assert "a|b [red]<x>" in printed
    assert "22,000" in printed
    assert "a note" in printed


def test_a_narrow_terminal_folds_long_texts_and_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "96")
    headline = summary.headline(load(sample_run.write(tmp_path / "run"))).assign(words=["a=1 " * 30, "b=2 " * 30])
    stream = Terminal()
    text.show_table(text_tables.headline_table(headline), stream)
    lines = stream.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 96
    assert sum("pass" in line for line in lines) == 2 and all(
        word in "".join(lines) for word in ("verdict", "tp-sp", "0.031")
    )
    assert stream.getvalue().count("a=1") == 30


def test_a_table_that_is_too_wide_goes_on_below_in_bands_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    headers = ("mode", "ranks", *(f"number {place}" for place in range(12)))
    rows = tuple(("tp", str(ranks), *(f"{ranks}{place:08}" for place in range(12))) for ranks in (2, 4))
    stream = Terminal()
    text.show_table(Table(title="t", headers=headers, rows=rows, numbers=frozenset(range(1, 14))), stream)
    lines = [line.rstrip() for line in ANSI.sub("", stream.getvalue()).splitlines()]
    assert max(map(len, lines)) <= 60
    assert all(cell in stream.getvalue() for row in rows for cell in row)
    begun = [line.split()[:2] for line in lines if line.startswith("tp ")]
    assert begun == [["tp", "2"], ["tp", "4"]] * (len(begun) // 2), "every band says what its rows are"


def test_a_failure_goes_on_below_its_words_in_a_terminal_and_has_the_colour_of_its_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    lines = ["what:   " + "long words [red] " * 9, "causes: short", "repeat: " + "shardproof run " * 9, "and so on"]
    stream = Terminal()
    text.show_report("fail", "fail: mode=tp", lines, stream)
    told = stream.getvalue()
    assert "\x1b[1;31mfail: mode=tp" in told and told.count("[red]") == 9
    plain = ANSI.sub("", told).splitlines()
    assert plain[1].startswith("what:   long words [red] long") and max(map(len, plain[1:5])) <= 60
    assert plain[2].startswith("        ") and plain[2].strip().split()[0] in ("long", "words", "[red]")
    assert lines[2].strip() in [line.rstrip() for line in plain], "a command is one line, to be copied"
    pipe = io.StringIO()
    text.show_report("fail", "fail: mode=tp", lines, pipe)
    assert pipe.getvalue() == "\n".join(["fail: mode=tp", *lines, "", ""])


def test_no_terminal_is_too_narrow_for_a_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "30")
    table = text_tables.headline_table(summary.headline(load(sample_run.write(tmp_path / "run"))))
    stream = Terminal()
    text.show_table(table, stream)
    printed = stream.getvalue().split("calls and")[0]
    for row in table.rows:
        assert all(row[column] in printed for column in table.numbers)
    for header in table.headers:
        assert all(word in printed for word in header.split()), header


def test_markdown_is_a_table_that_no_cell_breaks() -> None:
    lines = text.markdown(TABLE).splitlines()
    assert lines[:4] == ["### A title", "", "| word | number |", "| --- | ---: |"]
    assert lines[5] == "| a\\|b [red]&lt;x> | 22,000 |"


def test_the_ci_page_is_appended_to_when_the_environment_names_it(tmp_path: Path) -> None:
    page = tmp_path / "summary.md"
    page.write_text("before\n")
    assert text.append_step_summary(TABLE, "runs/one", {"GITHUB_STEP_SUMMARY": str(page)})
    assert page.read_text().startswith("before\n### A title")
    assert "Run folder: `runs/one`" in page.read_text()


def test_no_ci_page_is_written_when_none_is_named(tmp_path: Path) -> None:
    assert not text.append_step_summary(TABLE, "runs/one", {"PATH": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_progress_is_a_line_a_case_in_a_log() -> None:
    stream = io.StringIO()
    with text.ticking(stream) as tick:
        tick(1, 12, "mode=tp tp=2", "pass")
        tick(12, 12, "mode=tp-sp tp=2", "fail")
    assert stream.getvalue().splitlines() == ["[ 1/12] pass    mode=tp tp=2", "[12/12] fail    mode=tp-sp tp=2"]


def test_a_line_of_progress_is_cut_between_words_below_120_columns() -> None:
    stream = io.StringIO()
    with text.ticking(stream) as tick:
        for words in (11, 12, 50):
            tick(1, 1, " ".join(["word=123"] * words), "pass")
    kept, cut, long = stream.getvalue().splitlines()
    assert kept == "[1/1] pass    " + " ".join(["word=123"] * 11)
    assert cut == "[1/1] pass    " + " ".join(["word=123"] * 11) + " ..." == long
    assert len(cut) < 120


def test_progress_is_a_bar_in_a_terminal() -> None:
    stream = Terminal()
    with text.ticking(stream) as tick:
        tick(3, 12, "mode=tp [red]", "pass")
    assert "3/12" in stream.getvalue()


def test_a_message_is_printed_as_it_is() -> None:
    stream = io.StringIO()
    text.show_message(sample_run.MESSAGE, stream, style="red")
    assert stream.getvalue() == sample_run.MESSAGE + "\n"
    terminal = Terminal()
    text.show_message("list [0, 1] [red]x", terminal)
    assert "list [0, 1] [red]x" in terminal.getvalue()
