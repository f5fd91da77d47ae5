"""Text as a terminal may have it: names and messages come from files of others too, whose controls would steer it."""

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls (but tab and line end), words that turn the direction of text, halves of a character."""


def printable(text: str) -> str:
    """The text with every control character as Python writes it; its lines and tabs stay."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def in_one_line(text: str) -> str:
    """The text of a cell or a line: ends of lines and tabs are shown too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")
