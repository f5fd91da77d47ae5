"""Pieces of a page of markdown: fenced blocks, and code in a line."""

import re

FENCED = re.compile(r"^```(\w*).*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]*`")
