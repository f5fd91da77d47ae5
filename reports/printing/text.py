"""The only place that prints: tables, progress and messages, rich in a terminal and plain everywhere else.

Plain means: no colour, no box, no line ever folded, so that logs can be searched and cut into columns. When
GITHUB_STEP_SUMMARY names a file, the headline table is appended there as markdown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

if TYPE_CHECKING:
    from reports.printing.tables import Table  # loads pandas, which a message and a line of progress do not need

__all__ = ["Progress", "Ticker", "append_step_summary", "markdown", "plain", "show_message", "show_table", "ticking"]

_LONGEST = 24
"""Characters that stay in one line of the terminal however narrow it is."""
_LINE = 119
"""Characters of a line of progress at most; the whole text of a case stands in the run folder."""
_BESIDE_BAR = 60
"""Characters of a case beside the bar in a terminal."""
_STYLES = {"pass": "green", "yes": "green", "fail": "bold red", "no": "bold red", "unknown": "yellow", "skip": "dim"}


def show_table(table: Table, stream: TextIO) -> None:
    """Print a table with its title and note."""
    if not stream.isatty():
        stream.write(plain(table) + "\n")
        return
    console = Console(file=stream, highlight=False)
    drawn = RichTable(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column, header in enumerate(table.headers):
        justify: Literal["left", "right"] = "right" if column in table.numbers else "left"
        drawn.add_column(header, justify=justify, min_width=_narrowest(table, column), overflow="fold")
    for row in table.rows:
        drawn.add_row(*(_styled(cell) for cell in row))
    console.print(table.title, style="bold", markup=False)
    # Too narrow a terminal folds the lines itself; rich would cut cells off.
    console.print(drawn, crop=False, no_wrap=True)
    console.print(table.note, style="dim", markup=False)
    console.print()


def _narrowest(table: Table, column: int) -> int:
    """Width below which a column cannot be read: texts fold at spaces, long words anywhere, numbers never."""
    cells = [row[column] for row in table.rows]
    whole = cells if column in table.numbers else [word for cell in cells for word in cell.split()]
    headers = [len(word) for word in table.headers[column].split()]
    return max(headers + [min(len(text), _LONGEST) for text in whole])


def _styled(cell: str) -> str:
    style = _STYLES.get(cell)
    return f"[{style}]{cell}[/]" if style else escape(cell)


def plain(table: Table) -> str:
    """The table in aligned columns of plain text: title, headers, a rule, rows, note."""
    lines = [table.headers, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.headers))]
    body = [_aligned(line, widths, table.numbers) for line in lines]
    rule = "  ".join("-" * width for width in widths)
    note = [table.note] if table.note else []
    return "\n".join([table.title, body[0], rule, *body[1:], *note]) + "\n"


def _aligned(cells: tuple[str, ...], widths: list[int], numbers: frozenset[int]) -> str:
    parts = (
        cell.rjust(width) if column in numbers else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(parts).rstrip()


def markdown(table: Table) -> str:
    """The table as GitHub markdown; a bar or a line end in a cell cannot break it."""
    rule = ["---:" if column in table.numbers else "---" for column in range(len(table.headers))]
    lines = [list(table.headers), rule, *([_in_markdown(cell) for cell in row] for row in table.rows)]
    note = f"\n{table.note}\n" if table.note else ""
    return f"### {table.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n" + note


def _in_markdown(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def append_step_summary(table: Table, where: str, environment: Mapping[str, str]) -> bool:
    """Append the table and the run's place to the CI page when the environment names one; say whether it did."""
    target = environment.get("GITHUB_STEP_SUMMARY", "")
    if not target:
        return False
    with Path(target).open("a", encoding="utf-8") as page:
        page.write(f"{markdown(table)}\nRun folder: `{where}`\n\n")
    return True


def show_message(message: str, stream: TextIO, style: str = "") -> None:
    """Print text as it is; `style` is a rich style that a terminal shows."""
    if stream.isatty():
        Console(file=stream, highlight=False, soft_wrap=True).print(escape(message), style=style or None)
    else:
        stream.write(message + "\n")


class Ticker(Protocol):
    """What hears of progress."""

    def __call__(self, done: int, total: int, case: str, verdict: str) -> None:
        """A case is done: how many of how many, which it was, its verdict."""
        ...


@contextmanager
def ticking(stream: TextIO) -> Iterator[Ticker]:
    """A progress bar in a terminal, one line a case elsewhere; yields what is called for every finished case."""
    if not stream.isatty():
        yield lambda done, total, case, verdict: _tick_line(stream, done, total, case, verdict)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(file=stream), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, case, verdict: bar.update(
            task, completed=done, total=total, description=shortened(f"{verdict} {case}".strip(), _BESIDE_BAR)
        )


def _tick_line(stream: TextIO, done: int, total: int, case: str, verdict: str) -> None:
    stream.write(shortened(f"[{done:{len(str(total))}}/{total}] {verdict:7} {case}".rstrip(), _LINE) + "\n")
    stream.flush()


def shortened(text: str, length: int) -> str:
    """The text in at most `length` characters: words that do not fit are "..."."""
    if len(text) <= length:
        return text
    return text[: length - 3].rpartition(" ")[0] + " ..."
