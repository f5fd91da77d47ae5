"""A rank's part of the run folder, `ranks/<rank>/`, written as the program runs, so that a killed one leaves it.

ledger.csv   the columns of harness.ledger.Event, needs_gradient and sent_rows; where a call_index comes
             twice, the later row holds: what followed settled it
steps.csv    step, start_us (its first forward, of step 0 the first observation), updated_us (its last optimizer step
             ended), microbatches
groups.csv   axis, ranks: the groups in which this rank called, in the order in which they were first seen
rank.json    rank, host, pid, clock (ranks of one clock have comparable times)
end.json     written at an orderly end, or when the recorder fails: calls, doubts, peak bytes, calls that were never
             waited for, what the recorder failed at
last.json    where the rank stood when nothing had happened for long, or at its end (harness.traces.hangs): gloo writes
             no Flight Recorder file when it hangs, and a rank that waits in native code can write none itself

Rows go to the system at once: nothing waits in a buffer of the process. `cases.jsonl` and `env.json` of the run folder
are written by whichever rank is first.
"""

import json
import operator
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shardproof.harness.engines.calls.callers import Caller, is_user, shorten_path
from shardproof.harness.ledger import COLUMNS, Event, shape_text
from shardproof.harness.programs.session import ProgramSession
from shardproof.harness.programs.stream import EventStream, PastCall
from shardproof.harness.recording.recorder import Recorded
from shardproof.harness.run_folder import csv_text

MODE = "program"
"""The mode of a recorded program in the ledger."""
STEP_COLUMNS = ("step", "start_us", "updated_us", "microbatches")
GROUP_COLUMNS = ("axis", "ranks")
_COLUMNS = (*COLUMNS, "needs_gradient", "sent_rows")
_ROW = operator.attrgetter(*_COLUMNS)


class Part:
    """The open files of one rank. Raises FileExistsError if another process has recorded as this rank."""

    def __init__(self, folder: Path, rank: int, about: Mapping[str, object]) -> None:
        self.path = folder / "ranks" / str(rank)
        self.path.mkdir(parents=True)
        self.replace("rank.json", {"rank": rank, **about})
        self._ledger = self._table("ledger.csv", _COLUMNS)
        self._steps = self._table("steps.csv", STEP_COLUMNS)
        self._groups = self._table("groups.csv", GROUP_COLUMNS)
        self._known: set[tuple[str, tuple[int, ...]]] = set()

    def event(self, event: Event) -> None:
        """Append an event."""
        group = event.axis, event.group
        if group not in self._known:
            self._known.add(group)
            os.write(self._groups, csv_text([(event.axis, " ".join(map(str, event.group)))]).encode())
        os.write(self._ledger, csv_text([_ROW(event)]).encode())

    def step(self, row: Sequence[object]) -> None:
        """Append a step: the values of STEP_COLUMNS."""
        os.write(self._steps, csv_text([row]).encode())

    def replace(self, name: str, content: Mapping[str, object]) -> None:
        """Write a JSON file of this rank, atomically."""
        half = self.path / f"{name}.part"
        half.write_text(json.dumps(content) + "\n", encoding="utf-8")
        half.replace(self.path / name)

    def remove(self, name: str) -> None:
        """Remove a file of this rank, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def _table(self, name: str, columns: Sequence[str]) -> int:
        opened = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(opened, csv_text([columns]).encode())
        return opened


def shared_file(path: Path, text: str) -> None:
    """Write a file of the run folder unless another rank has, so that it is always complete."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".part-", encoding="utf-8", delete=False) as file:
        file.write(text)
    try:
        with suppress(FileExistsError):
            os.link(file.name, path)
    finally:
        os.unlink(file.name)


_FILE = "last.json"
_LOOK_S = 1.0


class Silence:
    """A thread that looks for silences once a second: after a first call, `silence_s` without an observation."""

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
        """Stop, and write where the rank stands at the end of its program, and whether an exception ended it."""
        self._stopped.set()
        kind: type[BaseException] | None = getattr(sys, "last_type", None)
        ended = "its program ended" if kind is None else f"its program raised {kind.__name__}"
        with suppress(OSError, RuntimeError):
            self._part.replace(_FILE, self._describe_last_calls(0.0, ended))

    def _look(self) -> None:
        seen, since_s, written = -1, time.monotonic(), False
        while not self._stopped.wait(min(_LOOK_S, self._limit_s / 4)):
            with suppress(OSError, RuntimeError):  # a full disk, a changing table: the next time may succeed
                if self._stream.stirred != seen:
                    seen, since_s = self._stream.stirred, time.monotonic()
                    if written:
                        self._part.remove(_FILE)
                    written = False
                elif not written and self._stream.calls and time.monotonic() - since_s >= self._limit_s:
                    self._part.replace(_FILE, self._describe_last_calls(time.monotonic() - since_s, ""))
                    written = True

    def _describe_last_calls(self, silent_s: float, ended: str) -> dict[str, object]:
        """The last calls as `records` (harness.traces.hangs.RECORD), and each of their kinds once
        (harness.traces.hangs.KIND).

        `stack`: the lines of the program's own code that its first thread is in, innermost first.
        """
        last, frame = list(self._stream.last), None if ended else sys._current_frames().get(self._main)
        lines = [] if frame is None else traceback.extract_stack(frame)
        own = (line for line in reversed(lines) if is_user(line.filename))
        stack = [f"{shorten_path(line.filename)}:{line.lineno} in {line.name}" for line in own]
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
            "records": [
                (kinds.setdefault(_kind(call), len(kinds)), call.number, call.ticket, *call.site[:2]) for call in last
            ],
            "kinds": list(kinds),
            "numbers": self._stream.numbers(),
            "stack": stack,
        }


def _kind(call: PastCall) -> tuple[object, ...]:
    """Fields of a call, as harness.traces.hangs.KIND."""
    issued, site, signature = call.issued, call.site, call.issued.signature
    root, peer = (issued.call.peer, -1) if signature.root >= 0 else (-1, issued.call.peer)
    caller = "" if call.caller is None else str(Caller(*call.caller))
    return (
        *(issued.group, call.axis, signature.op, signature.reduce_op, signature.dtype, shape_text(signature.shapes)),
        *(root, peer, site.phase, site.region, caller),
    )
