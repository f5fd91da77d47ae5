"""Sentences of a page of markdown: text without code, one block a paragraph, a list item, or a cell of a table."""

from __future__ import annotations

import re

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^(?:[*-]|\d+\.) ")
CODE, LINK = re.compile(r"`[^`]*`"), re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<=[.?!])[*_)\"]*\s+")
BAR = re.compile(r"(?<!\\)\|")


def blocks(page: str) -> list[str]:
    """The blocks of text of a page, each on one line: headings, fenced and indented code are left out."""
    found, block = [], list[str]()
    for line in [*FENCED.sub("\n", page).splitlines(), ""]:
        text = line.strip()
        cells = BAR.split(text.strip("|")) if text.startswith("|") else []
        if cells or not text or text.startswith("#") or ITEM.match(text):
            found.append(" ".join(block))
            block = []
        found += [cell.strip() for cell in cells]
        if text and not cells and not text.startswith("#") and (block or not line.startswith("    ")):
            block.append(ITEM.sub("", text))
    return [text for text in found if text]


def sentences(page: str) -> list[str]:
    """The sentences of a page: a piece of code is one word, of a link its text is left."""
    plain = [LINK.sub(r"\1", CODE.sub("CODE", block)) for block in blocks(page)]
    return [sentence for block in plain for sentence in END.split(block) if sentence]
