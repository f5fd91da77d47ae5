"""`shardproof help case | slice`: the words of the case language and of a slice, from what their classes declare.

`shardproof help calls CASE`: the calls that a subject states for a case.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from harness.errors import RequestError
from harness.resolve import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """What is explained: the class whose `meanings()` are printed, what it is in words, and a command as example."""

    title: str
    words: str
    lead: str
    example: str


_WORDS = (
    "words `key=value` in any order, in quotes. A word that is left out has its default; "
    "a default marked with * is derived from other words when one of them is given. `preset` sets many words at once."
)
TOPICS: dict[str, Topic] = {
    "case": Topic(
        title="The words of a case",
        words="reference.case:Case",
        lead=f"A case is one experiment: {_WORDS}",
        example='shardproof run "mode=tp-sp tp=4 kv_heads=4 steps=3 dtype=bfloat16"',
    ),
    "slice": Topic(
        title="The words of a slice",
        words="parallel.slicing.words:Sliced",
        lead=f"A slice is a model cut over ranks: {_WORDS}",
        example='shardproof slice "family=opt hidden=768 heads=12 tp=2"',
    ),
}


def main(parsed: argparse.Namespace) -> int:
    """Print the words, or with `--markdown` the page docs/case.md; or the calls of a case. Returns 0.

    Raises RequestError for a case that is none, or of which the subject states no calls.
    """
    text_of_case = " ".join(parsed.case)
    if parsed.topic == "calls":
        _show_calls(text_of_case, parsed.subject)
        return 0
    if text_of_case:
        raise RequestError(f"case {text_of_case!r}: help {parsed.topic} takes no case; legal: help calls CASE")
    topic = TOPICS[parsed.topic]
    sys.stdout.write(page(topic) if parsed.markdown else text(topic, shutil.get_terminal_size().columns))
    return 0


def _show_calls(text_of_case: str, name: str) -> None:
    from harness.subject import case_of, named, refusal  # noqa: PLC0415  (loads torch, which the words do not need)
    from harness.subject.call import answered  # noqa: PLC0415
    from reports.printing.calls import calls_table  # noqa: PLC0415
    from reports.printing.text import show_table  # noqa: PLC0415

    subject = named(name)
    case = case_of(text_of_case, subject)
    expected = getattr(subject.call, "expected", None)
    if reason := refusal(case, subject):
        raise RequestError(f"case {str(case)!r}: {reason}")
    terms = None if expected is None else answered("expected", lambda: expected(case))
    if terms is None:
        raise RequestError(f"subject={name}: states no calls for {case}; legal: a subject with `expected(case)`")
    show_table(calls_table(str(case), terms), sys.stdout)


def text(topic: Topic, columns: int) -> str:
    """The words by group for a terminal of this many columns (at least 60)."""
    lines = [*textwrap.wrap(topic.lead.replace("`", ""), max(columns, 60)), "", f"example: {topic.example}"]
    for group, words in _groups(topic):
        lines += ["", f"{group}:"]
        for word in words:
            left = f"  {word.name}={word.default}{'*' if word.follows else ''}"
            said = f"{word.meaning}; legal: {_legal(word)}"
            lines += textwrap.wrap(
                said, max(columns, 60), initial_indent=f"{left:28}", subsequent_indent=" " * 28, break_on_hyphens=False
            )
    return "\n".join(lines) + "\n"


def page(topic: Topic) -> str:
    """The same as markdown: one table a group."""
    lines = [f"# {topic.title}", "", topic.lead, "", f"    {topic.example}", ""]
    lines += [f"`shardproof help {_name(topic)}` prints this page; a test holds the two equal.", ""]
    for group, words in _groups(topic):
        lines += [f"## {group[:1].upper()}{group[1:]}", "", "| word | default | meaning | legal |", "|---|---|---|---|"]
        for word in words:
            default = f"`{word.default}`" if word.default else ""
            cells = (f"`{word.name}`", f"{default}{'*' if word.follows else ''}", word.meaning, _legal(word))
            lines.append("| " + " | ".join(cell.replace("|", ", ") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _name(topic: Topic) -> str:
    return next(name for name, known in TOPICS.items() if known == topic)


def _groups(topic: Topic) -> Iterator[tuple[str, Iterable[Any]]]:
    declared: Any = resolve(topic.words)
    return groupby(declared.meanings(), key=lambda word: word.group)


def _legal(word: Any) -> str:
    derived = f" (* from {', '.join(word.follows)})" if word.follows else ""
    return f"{word.legal.replace('|', ', ')}{derived}"
