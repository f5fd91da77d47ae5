"""nvtx ranges of a run, in the domain `shardproof`: steps, phases, modules and collectives, for Nsight Systems.

| what       | message                                  | category | payload       | kind                    |
|------------|------------------------------------------|----------|---------------|-------------------------|
| step       | "step 0"                                 | step     | the step      | start / end             |
| phase      | the ledger's word                        | phase    | -             | start / end             |
| module     | its region                               | module   | -             | push / pop              |
| collective | region, op: "layers.0.mlp.w1 all_reduce" | see below | payload bytes | push / pop; async: mark |
| rank       | JSON: rank, pid ... and number of calls  | rank     | -             | mark, first and last    |

A collective's category is its op, the global ranks of its group and its dtype, "all_reduce 0,1 float32": a range has
room for one number, the bytes. If the ranges are `waiting`, they are drawn only inside `draw_rank`. The last mark of a
rank has the number of its calls since the first. A step's range begins with its first forward and ends with its
optimizer step. The time after a backward or a step has no phase yet, since the phase follows from later events
(harness.recording.attribution). An async collective is a mark, since no range may claim a time that is not measured.
"""

import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import nvtx

from shardproof.harness.errors import MachineError
from shardproof.harness.ledger import Call
from shardproof.harness.recording.annotations import TOOL
from shardproof.harness.recording.attribution import Attribution
from shardproof.harness.recording.observations import Entered, Issued, Left, Observation, Stepped

DOMAIN = "shardproof"
_DRAWN, _HIDDEN = -1, -2
"""Modules among the open ranges of a lane: those with a range, and those without one, since their path is "" or that of
the module around them, or since they were entered while nothing was drawn.
"""


def open_domain() -> Any:
    """The nvtx domain, which records when a tool is attached and costs next to nothing when none is.

    nvtx >= 0.2.12 needs an Nsight Systems that knows whether a domain is enabled. Under others (2022.4, 2023.2) it
    hands out a domain that drops everything silently. Then a domain is made without asking. Raises MachineError
    when a tool is attached and the domain would still drop everything.
    """
    domain = nvtx.get_domain(DOMAIN)
    if os.environ.get(TOOL) and _drops(domain):
        domain = _asking_nobody()
        if _drops(domain):
            raise _useless(f"records nothing for the tool in {TOOL}: {os.environ[TOOL]!r}")
    return domain


def attached_ranges() -> "Ranges | None":
    """Ranges for the profiler that listens to this process (Nsight Systems); None if none does."""
    return Ranges(open_domain()) if os.environ.get(TOOL) else None


def _drops(domain: object) -> bool:
    return type(domain).__name__ == "DummyDomain"


def _asking_nobody() -> Any:
    """An nvtx domain that does not check whether it is enabled. Uses private names, tested for each version."""
    try:

        class Direct(nvtx.Domain):
            def __new__(cls, name: str) -> "Direct":
                made = object.__new__(cls)
                made.handle = nvtx._lib.lib.DomainHandle(name)
                return made

        return Direct(DOMAIN)
    except (AttributeError, TypeError) as error:
        raise _useless(f"has changed inside, and the attached tool needs the old inside ({error})") from error


def _useless(why: str) -> MachineError:
    words = f"nvtx {importlib.metadata.version('nvtx')} {why}. Update Nsight Systems, or install nvtx==0.2.11"
    return MachineError(words)


class Ranges:
    """Records what a recorder observes as ranges of an nvtx domain: `Recorder(..., ranges=Ranges(open_domain()))`."""

    def __init__(self, domain: Any, *, waiting: bool = False) -> None:
        self._domain = domain
        self._waiting = waiting
        self._ranks: dict[int, _Drawing] = {}
        self._facts: dict[int, dict[str, Any]] = {}

    def of(self, rank: int) -> Callable[[Observation], None]:
        """The function that receives a rank's observations."""
        return self._ranks.setdefault(rank, _Drawing(self._domain)).draw

    def on_completion(self, rank: int, ticket: int) -> None:
        """A call has completed: end its range."""
        self._ranks[rank].on_completion(ticket)

    @contextmanager
    def on_rank(self, rank: int, **facts: Any) -> Iterator[None]:
        """While this rank's program runs. All of it is recorded, unless the ranges are waiting."""
        self._facts[rank] = {"rank": rank, "pid": os.getpid(), **facts}
        with nullcontext() if self._waiting else self.draw_rank(rank):
            yield

    @contextmanager
    def draw_rank(self, rank: int) -> Iterator[None]:
        """Begin with a mark that identifies the rank; at the end close open ranges and mark its number of calls."""
        drawing = self._ranks.setdefault(rank, _Drawing(self._domain))
        drawing.mark("rank", self._facts[rank])
        drawing.draws = True
        try:
            yield
        finally:
            drawing.close()
            drawing.mark("rank", {"rank": rank, "calls": drawing.calls})


class _Drawing:
    """The open ranges of one rank."""

    def __init__(self, domain: Any) -> None:
        self.calls = 0
        self.draws = False
        self._domain = domain
        self._attribution = Attribution()
        self._phase: tuple[str, Any] | None = None
        self._step: Any = None
        self._pushed: dict[int, list[int]] = {}  # lane -> open modules and tickets of calls, innermost last
        self._lane_of: dict[int, int] = {}
        self._known: dict[tuple[str, str, int | None], Any] = {}

    def draw(self, seen: Observation) -> None:
        """Draw one observation."""
        above = self._attribution.current(seen.lane).region if isinstance(seen, Entered) else ""
        if isinstance(seen, Left):
            self._leave(seen.lane)
        updates = self._attribution.updates
        self._attribution.feed(seen)
        if not self.draws:
            if isinstance(seen, Entered):
                self._pushed.setdefault(seen.lane, []).append(_HIDDEN)
            return
        if self._attribution.updates > updates:
            self._switch("step")  # an update by hand has no duration
            self._switch("")
        site = self._attribution.current(seen.lane)
        if site.phase == "forward" and self._step is None:
            self._step = self._domain.start_range(self._says(f"step {site.step}", "step", site.step))
        self._switch(site.phase)
        if isinstance(seen, Entered):
            drawn = site.region not in {"", above}
            self._pushed.setdefault(seen.lane, []).append(_DRAWN if drawn else _HIDDEN)
            if drawn:
                self._domain.push_range(self._says(site.region, "module"))
        elif isinstance(seen, Issued) and (seen.graphed is None or seen.graphed.replay < 0):
            self._call(seen)
        elif isinstance(seen, Stepped) and self._step is not None:
            self._domain.end_range(self._step)
            self._step = None

    def on_completion(self, ticket: int) -> None:
        """End the range of a call, if it has one that is still open."""
        pushed = self._pushed.get(self._lane_of.pop(ticket, -1), [])
        if pushed and pushed[-1] == ticket:
            pushed.pop()
            self._domain.pop_range()

    def close(self) -> None:
        """End all open ranges, and record no more."""
        pushed = self._pushed.pop(0, [])
        for one in pushed:
            if one != _HIDDEN:
                self._domain.pop_range()
        self._pushed[0] = [_HIDDEN for one in pushed if one in {_DRAWN, _HIDDEN}]
        self._switch("")
        if self._step is not None:
            self._domain.end_range(self._step)
            self._step = None
        self.draws = False

    def mark(self, category: str, facts: dict[str, Any]) -> None:
        """Mark an instant with facts as JSON."""
        self._domain.mark(self._says(json.dumps(facts), category))

    def _says(self, message: str, category: str, payload: int | None = None) -> Any:
        key = (message, category, payload)
        if key not in self._known:
            self._known[key] = self._domain.get_event_attributes(message=message, category=category, payload=payload)
        return self._known[key]

    def _switch(self, phase: str) -> None:
        if phase == (self._phase[0] if self._phase else ""):
            return
        if self._phase:
            self._domain.end_range(self._phase[1])
        self._phase = (phase, self._domain.start_range(self._says(phase, "phase"))) if phase else None

    def _leave(self, lane: int) -> None:
        pushed = self._pushed[lane]
        while pushed:
            innermost = pushed.pop()
            if innermost != _HIDDEN:
                self._domain.pop_range()
            if innermost in {_DRAWN, _HIDDEN}:
                return

    def _call(self, seen: Issued) -> None:
        self.calls += 1
        call: Call = seen.call
        site = self._attribution.sites[seen.ticket]
        if site.phase:  # the call itself has a phase: metric, or one that the subject stated
            self._switch(site.phase)
        category = f"{call.op} {','.join(map(str, call.group))} {call.dtype}".strip()
        says = self._says(f"{site.region} {call.op}".strip(), category, call.payload_bytes)
        if call.is_async:
            self._domain.mark(says)
            return
        self._domain.push_range(says)
        self._pushed.setdefault(seen.lane, []).append(seen.ticket)
        self._lane_of[seen.ticket] = seen.lane
