"""A run as a comment on a pull request: GitHub markdown with the verdict, figures, the table of modes and failures.

A recorded program has no verdict. Its comment has what its page has: the overview, the findings and the tables.
"""

from collections.abc import Mapping
from typing import Any

from shardproof.reports.pages import opening
from shardproof.reports.printing.text import markdown
from shardproof.reports.printing.text_tables import Table, first_table, shorten_table
from shardproof.reports.stored.failures import bugs_of_run, simplest_first
from shardproof.reports.stored.frames import Run
from shardproof.reports.stored.summary import headline, tally_of_run, worst_verdict

_MOST = 5
"""The most failures that are written out, since a comment may have 65,536 characters."""
_MOST_ROWS = 20
"""The most rows of a table of a recorded program."""
_LONGEST = 4000
"""The most characters of a failure, or of a line about a recorded program."""


def render_comment(run: Run) -> str:
    """The comment. Text of a run is in code blocks and table cells, where it is no markup."""
    if program := opening.program_parts(run):
        return _of_program(run, program)
    cases = headline(run)
    found = bugs_of_run(simplest_first(run))
    lines = [f"## shardproof: {worst_verdict(cases)}", "", f"{tally_of_run(cases, run.records)}", ""]
    lines += [" | ".join(f"**{number}** {label}" for number, label, _ in opening.opening_figures(run, cases)), ""]
    for bug in found[:_MOST]:
        message = bug.verdict.message[:_LONGEST].replace("```", "'''")
        lines += ["```text", message, *([bug.follows] if bug.follows else []), "```", ""]
    lines += [f"{len(found) - _MOST} more failures stand in verdicts.jsonl.", ""] if len(found) > _MOST else []
    return "\n".join([*lines, *([markdown(first_table(cases))] if len(cases) else [])])


def _of_program(run: Run, program: Mapping[str, Any]) -> str:
    """The comment on a recorded program, with the parts of its page."""
    overview: Table = program["program"]
    name, ranks = (overview.rows[0][:2]) if overview.rows else ("program", "0")
    findings = [*(f"note: {note}" for note in run.notes), *program["findings"]]
    lines = [f"## shardproof: recorded on {ranks} ranks", "", "```text"]
    lines += [line[:_LONGEST].replace("```", "'''") for line in (name, *findings)]
    return "\n".join(
        [
            *lines,
            "```",
            "",
            *(
                markdown(shorten_table(one, _MOST_ROWS, "all of them are on the page"))
                for one in (overview, *program["traffic"])
            ),
        ]
    )
