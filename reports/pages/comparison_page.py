"""A comparison of two runs as one HTML page, and as a comment on a pull request in GitHub markdown."""

from collections.abc import Sequence

import pandas as pd

from shardproof.reports.comparing.compared_tables import (
    describe_equal_times,
    events_table,
    times_table,
    traffic_change_table,
)
from shardproof.reports.comparing.comparison import Comparison
from shardproof.reports.pages.charts import chart_comparison
from shardproof.reports.pages.templates import template_of
from shardproof.reports.printing.text import markdown
from shardproof.reports.printing.text_tables import Table, byte_size, shorten_table

_FEW_BREACHES, _FEW_ROWS = 3, 40
_MOST_ROWS = 2000
_WIDE = 30
"""The length of the longest bar of a comment, in characters."""
_MOST_OF_COMMENT = 60
"""The most rows of a table of a comment."""


def render_comparison(comparison: Comparison) -> str:
    """The page as text."""
    document = template_of("comparison.html").render(
        verdict=_verdict(comparison),
        head=_head(comparison),
        base=comparison.base,
        new=comparison.new,
        changes=comparison.changes,
        limits=", ".join(map(str, comparison.asked)),
        notes=comparison.notes,
        breaches=comparison.breaches,
        few=_FEW_BREACHES,
        few_rows=_FEW_ROWS,
        modes=list(chart_comparison(comparison)),
        tables=[shorten_table(one, _MOST_ROWS, "`compare --json` has all of them") for one in _tables(comparison)],
        lines=comparison.lines,
        equal_times=describe_equal_times(comparison.times),
        times=times_table(comparison.times),
    )
    return document.encode("utf-8", "backslashreplace").decode()  # a name may hold characters that UTF-8 cannot encode


def render_comparison_comment(comparison: Comparison) -> str:
    """The comment: what changed, both sides as bars of text, and folded tables. Text of a run is no markup."""
    lines = [f"## shardproof compare: {_verdict(comparison)}", "", "```text"]
    lines += [_safe(one) for one in (*comparison.changes, *(f"note: {note}" for note in comparison.notes))]
    lines += [_safe(f"exceeds --fail {breach}") for breach in comparison.breaches[:_FEW_BREACHES]]
    if len(comparison.breaches) > _FEW_BREACHES:
        lines += [f"{len(comparison.breaches) - _FEW_BREACHES} more limits or places are broken"]
    lines += ["", *_draw_bars(comparison), "```", ""]
    for title, one in zip(("Calls and bytes by phase", "Events that differ"), _tables(comparison), strict=False):
        body = markdown(shorten_table(one, _MOST_OF_COMMENT, "`shardproof compare` prints all of them"))
        rows = f"{len(one.rows)} row{'s' if len(one.rows) != 1 else ''}"
        lines += [f"<details><summary>{title}: {rows}</summary>", "", body.partition("\n\n")[2], "</details>", ""]
    equal = describe_equal_times(comparison.times)
    lines += [f"{equal}." if equal else markdown(times_table(comparison.times))]
    return "\n".join(lines)


def _verdict(comparison: Comparison) -> str:
    return "fail" if comparison.breaches else "pass"


def _head(comparison: Comparison) -> str:
    number = len(comparison.folded)
    return (
        f"{number} kind{'s' if number != 1 else ''} of events differ{'s' if number == 1 else ''}"
        if number
        else ("the same events")
    )


def _tables(comparison: Comparison) -> Sequence[Table]:
    return (traffic_change_table(comparison), *([events_table(comparison.folded)] if len(comparison.folded) else []))


def _draw_bars(comparison: Comparison) -> list[str]:
    """Payload by mode and phase, two lines of text each, since GitHub shows no drawings in comments."""
    frame = comparison.traffic
    sides = ("payload_bytes", "new_payload_bytes")
    longest = max((float(size) for side in sides for size in frame[side].dropna()), default=0.0) or 1.0
    lines = []
    for mode, phase, *both in frame[["mode", "phase", *sides]].itertuples(index=False, name=None):
        for word, size in zip((f"{mode} {phase}, base", "now"), both, strict=True):
            bar = "" if pd.isna(size) else "#" * round(_WIDE * float(size) / longest)
            lines.append(f"{word:>24}  {bar:{_WIDE}}  {byte_size(size)}")
    return lines


def _safe(text: str) -> str:
    return text.replace("```", "'''")
