"""Where a collective call belongs: step, micro-batch, phase and module path, inferred from what happened around it.

The input is the observations of one rank in order: modules entered and left, optimizer steps, gradients arriving at
outputs, calls. The output is one Site for each call. The program itself is not touched.

The module of a call in backward follows from the sequence number that autograd gave the running node when forward made
it. These numbers increase along the forward of a thread, so the forward of every module has a range of them. lanes.py
describes the phase of calls outside of modules, optimizer and backward.
"""

from collections.abc import Callable, Iterable
from typing import Any

from shardproof.harness.ledger import AGAIN, EITHER_GATHER, NO_PHASE, NO_UPDATE
from shardproof.harness.recording.lanes import (
    Frame,
    Lane,
    Lanes,
    Site,
    Waiting,
    is_hop,
    phase_between,
    place_message,
    stated_site,
)
from shardproof.harness.recording.naming import Paths
from shardproof.harness.recording.observations import (
    LEAF,
    OUTSIDE,
    Arrived,
    Ended,
    Entered,
    Finished,
    Graphed,
    Issued,
    Left,
    Look,
    Observation,
    ParameterMemory,
    Stepped,
    Stepping,
    differ,
)

_PENDING = 4096
"""When more calls wait than this, `forget` settles them. In a program without forwards and steps nothing else would."""
_AFTER_UPDATE = {"step", "metric", "checkpoint"}  # phases of calls that do not begin a step


class Attribution:
    """The sites of one rank's calls, from its observations in order. `sites` has them by ticket; those of the calls in
    `pending` are not settled.
    """

    def __init__(self) -> None:
        self.sites: dict[int, Site] = {}
        self.paths = Paths()
        self.step = self.microbatch = 0
        self.forwards: list[tuple[Entered, int, int]] | None = None  # if a whole run is read, with step, micro-batch
        # What happened last: "entered" (a model), "forward" (it returned), "sent" (then a message between stages),
        # "inside" (a backward), "backward" (it ended) or "stepped". Other calls do not count.
        self._since = ""
        self._gradients_on = self._stepped_since = self._backward_since = self._stepless = False
        self._by_hand = True  # while no optimizer of torch.optim has stepped
        self._look: Look = ()
        self._counts: dict[tuple[int, bool], int] = {}
        self._replays: dict[str, int] = {}  # by graph: its first replay in this step
        self.pending, self._unsure = list[Waiting](), dict[int, str]()  # why the phase of calls is uncertain
        self._updates_gather: bool | None = None  # whether the first update gathered parameters; known after it
        # Steps known by changed parameters alone; the micro-batch of the latest backward.
        self.updates = self._backward_of = 0
        self.returned: set[tuple[int, int]] = set()  # (step, micro-batch) of forwards that a backward followed
        self._memory, self._lanes = ParameterMemory(), Lanes()

    @classmethod
    def of(cls, observations: Iterable[Observation]) -> "Attribution":
        """Read a whole run: its end settles the calls that still wait, and all models are known from the start."""
        observations, attribution = list(observations), cls()
        attribution.forwards = []
        for seen in observations:
            if isinstance(seen, Entered) and seen.outermost:
                attribution.paths.add(seen.module)
            elif isinstance(seen, Arrived):
                attribution._lanes.made_in[seen.task] = seen.made_in
            elif isinstance(seen, Stepped):
                attribution._by_hand = False
            elif isinstance(seen, Finished):
                attribution._memory.moved |= seen.moved
        for seen in observations:
            attribution.feed(seen)
        attribution.settle("")
        return attribution

    def feed(self, seen: Observation) -> None:
        """Take the next observation of the rank."""
        _FEED[type(seen)](self, self._lanes[seen.lane], seen)

    @property
    def stepless(self) -> bool:
        """Whether forwards followed backwards without any update that could be observed."""
        return self._stepless and not self.updates

    def doubts(self, ticket: int) -> tuple[str, ...]:
        """Why the step or the phase of a call is uncertain, in words."""
        return (*[NO_UPDATE] * self.stepless, *filter(None, [self._unsure.get(ticket)]))

    def forget(self) -> None:
        """Drop what no later backward needs. Recorders of long programs call this now and then."""
        self._lanes.forget()
        self._unsure.clear()
        if len(self.pending) > _PENDING:
            self.settle("")

    def current(self, lane: int) -> Site:
        """The current site of a lane; its phase is "" between a backward or a step and what follows."""
        frame = self._lanes.above(self._lanes[lane], OUTSIDE)
        if frame is not None and frame.site.phase:
            return frame.site
        return self._here({"forward": "loss", "inside": "backward"}.get(self._since, ""))

    def raised_at(self, *, in_backward: bool, node: int) -> Site:
        """Where the rank's own thread was when an exception ended its program. No `Left` by it may have been fed.

        `in_backward`: the exception passed through a backward. `node` is the node that raised, OUTSIDE if unknown.
        """
        frame = self._lanes.above(self._lanes[0], OUTSIDE)
        if frame is not None and frame.site.phase:
            return frame.site
        if in_backward:
            made = self._lanes.find_site_of_node(self._lanes[0], OUTSIDE, node)
            return (made or self._here(""))._replace(phase="backward")
        # "inside" too: that a backward has ended shows only in what follows it, and here nothing has followed.
        return self._here({"forward": "loss", "inside": "grad_sync", "backward": "grad_sync"}.get(self._since, ""))

    def _here(self, phase: str, region: str = "") -> Site:
        return Site(self.step, self.microbatch, phase, region)

    def _find_site_of_node(self, lane: Lane, task: int, node: int) -> Site:
        """The site whose forward made the running node; the latest such site if no numbered node runs."""
        if made := self._lanes.find_site_of_node(lane, task, node):
            lane.latest = made
            return made
        return (lane.latest or self._here(""))._replace(region="")

    def _on_enter(self, lane: Lane, seen: Entered) -> None:
        above = self._lanes.above(lane, seen.task)
        counts = False
        if seen.task != OUTSIDE and (above is None or above.task != seen.task):
            self._since = "inside"
            made = self._find_site_of_node(lane, seen.task, seen.node)
            site = made._replace(phase=AGAIN, region=self.paths.module(seen.module, made.region))
        elif above is None or above.steps:
            counts = next(seen.module.parameters(), None) is not None
            self._compare(seen.look)
            if counts and (self._stepped_since or not self.paths.is_part(seen.module, self._counts)):
                self._forward(seen)
                # In a step with a closure, forward and backward are of the step that has begun.
                if lane.frames and lane.frames[-1].steps:
                    lane.frames[-1] = lane.frames[-1]._replace(site=self._here("step"))
            # Calls in a module without parameters have the phase of the calls around it.
            site = self._here("forward" if counts else "", self.paths.module(seen.module, ""))
        else:
            step, microbatch, phase, region = above.site
            site = Site(step, microbatch, phase, self.paths.module(seen.module, region))
        lane.frames.append(Frame(site, seen.task, counts))
        lane.mark(seen.number, site)

    def _forward(self, seen: Entered) -> None:
        """A model's forward begins: in a new step after an optimizer step, else in the model's next micro-batch."""
        self.paths.add(seen.module)
        if self._stepped_since:
            self._next_step()
        self._stepless = self._by_hand and (self._stepless or self._backward_since)
        counted = id(seen.module), seen.grad  # an evaluation between micro-batches is no micro-batch
        self.microbatch = self._counts.get(counted, 0)
        self._counts[counted] = self.microbatch + 1
        if self.forwards is not None:
            self.forwards.append((seen, self.step, self.microbatch))
        self._gradients_on = seen.grad
        self._since = "entered"
        self.settle("data")

    def _compare(self, look: Look) -> None:
        """Take it for a step if parameters changed since the last look and a backward came before. Further changes
        belong to the same step.
        """
        before, self._look = self._look, look or self._look
        if not self._by_hand or not differ(before, self._look):
            return
        if self._backward_since:
            self._unsure |= {waiting.ticket: EITHER_GATHER for waiting in self.pending if waiting.gathers}
            self.settle("grad_sync")
            self._on_update()
            self.updates += 1
        elif self._since == "stepped":
            self._resolve(lambda waiting: waiting.reduces, phase="grad_sync")

    def _on_update(self) -> None:
        self._since = "stepped"
        self._stepped_since, self._backward_since = True, False

    def _on_leave(self, lane: Lane, seen: Left) -> None:
        frame = lane.frames.pop()
        if frame.counts:
            self._since = "forward"
        lane.mark(seen.number, lane.frames[-1].site if lane.frames else frame.site._replace(region=""))

    def _on_arrival(self, lane: Lane, seen: Arrived) -> None:
        self._since = "inside"
        self._backward_since = True
        self._lanes.made_in[seen.task] = seen.made_in
        made = self._find_site_of_node(lane, seen.task, seen.node)
        self._backward_of = made.microbatch
        self.returned.add((made.step, made.microbatch))
        self._resolve(lambda waiting: waiting.site.phase == "pipeline", microbatch=self._backward_of)

    def _on_end(self, _lane: Lane, _seen: Ended) -> None:
        self._since = "backward"

    def _on_step_begin(self, lane: Lane, seen: Stepping) -> None:
        self.settle("grad_sync")
        steps = [place for place, frame in enumerate(lane.frames) if frame.steps]
        if len(steps) > seen.depth:
            del lane.frames[steps[seen.depth] :]  # a step that raised, so that its end was not observed
        lane.frames.append(Frame(self._here("step"), seen.task, steps=True))

    def _on_step_end(self, lane: Lane, seen: Stepped) -> None:
        lane.frames.pop()
        self._by_hand = False
        if not seen.captured:
            self._on_update()

    def _on_issue(self, lane: Lane, seen: Issued) -> None:
        if seen.graphed is not None and seen.graphed.replay >= 0:
            self._on_replay(lane, seen, seen.graphed)
            return
        stated_phase, stated_region = stated_site(seen.override, seen.call)
        self._compare(seen.look)
        above = self._lanes.above(lane, seen.task)
        if above is not None and above.task == seen.task:
            site = above.site
        elif seen.task != OUTSIDE:
            site = self._in_backward(lane, seen)
        else:
            site = self._here("")
        if seen.task == OUTSIDE and self._since == "inside":
            self._since = "backward"
        waits = False
        if is_hop(seen.call, outside=not site.phase):
            of_backward = Site(self.step, self._backward_of, "", "")
            site, waits, self._since = place_message(seen.call.op, site, self._since, of_backward)
        elif not site.phase:
            is_parameter = self._memory.of(self.paths.models).holds if seen.call.address else None
            known = {"quiet": seen.quiet and self._gradients_on, "by_hand": self._by_hand, "copies": seen.copies}
            phase = phase_between(seen.call, self._since, is_parameter=is_parameter, **known)
            site = site._replace(phase=phase)
        if waits or not site.phase or (stated_phase == "data" and site.phase == "loss"):
            open_ = stated_phase or ("pipeline" if waits else "")
            self.pending.append(Waiting(seen.ticket, site._replace(phase=open_), self._since, seen.call))
        if stated_phase:
            site = site._replace(phase=stated_phase)
        self.sites[seen.ticket] = site if stated_region is None else site._replace(region=stated_region)

    def _on_replay(self, lane: Lane, seen: Issued, graphed: Graphed) -> None:
        """A call of a CUDA graph: phase and module are those of its capture, the rest follows from the replay."""
        captured, above = self.sites[graphed.captured], self._lanes.above(lane, seen.task)
        for waiting in (one for one in self.pending if one.ticket == graphed.captured):
            captured = captured._replace(phase=waiting.phase("", gathers_parameters=False))
        if above is not None and above.task == seen.task:
            here = above.site
        elif seen.task != OUTSIDE:
            here = self._find_site_of_node(lane, seen.task, seen.node)
        else:
            self._since = {"forward": "forward", "loss": "forward"}.get(captured.phase, "backward")
            if self._stepped_since and captured.phase not in _AFTER_UPDATE:
                self._next_step()
            first = self._replays.setdefault(graphed.graph, graphed.replay)
            here = self._here("")._replace(microbatch=captured.microbatch + graphed.replay - first)
        self.sites[seen.ticket] = captured._replace(step=here.step, microbatch=here.microbatch)

    def _next_step(self) -> None:
        self.step += 1
        self._stepped_since = False
        self._counts.clear()
        self._replays.clear()

    def _in_backward(self, lane: Lane, seen: Issued) -> Site:
        self._since = "inside"
        self._backward_since = True
        site = self._find_site_of_node(lane, seen.task, seen.node)
        if not site.region and seen.outer != OUTSIDE:
            # The call was made while checkpointing ran a plain function again: its site is that of the outer node.
            site = self._lanes[0].find_site_of_node(seen.outer) or site
        if seen.node == LEAF:
            site = site._replace(region=self.paths.parameter(seen.parameter))
        return site._replace(phase=AGAIN if seen.again else "backward")

    def settle(self, by: str) -> None:
        """Settle the phase of waiting calls. `by` is the phase that what follows gives them, "" at the end of the run.
        Calls of data belong to the next micro-batch.
        """
        gathered = {waiting.ticket: waiting.call.payload_bytes for waiting in self.pending if waiting.gathers}
        if gathered and not self._memory.of(self.paths.models).mostly_in(sum(gathered.values())):
            gathered.clear()
        if self._updates_gather is None and (by, self.step) == ("data", 1):
            self._updates_gather = any(one.ticket in gathered and one.since == "stepped" for one in self.pending)
        self._unsure |= {waiting.ticket: NO_PHASE for waiting in self.pending if waiting.alone and not by}
        for waiting in self.pending:
            phase = waiting.phase(by, gathers_parameters=waiting.ticket in gathered)
            if phase == "step" and waiting.ticket in gathered and self._updates_gather is False:
                phase = "checkpoint"  # the first update gathered nothing, and all updates are alike
            coming = phase == "data" or (phase, by) == ("pipeline", "data")
            self._place(waiting, self._here(phase) if coming else waiting.site._replace(phase=phase))
        self.pending.clear()

    def _resolve(self, chosen: Callable[[Waiting], bool], **known: Any) -> None:
        """Place the chosen calls by what is known now; they wait no longer."""
        for waiting in filter(chosen, self.pending):
            self._place(waiting, waiting.site._replace(**known))
        self.pending = [waiting for waiting in self.pending if not chosen(waiting)]

    def _place(self, waiting: Waiting, site: Site) -> None:
        self.sites[waiting.ticket] = site._replace(region=self.sites[waiting.ticket].region)


_FEED: dict[type, Callable[[Attribution, Lane, Any], None]] = {
    Entered: Attribution._on_enter,
    Left: Attribution._on_leave,
    Arrived: Attribution._on_arrival,
    Ended: Attribution._on_end,
    Stepping: Attribution._on_step_begin,
    Stepped: Attribution._on_step_end,
    Issued: Attribution._on_issue,
    Finished: lambda attribution, _lane, seen: attribution._compare(seen.look),
}
