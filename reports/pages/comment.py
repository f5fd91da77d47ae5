"""A run as a comment on a pull request: GitHub markdown with the verdict, figures, the table of modes and failures."""

from reports.pages.opening import figures
from reports.printing.text import markdown
from reports.printing.text_tables import first_table
from reports.stored.failures import bugs, simplest_first
from reports.stored.frames import Run
from reports.stored.summary import headline, overall, tally

_MOST = 5
"""Failures that are written out: a comment may be 65,536 characters long."""
_LONGEST = 4000
"""Characters of one failure."""


def comment(run: Run) -> str:
    """The comment. Text of a run stands in code blocks and table cells, where it is no markup."""
    cases = headline(run)
    found = bugs(simplest_first(run))
    lines = [f"## shardproof: {overall(cases)}", "", f"{tally(cases, run.verdicts)}", ""]
    lines += [" | ".join(f"**{number}** {label}" for number, label, _ in figures(run, cases)), ""]
    for bug in found[:_MOST]:
        message = bug.message[:_LONGEST].replace("```", "'''")
        lines += ["```text", message, *([bug.follows] if bug.follows else []), "```", ""]
    lines += [f"{len(found) - _MOST} more failures stand in verdicts.jsonl.", ""] if len(found) > _MOST else []
    return "\n".join([*lines, *([markdown(first_table(cases))] if len(cases) else [])])
