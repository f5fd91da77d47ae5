"""Words of a case without quotes: each is a case of its own, which its author may not have meant."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def note_unquoted(cases: Sequence[str]) -> None:
    """Say on stderr where words without quotes look like one case and are several; of launched ranks on the first."""
    keys = [text.partition("=")[0] for text in cases if len(text.split()) == 1]
    first = os.environ.get("RANK", "0") == "0"
    if first and len(keys) > 1 and len({*keys}) == len(keys) == len(cases):
        quoted = f'"{" ".join(cases)}"'
        print(f"note: these words are {len(cases)} cases, one each; as one case: {quoted}", file=sys.stderr)
