"""Sentences of a page of markdown, and the words that neither a page nor a docstring uses."""

import re
from collections.abc import Iterator

FENCED = re.compile(r"^```(\w*).*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^(?:[*-]|\d+\.) ")
ADDRESS = re.compile(r"\[[^\]]+\]: \S+$")
"""Of a link, at the end of a page."""
CODE, LINK = re.compile(r"`[^`]*`"), re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
PRIVATE = re.compile(
    r"\b(tells?|told|telling|ask(s|ed|ing)?|nobody|anybody|everybody|so much|so many)\b", re.IGNORECASE
)
"""Verbs and pronouns for which the field has a term: check, compare, record, report, raise, return."""
END = re.compile(r"(?<=[.?!])[*_)\"]*\s+")
BAR = re.compile(r"(?<!\\)\|")
LISTED = "legal"
"""The column of a table that holds values and no sentences."""


def blocks(page: str) -> Iterator[str]:
    """The texts of a page, each on one line: paragraphs, items of lists, cells; headings and code are left out."""
    block, header = list[str](), list[str]()
    for line in [*FENCED.sub("\n", page).splitlines(), ""]:
        text = "" if ADDRESS.match(line) else line.strip()
        cells = [cell.strip() for cell in BAR.split(text.strip("|"))] if text.startswith("|") else []
        if cells or not text or text.startswith("#") or ITEM.match(text):
            yield " ".join(block)
            block = []
        header = header or cells if cells else []
        yield from (cell for name, cell in zip(header, cells, strict=False) if name != LISTED)
        if text and not cells and not text.startswith("#") and (block or not line.startswith("    ")):
            block.append(ITEM.sub("", text))


def sentences(page: str) -> list[str]:
    """The sentences of a page: a piece of code is one word, of a link its text is left."""
    plain = (LINK.sub(r"\1", CODE.sub("CODE", block)) for block in blocks(page))
    return [sentence for block in plain for sentence in END.split(block) if sentence]
