"""A thread that writes down where the rank stands when nothing has been observed for long: `silence.json`.

gloo writes no Flight Recorder file when it hangs, and a rank that waits in native code can write none itself. The file
is removed when the rank goes on, and at an orderly end. `shardproof hang` reads it (harness.hangs).
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import suppress

from harness.callers import Caller, is_user, shortened
from harness.ledger import shape_text
from harness.programs.part import Part
from harness.programs.session import Session
from harness.programs.stream import PastCall, Stream
from harness.recording.recorder import Recorded

__all__ = ["SILENCE_FILE", "Silence"]

SILENCE_FILE = "silence.json"
_LOOK_S = 1.0


class Silence:
    """Looks once a second; `silence_s` without an observation after a first call are a silence."""

    def __init__(self, session: Session, of: Recorded, stream: Stream, part: Part) -> None:
        self._limit_s = session.silence_s
        self._of, self._stream, self._part = of, stream, part
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="shardproof silence", daemon=True)

    def start(self) -> None:
        """Look from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a file that was written says nothing any more."""
        self._stopped.set()
        with suppress(OSError):
            self._part.remove(SILENCE_FILE)

    def _look(self) -> None:
        seen, since_s, written = -1, time.monotonic(), False
        while not self._stopped.wait(min(_LOOK_S, self._limit_s / 4)):
            with suppress(OSError, RuntimeError):  # a full disk, a changing table: the next look may do
                if self._stream.stirred != seen:
                    seen, since_s = self._stream.stirred, time.monotonic()
                    if written:
                        self._part.remove(SILENCE_FILE)
                    written = False
                elif not written and self._stream.calls and time.monotonic() - since_s >= self._limit_s:
                    self._part.replace(SILENCE_FILE, self._standing(time.monotonic() - since_s))
                    written = True

    def _standing(self, silent_s: float) -> dict[str, object]:
        """The last calls, each kind once in `kinds`; `records` are (kind, number in its group, index on the rank)."""
        last = list(self._stream.last)
        kinds: dict[tuple[object, ...], int] = {}
        records = [(kinds.setdefault(_kind(call), len(kinds)), call.number, call.ticket) for call in last]
        groups = {call.issued.group: {"axis": call.axis, "ranks": list(call.issued.call.group)} for call in last}
        return {
            "shardproof": "silence",
            "program": self._of.case,
            "rank": self._of.rank,
            "world_size": self._of.world_size,
            "silent_s": round(silent_s, 1),
            "calls": self._stream.calls,
            "inside": list(self._stream.incomplete()),
            "groups": groups,
            "kinds": [dict(zip(KIND, kind, strict=True)) for kind in kinds],
            "records": records,
            "stack": self._stack(),
        }

    def _stack(self) -> list[str]:
        """The lines of the program's own code at which its first thread is, innermost first."""
        frame = sys._current_frames().get(self._main)
        lines = [] if frame is None else traceback.extract_stack(frame)
        return [f"{shortened(line.filename)}:{line.lineno} in {line.name}" for line in reversed(lines) if _own(line)]


KIND = (
    *("group", "axis", "op", "reduce_op", "dtype", "shape", "root", "peer", "tag", "is_async"),
    *("phase", "region", "step", "microbatch", "caller"),
)
"""What is written of a call beside its numbers."""


def _kind(call: PastCall) -> tuple[object, ...]:
    issued, site = call.issued, call.site
    signature = issued.signature
    root = issued.call.peer if signature.root >= 0 else -1
    peer = -1 if signature.root >= 0 else issued.call.peer
    caller = "" if call.caller is None else str(Caller(*call.caller))
    return (
        *(issued.group, call.axis, signature.op, signature.reduce_op, signature.dtype, shape_text(signature.shapes)),
        *(root, peer, issued.tag, issued.call.is_async),
        *(site.phase, site.region, site.step, site.microbatch, caller),
    )


def _own(line: traceback.FrameSummary) -> bool:
    return is_user(line.filename) and not line.filename.startswith("<")
