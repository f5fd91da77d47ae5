"""Where a collective call belongs: step, micro-batch, phase and module path, inferred from what happened around it.

Input: the observations of one rank in order: modules entered and left, optimizer steps, gradients arriving at outputs,
calls. Output: one Site a call. Nothing here touches the program: a backward call finds its module by the sequence
number that autograd gave the running node when the forward made it, since these numbers grow along the forward of a
thread and the forward of every module spans a stretch of them.

A call made outside of modules, optimizer and backward is loss when a model's forward was the last thing that happened.
Otherwise what follows settles it: data before a forward, grad_sync before an optimizer step; at the end of the run
metric after a step, grad_sync after a backward, data after nothing. Metric is also what a module without parameters
does with gradients off, once a forward with gradients on has been; an evaluation without gradients keeps its loss.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from harness.recording.naming import Paths
from harness.recording.observations import (
    LEAF,
    OUTSIDE,
    Arrived,
    Ended,
    Entered,
    Issued,
    Left,
    Observation,
    Stepped,
    Stepping,
)

__all__ = ["Attribution", "Site"]


class Site(NamedTuple):
    """Where something belongs. Steps and micro-batches count from 0; `phase` is "" while it is not settled."""

    step: int
    microbatch: int
    phase: str
    region: str


class _Frame(NamedTuple):
    """A module's forward (`counts`: one that makes a micro-batch) or an optimizer's step that is going on."""

    site: Site
    task: int
    counts: bool = False
    steps: bool = False


class _Lane:
    """One thread of the rank: what is going on, and which stretch of node numbers belongs to which site."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.numbers: list[int] = []
        self.sites: list[Site] = []
        self.latest: Site | None = None

    def mark(self, number: int, site: Site) -> None:
        """Nodes from this number on belong to the site."""
        self.numbers.append(number)
        self.sites.append(site)

    def made(self, node: int) -> Site | None:
        """The site whose forward made this node, None when it is older than every mark."""
        index = bisect_right(self.numbers, node) - 1
        return self.sites[index] if index >= 0 else None


class Attribution:
    """The sites of one rank's calls, from its observations in order; `sites` maps tickets to sites."""

    def __init__(self) -> None:
        self.sites: dict[int, Site] = {}
        self.paths = Paths()
        self.step = 0
        self.microbatch = 0
        self._since = ""  # what was last outside of calls: "" forward inside (a backward) backward stepped
        self._gradients_on = False
        self._stepped_since = False
        self._counts: dict[int, int] = {}
        self._pending: list[tuple[int, Site, str]] = []
        self._lanes: dict[int, _Lane] = {0: _Lane()}
        self._made_in: dict[int, int] = {}

    @classmethod
    def of(cls, observations: Iterable[Observation]) -> Attribution:
        """Read a whole run: its end settles what is open, and all its models are known from the start."""
        observations = list(observations)
        attribution = cls()
        for seen in observations:
            if isinstance(seen, Entered) and seen.outermost:
                attribution.paths.add(seen.module)
            elif isinstance(seen, Arrived):
                attribution._made_in[seen.task] = seen.made_in
        for seen in observations:
            attribution.feed(seen)
        attribution._settle("")
        return attribution

    def feed(self, seen: Observation) -> None:
        """Take the next observation of the rank."""
        _FEED[type(seen)](self, self._lane(seen.lane), seen)

    def current(self, lane: int) -> Site:
        """What is going on in a lane; the phase is "" between a backward or a step and what follows it."""
        frame = self._above(self._lane(lane), OUTSIDE)
        if frame is not None and frame.site.phase:
            return frame.site
        return self._here({"forward": "loss", "inside": "backward"}.get(self._since, ""))

    def _lane(self, number: int) -> _Lane:
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane()
        return lane

    def _here(self, phase: str, region: str = "") -> Site:
        return Site(self.step, self.microbatch, phase, region)

    def _above(self, lane: _Lane, task: int) -> _Frame | None:
        """The innermost frame; another thread of the rank works for whatever the first thread is doing."""
        frames = lane.frames or (self._lanes[0].frames if task == OUTSIDE else [])
        return frames[-1] if frames else None

    def _made(self, lane: _Lane, task: int, node: int) -> Site:
        """The site whose forward made the running node; the latest such site when no numbered node runs."""
        if node not in {OUTSIDE, LEAF}:
            # A backward inside a backward (reentrant checkpointing) runs nodes that its own thread made.
            made_in = self._made_in.get(task)
            table = lane if made_in is None else self._lanes[made_in]
            made = table.made(node) or self._lanes[0].made(node)
            if made is not None:
                lane.latest = made
                return made
        return (lane.latest or self._here(""))._replace(region="")

    def _entered(self, lane: _Lane, seen: Entered) -> None:
        above = self._above(lane, seen.task)
        counts = False
        if seen.task != OUTSIDE and (above is None or above.task != seen.task):
            self._since = "inside"
            made = self._made(lane, seen.task, seen.node)
            site = made._replace(phase="recompute", region=self.paths.module(seen.module, made.region))
        elif above is None or above.steps:
            counts = next(seen.module.parameters(), None) is not None
            if counts:
                self._forward(seen)
            # A module without parameters has no phase of its own: its calls are settled like those around it.
            site = self._here("forward" if counts else "", self.paths.module(seen.module, ""))
        else:
            step, microbatch, phase, region = above.site
            site = Site(step, microbatch, phase, self.paths.module(seen.module, region))
        lane.frames.append(_Frame(site, seen.task, counts))
        lane.mark(seen.number, site)

    def _forward(self, seen: Entered) -> None:
        """A model's forward begins: a new step after an optimizer step, the next micro-batch of this model."""
        self.paths.add(seen.module)
        if self._stepped_since:
            self.step += 1
            self._stepped_since = False
            self._counts.clear()
        self.microbatch = self._counts.get(id(seen.module), 0)
        self._counts[id(seen.module)] = self.microbatch + 1
        self._gradients_on = seen.grad
        self._since = "entered"
        self._settle("data")

    def _left(self, lane: _Lane, seen: Left) -> None:
        frame = lane.frames.pop()
        if frame.counts:
            self._since = "forward"
        lane.mark(seen.number, lane.frames[-1].site if lane.frames else frame.site._replace(region=""))

    def _arrived(self, lane: _Lane, seen: Arrived) -> None:
        self._since = "inside"
        self._made_in[seen.task] = seen.made_in
        self._made(lane, seen.task, seen.node)

    def _ended(self, _lane: _Lane, _seen: Ended) -> None:
        self._since = "backward"

    def _stepping(self, lane: _Lane, seen: Stepping) -> None:
        self._settle("grad_sync")
        steps = [place for place, frame in enumerate(lane.frames) if frame.steps]
        if len(steps) > seen.depth:
            del lane.frames[steps[seen.depth] :]  # a step that raised, so that it never ended
        lane.frames.append(_Frame(self._here("step"), seen.task, steps=True))

    def _stepped(self, lane: _Lane, _seen: Stepped) -> None:
        lane.frames.pop()
        self._since = "stepped"
        self._stepped_since = True

    def _issued(self, lane: _Lane, seen: Issued) -> None:
        said_phase, said_region = seen.override
        above = self._above(lane, seen.task)
        if above is not None and above.task == seen.task:
            site = above.site
        elif seen.task != OUTSIDE:
            site = self._in_backward(lane, seen)
        else:
            site = self._here("")
        if seen.task == OUTSIDE and self._since == "inside":
            self._since = "backward"
        if not site.phase and seen.quiet and self._gradients_on:
            site = site._replace(phase="metric")
        elif not site.phase and self._since == "forward":
            site = site._replace(phase="loss")
        if not site.phase or (said_phase == "data" and site.phase == "loss"):
            self._pending.append((seen.ticket, site._replace(phase=said_phase or ""), self._since))
        if said_phase:
            site = site._replace(phase=said_phase)
        self.sites[seen.ticket] = site if said_region is None else site._replace(region=said_region)

    def _in_backward(self, lane: _Lane, seen: Issued) -> Site:
        self._since = "inside"
        site = self._made(lane, seen.task, seen.node)
        if not site.region and seen.outer != OUTSIDE:
            # Made by a plain function that was run again: it stands where the node that ran it stands.
            site = self._lanes[0].made(seen.outer) or site
        if seen.node == LEAF:
            site = site._replace(region=self.paths.parameter(seen.parameter))
        return site._replace(phase="recompute" if seen.again else "backward")

    def _settle(self, by: str) -> None:
        """What follows has come, "" for the end: name the phase of what waited. Data belongs to the coming batch."""
        for ticket, site, since in self._pending:
            settled = site.phase or by or _LAST.get(since, "data")
            then = self._here(settled) if settled == "data" else site._replace(phase=settled)
            self.sites[ticket] = then._replace(region=self.sites[ticket].region)
        self._pending.clear()


_LAST = {"backward": "grad_sync", "stepped": "metric"}
"""The phase of calls that nothing follows, by what went before them."""
_FEED: dict[type, Callable[[Attribution, _Lane, Any], None]] = {
    Entered: Attribution._entered,
    Left: Attribution._left,
    Arrived: Attribution._arrived,
    Ended: Attribution._ended,
    Stepping: Attribution._stepping,
    Stepped: Attribution._stepped,
    Issued: Attribution._issued,
}
