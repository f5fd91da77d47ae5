"""Exceptions of the subject: their last frames for a message, their whole traceback for a file.

If the rank is another process, its exception has the traceback in a note (engines.processes.rank_program); if it is a
thread, the traceback is still attached. Both are read as the text that Python prints.
"""

import re
import traceback

from shardproof.harness.engines.calls.callers import is_user, shorten_path
from shardproof.harness.errors import RankRaised, ShardproofError

_BEGINS = "Traceback (most recent call last):"
_FRAME = re.compile(
    r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n(?! *File ")(?P<source> .*)?', re.M
)
_MOST = 3


def whole_traceback(error: ShardproofError) -> str:
    """The traceback of the exception that ended a rank, and of those that led to it; "" if no rank raised."""
    raised = error.__cause__
    if not isinstance(error, RankRaised) or raised is None:
        return ""
    notes = [note for note in getattr(raised, "__notes__", ()) if _BEGINS in str(note)]
    text = "\n".join(map(str, notes)) or "".join(traceback.format_exception(raised))
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def last_frames(text: str) -> str:
    """The last frames of the user's code, innermost first, as "model.py:7 in forward: y = x / 0"; "" without any."""
    frames = [frame for frame in _FRAME.finditer(text.rpartition(_BEGINS)[2]) if is_user(frame["file"])]
    places = [
        f"{shorten_path(frame['file'])}:{frame['line']} in {frame['function']}"
        + (f": {source}" if (source := (frame["source"] or "").strip()) else "")
        for frame in frames[: -_MOST - 1 : -1]
    ]
    return ", called from ".join(places)
