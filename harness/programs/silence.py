"""Where the rank stands, in `last.json`: written by a thread when nothing was observed for long, and at the end.

gloo writes no Flight Recorder file when it hangs, and a rank that waits in native code can write none itself. The file
is removed when the rank goes on. `shardproof hang` reads it (harness.hangs).
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import suppress

from harness.engines.calls.callers import Caller, is_user, shortened
from harness.ledger import shape_text
from harness.programs.part import Part
from harness.programs.session import ProgramSession
from harness.programs.stream import EventStream, PastCall
from harness.recording.recorder import Recorded

_FILE = "last.json"
_LOOK_S = 1.0


class Silence:
    """Looks once a second; `silence_s` without an observation after a first call are a silence."""

    def __init__(self, session: ProgramSession, of: Recorded, stream: EventStream, part: Part) -> None:
        self._limit_s = session.silence_s
        self._of, self._stream, self._part = of, stream, part
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="shardproof silence", daemon=True)

    def start(self) -> None:
        """Look from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; write where the rank stands at the end of its program, and whether an exception ended it."""
        self._stopped.set()
        kind: type[BaseException] | None = getattr(sys, "last_type", None)
        ended = "its program ended" if kind is None else f"its program raised {kind.__name__}"
        with suppress(OSError, RuntimeError):
            self._part.replace(_FILE, self._standing(0.0, ended))

    def _look(self) -> None:
        seen, since_s, written = -1, time.monotonic(), False
        while not self._stopped.wait(min(_LOOK_S, self._limit_s / 4)):
            with suppress(OSError, RuntimeError):  # a full disk, a changing table: the next look may do
                if self._stream.stirred != seen:
                    seen, since_s = self._stream.stirred, time.monotonic()
                    if written:
                        self._part.remove(_FILE)
                    written = False
                elif not written and self._stream.calls and time.monotonic() - since_s >= self._limit_s:
                    self._part.replace(_FILE, self._standing(time.monotonic() - since_s, ""))
                    written = True

    def _standing(self, silent_s: float, ended: str) -> dict[str, object]:
        """The last calls as `records` (hangs.dumps.RECORD), their kinds once each (hangs.dumps.KIND)."""
        last = list(self._stream.last)
        kinds: dict[tuple[object, ...], int] = {}
        return {
            "shardproof": "last calls",
            "ended": ended,
            "program": self._of.case,
            "rank": self._of.rank,
            "world_size": self._of.world_size,
            "silent_s": round(silent_s, 1),
            "inside": list(self._stream.incomplete()),
            "groups": {call.issued.group: {"ranks": list(call.issued.call.group)} for call in last},
            "records": [_record(kinds, call) for call in last],
            "kinds": list(kinds),
            "numbers": self._stream.numbers(),
            "stack": [] if ended else self._stack(),
        }

    def _stack(self) -> list[str]:
        """The lines of the program's own code at which its first thread is, innermost first."""
        frame = sys._current_frames().get(self._main)
        lines = [] if frame is None else traceback.extract_stack(frame)
        return [f"{shortened(line.filename)}:{line.lineno} in {line.name}" for line in reversed(lines) if _own(line)]


def _record(kinds: dict[tuple[object, ...], int], call: PastCall) -> tuple[int, ...]:
    """A call as hangs.dumps.RECORD; its kind gets a number when it is new."""
    kind = kinds.setdefault(_kind(call), len(kinds))
    return kind, call.number, call.ticket, call.site.step, call.site.microbatch


def _kind(call: PastCall) -> tuple[object, ...]:
    """What a call is, as hangs.dumps.KIND."""
    issued, site, signature = call.issued, call.site, call.issued.signature
    rooted = signature.root >= 0
    root, peer = (issued.call.peer, -1) if rooted else (-1, issued.call.peer)
    caller = "" if call.caller is None else str(Caller(*call.caller))
    return (
        *(issued.group, call.axis, signature.op, signature.reduce_op, signature.dtype, shape_text(signature.shapes)),
        *(root, peer, site.phase, site.region, caller),
    )


def _own(line: traceback.FrameSummary) -> bool:
    return is_user(line.filename) and not line.filename.startswith("<")
