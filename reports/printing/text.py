"""The only code that prints: tables, progress and messages, rich in a terminal and plain everywhere else.

Control characters are made visible and not sent, since text may come from files of others.

Plain means: no colour, no box, no folded line, so that logs can be searched and cut into columns. If
GITHUB_STEP_SUMMARY names a file, the tables that sum up a result are appended there as markdown.
"""

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Literal, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from shardproof.harness.errors import guard_file
from shardproof.reports.printing.printable import in_one_line, printable

if TYPE_CHECKING:
    from shardproof.reports.printing.text_tables import (
        Table,  # loads pandas, which a message and a line of progress do not need
    )

_LONGEST = 24
"""Words and numbers of up to this many characters are not folded, however narrow the terminal is."""
_GAP = 2
"""Characters between two columns of a terminal."""
_LINE = 119
"""The most characters of a line of progress. The whole text of a case is in the run folder."""
_BESIDE_BAR = 60
"""The most characters of a case beside the bar in a terminal."""
_PATIENCE_S = 2.0
"""Seconds before a progress bar appears in a terminal."""
_LABEL = re.compile(r"[a-z ]{4,8}: +")
"""What begins a line of a failure's report: "what:   "."""
STYLES = {"pass": "green", "yes": "green", "fail": "bold red", "no": "bold red", "unknown": "yellow", "skip": "dim"}


def show_table(table: "Table", stream: TextIO) -> None:
    """Print a table with its title and note."""
    table = _fit_for_terminal(table)
    if not stream.isatty():
        stream.write(plain(table) + "\n")
        return
    console = Console(file=stream, highlight=False)
    console.print(table.title, style="bold", markup=False)
    for columns in _split_bands(table, console.width):
        # A terminal narrower than two columns folds lines itself; rich would cut cells off.
        console.print(_draw_table(table, columns, console.width), crop=False, no_wrap=True)
    console.print(table.note, style="dim", markup=False)
    console.print()


def _fit_for_terminal(table: "Table") -> "Table":
    """The table in a form that is safe for a terminal."""
    rows = tuple(tuple(map(in_one_line, row)) for row in table.rows)
    headers = tuple(map(in_one_line, table.headers))
    return replace(table, title=in_one_line(table.title), headers=headers, rows=rows, note=printable(table.note))


def _draw_table(table: "Table", columns: Sequence[int], width: int) -> RichTable:
    """These columns of a table in `width` characters. Free width goes first to the columns that need least."""
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    needs = {column: _widest_width(table, column) - _narrowest_width(table, column) for column in columns}
    left = width - sum(_narrowest_width(table, column) + _GAP for column in columns)
    for column in sorted(columns, key=needs.__getitem__):
        needs[column] = min(needs[column], max(left, 0))
        left -= needs[column]
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in table.numbers else "left"
        size = _narrowest_width(table, column) + needs[column]
        drawn.add_column(table.headers[column], justify=justify, width=size, overflow="fold")
    for row in table.rows:
        cells = (row[column] for column in columns)
        drawn.add_row(*(f"[{STYLES[cell]}]{cell}[/]" if cell in STYLES else escape(cell) for cell in cells))
    return drawn


def _split_bands(table: "Table", width: int) -> list[list[int]]:
    """All columns, in bands below each other that are no wider than the terminal.

    Each band begins with the first column, or with the first two if rows have the same first cell.
    """
    readable = [_readable_width(table, column) + _GAP for column in range(len(table.headers))]
    if sum(readable) <= width:
        return [list(range(len(readable)))]
    keys = [0] if len({row[0] for row in table.rows}) == len(table.rows) else [0, 1]
    bands = [[*keys]]
    for column in range(len(keys), len(readable)):
        if len(bands[-1]) > len(keys) and sum(readable[each] for each in (*bands[-1], column)) > width:
            bands.append([*keys])
        bands[-1].append(column)
    return bands


def _narrowest_width(table: "Table", column: int) -> int:
    """A column below this width is not readable: texts fold at spaces, long words anywhere, numbers never."""
    cells = [row[column] for row in table.rows]
    whole = cells if column in table.numbers else [word for cell in cells for word in cell.split()]
    headers = [len(word) for word in table.headers[column].split()]
    return max(headers + [min(len(text), _LONGEST) for text in whole])


def _readable_width(table: "Table", column: int) -> int:
    """The width in which a column is easy to read: some words a line."""
    narrowest = _narrowest_width(table, column)
    return narrowest if column in table.numbers else max(narrowest, min(_widest_width(table, column), _LONGEST))


def _widest_width(table: "Table", column: int) -> int:
    """Width in which no text of a column is folded."""
    return max(map(len, (table.headers[column], *(row[column] for row in table.rows))))


def plain(table: "Table") -> str:
    """The table in aligned columns of plain text: title, headers, a rule, rows, note."""
    lines = [table.headers, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.headers))]
    sides = [">" if column in table.numbers else "<" for column in range(len(widths))]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    body = [form.format(*line).rstrip() for line in lines]
    rule = "  ".join("-" * width for width in widths)
    note = [table.note] if table.note else []
    return "\n".join([table.title, body[0], rule, *body[1:], *note]) + "\n"


def markdown(table: "Table") -> str:
    """The table as GitHub markdown; a bar or a line end in a cell cannot break it."""
    rule = ["---:" if column in table.numbers else "---" for column in range(len(table.headers))]
    safe = str.maketrans({"\\": "\\\\", "|": "\\|", "*": "\\*", "<": "&lt;", "\n": " "})
    lines = [list(table.headers), rule, *([cell.translate(safe) for cell in row] for row in table.rows)]
    note = f"\n{table.note}\n" if table.note else ""
    return f"### {table.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n" + note


def append_step_summary(table: "Table", where: str, environment: Mapping[str, str]) -> bool:
    """Append the table and the run's place to the CI page if the environment names one. Returns whether it did.

    A page that cannot be written is a note, since what it would show is printed too.
    """
    target = environment.get("GITHUB_STEP_SUMMARY", "")
    if not target:
        return False
    try:
        with Path(target).open("a", encoding="utf-8") as page:
            page.write(f"{markdown(table)}\nRun folder: `{where}`\n\n")
    except OSError as problem:
        show_note(f"GITHUB_STEP_SUMMARY={target}: cannot be written ({problem.strerror or problem})", sys.stderr)
        return False
    return True


def show_message(message: str, stream: TextIO, style: str = "") -> None:
    """Print text with its control characters made visible; `style` is a rich style for a terminal."""
    message = printable(message)
    if stream.isatty():
        Console(file=stream, highlight=False, soft_wrap=True).print(escape(message), style=style or None)
    else:
        stream.write(message + "\n")


def show_words(words: str, stream: TextIO, style: str = "") -> None:
    """Print sentences. One that is longer than a line of the terminal is folded."""
    if stream.isatty():
        width = Console(file=stream).width
        words = "\n".join(_fold_line(line, width) for line in words.split("\n"))
    show_message(words, stream, style)


def show_note(note: str, stream: TextIO) -> None:
    """Print a note beside a result."""
    show_words(f"note: {note}", stream, style="yellow")


def show_report(verdict: str, head: str, lines: Sequence[str], stream: TextIO) -> None:
    """Print a failure, or another verdict that is no pass: its head, its lines (mostly "label: words"), an empty line.

    In a terminal the head has its verdict's colour, and long lines are folded below their words. A command to repeat is
    not folded, so that it can be copied.
    """
    head, lines = printable(head), list(map(printable, lines))
    if not stream.isatty():
        stream.write("\n".join([head, *lines, "", ""]))
        return
    console = Console(file=stream, highlight=False, soft_wrap=True)
    console.print(escape(_fold_line(head, console.width)), style=STYLES.get(verdict))
    for line in lines:
        label = found.group() if (found := _LABEL.match(line)) else ""
        folded = line if label.startswith("repeat") else _fold_line(line, console.width, len(label))
        console.print(f"[bold]{escape(label)}[/]{escape(folded[len(label) :])}" if label else escape(folded))
    console.print()


def _fold_line(line: str, width: int, indent: int = 0) -> str:
    """A line folded between words to this width, with all but the first line indented."""
    width = max(width, 2 * _LONGEST)
    return fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)


Ticker = Callable[[int, int, str, str], object]
"""A listener to progress. For each case: how many are done, of how many, which it was, its verdict."""


@contextmanager
def show_progress(stream: TextIO) -> Iterator[Ticker]:
    """A progress bar in a terminal, one line a case elsewhere. Yields a function to call for every finished case."""
    if not stream.isatty():

        def line(done: int, total: int, case: str, verdict: str) -> None:
            stream.write(
                shorten_text(f"[{done:{len(str(total))}}/{total}] {verdict:7} {in_one_line(case)}".rstrip(), _LINE)
                + "\n"
            )
            stream.flush()

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(file=stream), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, case, verdict: bar.update(
            task,
            completed=done,
            total=total,
            description=shorten_text(f"{verdict} {in_one_line(case)}".strip(), _BESIDE_BAR),
        )


@contextmanager
def show_busy(what: str, stream: TextIO) -> Iterator[None]:
    """Show in a terminal what is going on and for how long, after two seconds; nothing else prints meanwhile."""
    if not stream.isatty():
        yield
        return
    over = threading.Event()

    def show() -> None:
        if over.wait(_PATIENCE_S):
            return
        columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=Console(file=stream), transient=True, refresh_per_second=4) as bar:
            bar.add_task(in_one_line(what), total=None)
            over.wait()

    shown = threading.Thread(target=show, daemon=True)
    shown.start()
    try:
        yield
    finally:
        over.set()
        shown.join()


def shorten_text(text: str, length: int) -> str:
    """The text in at most `length` characters; "..." stands for words that do not fit."""
    if len(text) <= length:
        return text
    return text[: length - 3].rpartition(" ")[0] + " ..."


def write_report(text: str, target: str) -> None:
    """Write a page or a comment into a file and print its path; without a file, print the text.

    Raises RequestError if the file cannot be written.
    """
    if target:
        with guard_file(f"-o {target}", "-o report.html"):
            Path(target).write_text(text, encoding="utf-8")
    show_message(target or text, sys.stdout)
