"""Printed output: plain text without a live reader, rich in a terminal, markdown for the CI page."""

import io
import re
import shlex
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pandas as pd
import pytest

from shardproof.reports.commands import cli
from shardproof.reports.printing import text, text_tables
from shardproof.reports.printing.text_tables import Table
from shardproof.reports.stored import summary
from shardproof.reports.stored.frames import Run
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
        return True


Terminals = Callable[..., Terminal]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminals:
    """A terminal of this width, with colours or without."""

    def made(columns: int, *, colours: bool = False) -> Terminal:
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "" if colours else "1")
        return Terminal()

    return made


@pytest.fixture
def headline(run: Run) -> pd.DataFrame:
    return summary.headline(run)


def test_plain_columns_are_aligned_and_numbers_stand_right() -> None:
    assert text.plain(TABLE).splitlines() == [
        "A title",
        "word          number",
        "------------  ------",
        "pass               1",
        "a|b [red]<x>  22,000",
        "a note",
    ]
    with pytest.raises(ValueError, match="needs 2 cells"):
        Table(title="", headers=("a", "b"), rows=(("1",),))


def test_a_pipe_gets_no_escape_code_and_no_folded_line(headline: pd.DataFrame) -> None:
    stream = io.StringIO()
    text.show_table(text_tables.headline_table(headline.assign(words=["key=value " * 60, "other=value " * 60])), stream)
    assert "\x1b" not in stream.getvalue()
    assert sum("=value" in line for line in stream.getvalue().splitlines()) == 2, "one line a case"


def test_a_terminal_gets_every_cell_and_markup_in_cells_stays_text(terminal: Terminals) -> None:
    stream = terminal(80, colours=True)
    text.show_table(TABLE, stream)
    assert "\x1b[32mpass" in stream.getvalue(), "a pass is green"
    assert all(cell in stream.getvalue() for cell in ("a|b [red]<x>", "22,000", "a note"))


def test_a_narrow_terminal_folds_long_texts_and_no_verdict(terminal: Terminals, headline: pd.DataFrame) -> None:
    stream = terminal(96)
    text.show_table(text_tables.headline_table(headline.assign(words=["a=1 " * 30, "b=2 " * 30])), stream)
    lines = ANSI.sub("", stream.getvalue()).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 96
    assert sum("pass" in line for line in lines) == 2
    assert all(word in "".join(lines) for word in ("verdict", "tp-sp", "32 KiB"))
    assert stream.getvalue().count("a=1") == 30


def test_a_table_that_is_too_wide_goes_on_below_in_bands_that_fit(terminal: Terminals) -> None:
    headers = ("mode", "ranks", *(f"number {place}" for place in range(12)))
    rows = tuple(("tp", str(ranks), *(f"{ranks}{place:08}" for place in range(12))) for ranks in (2, 4))
    stream = terminal(60)
    text.show_table(Table(title="t", headers=headers, rows=rows, numbers=frozenset(range(1, 14))), stream)
    lines = [line.rstrip() for line in ANSI.sub("", stream.getvalue()).splitlines()]
    assert max(map(len, lines)) <= 60
    assert all(cell in stream.getvalue() for row in rows for cell in row)
    begun = [line.split()[:2] for line in lines if line.startswith("tp ")]
    assert begun == [["tp", "2"], ["tp", "4"]] * (len(begun) // 2), "every band says what its rows are"


def test_a_failure_goes_on_below_its_words_in_a_terminal_and_has_the_colour_of_its_verdict(terminal: Terminals) -> None:
    lines = ["what:   " + "long words [red] " * 9, "causes: short", "repeat: " + "shardproof run " * 9, "and so on"]
    stream = terminal(60, colours=True)
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


def test_no_terminal_is_too_narrow_for_a_number(terminal: Terminals, headline: pd.DataFrame) -> None:
    table, stream = text_tables.headline_table(headline), terminal(30)
    text.show_table(table, stream)
    printed = stream.getvalue().split("calls and")[0]
    assert all(row[column] in printed for row in table.rows for column in table.numbers)
    assert all(word in printed for header in table.headers for word in header.split())


def test_the_ci_page_that_the_environment_names_gets_a_table_that_no_cell_breaks(tmp_path: Path) -> None:
    lines = text.markdown(TABLE).splitlines()
    assert lines[:4] == ["### A title", "", "| word | number |", "| --- | ---: |"]
    assert lines[5] == "| a\\|b [red]&lt;x> | 22,000 |"
    assert not text.append_step_summary(TABLE, "runs/one", {"PATH": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
    page = tmp_path / "summary.md"
    page.write_text("before\n")
    assert text.append_step_summary(TABLE, "runs/one", {"GITHUB_STEP_SUMMARY": str(page)})
    assert page.read_text().startswith("before\n### A title")
    assert "Run folder: `runs/one`" in page.read_text()


def test_progress_is_a_line_a_case_in_a_log_cut_between_words_below_120_columns() -> None:
    stream = io.StringIO()
    with text.show_progress(stream) as tick:
        tick(1, 12, "mode=tp tp=2", "pass")
        tick(12, 12, "mode=tp-sp tp=2", "fail")
        for words in (11, 12, 50):
            tick(1, 1, " ".join(["word=123"] * words), "pass")
    *short, kept, cut, long = stream.getvalue().splitlines()
    assert short == ["[ 1/12] pass    mode=tp tp=2", "[12/12] fail    mode=tp-sp tp=2"]
    assert kept == "[1/1] pass    " + " ".join(["word=123"] * 11)
    assert cut == kept + " ..." == long
    assert len(cut) < 120


def test_progress_is_a_bar_in_a_terminal_and_a_message_is_printed_as_it_is() -> None:
    terminal = Terminal()
    with text.show_progress(terminal) as tick:
        tick(3, 12, "mode=tp [red]", "pass")
    assert "3/12" in terminal.getvalue()
    stream = io.StringIO()
    text.show_message(sample_run.MESSAGE, stream, style="red")
    assert stream.getvalue() == sample_run.MESSAGE + "\n"
    text.show_message("list [0, 1] [red]x", terminal)
    assert "list [0, 1] [red]x" in terminal.getvalue()


def test_silence_in_a_terminal_lasts_two_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_PATIENCE_S", 0.01)
    terminal, pipe = Terminal(), io.StringIO()
    with text.show_busy("reading [red]", terminal):
        end_s = time.monotonic() + 20
        while "reading [red]" not in terminal.getvalue() and time.monotonic() < end_s:
            time.sleep(0.01)
    assert "reading [red]" in terminal.getvalue() and "0:00:0" in terminal.getvalue()
    with text.show_busy("reading", pipe):
        time.sleep(0.05)
    monkeypatch.setattr(text, "_PATIENCE_S", 60.0)
    with text.show_busy("reading", quick := Terminal()):
        pass
    assert pipe.getvalue() == quick.getvalue() == ""


# Commands in a terminal of 80 columns

COLUMNS = 80
SMALL = "mode=msp tp=2 layers=1 hidden=16 heads=4 kv_heads=4 ffn=32 vocab=97 seq=8 micro=1 steps=1"
COMMANDS = (
    f'run "{SMALL}"',
    f'run "{SMALL}" --variant norm-average --when 0',
    "show",
    "compare runs/latest runs/latest",
    "compare runs/latest",
    f'names "{SMALL}"',
    f'help calls "{SMALL}"',
    "help case",
    f'predict "{SMALL}" "mode=tp tp=2"',
    "doctor",
)


def printed(command: str, stream: io.StringIO) -> tuple[int, str]:
    """Exit status of a command, and what it prints to this stream."""
    with redirect_stdout(stream):
        status = cli.main(shlex.split(command))
    return status, stream.getvalue()


@pytest.mark.usefixtures("shardproof_here")
def test_every_line_fits_and_a_failure_has_colour(monkeypatch: pytest.MonkeyPatch, terminal: Terminals) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    for command in COMMANDS:
        status, shown = printed(command, terminal(COLUMNS, colours=True))
        assert status == int("--variant" in command), command
        lines = [line.rsplit("\r")[-1].rstrip() for line in ANSI.sub("", shown).splitlines()]
        wide = [line for line in lines if len(line) > COLUMNS and not line.startswith("repeat: ")]
        assert wide == [], command
        if command.startswith(("run", "show")):
            assert ("\x1b[1;31mfail" in shown) is ("--variant" in command or command == "show"), command
    _, shown = printed("show", io.StringIO())
    assert "\x1b" not in shown, "in a pipe no colour, and lines are whole"
    assert re.search(r"^first:  .{80,}$", shown, re.MULTILINE) and re.search(r"^note: .{80,}$", shown, re.MULTILINE)


def test_a_wrong_request_fits(terminal: Terminals) -> None:
    for command in (
        f'run "{SMALL} dtype=float128"',
        "run --out",
        "run --profile-steps 9:1 steps=2",
        "run mode=tp tp=2 x=1",
    ):
        with redirect_stderr(stderr := terminal(COLUMNS, colours=True)):
            status, _ = printed(command, terminal(COLUMNS))
        lines = ANSI.sub("", stderr.getvalue()).splitlines()
        assert status == 2 and max(map(len, lines)) <= COLUMNS <= len(" ".join(lines)), command
