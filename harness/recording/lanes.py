"""Lanes of a rank: what each of its threads is doing, and which autograd nodes belong to which site. Also which calls
wait for what follows them, and what a call itself shows.

A call outside of modules, optimizer and backward is loss if a model's forward was the last thing before it. Otherwise
what follows settles it: it is data before a forward, and grad_sync before an optimizer step. If nothing follows, it is
metric after a step and grad_sync after a backward; else it is forward if autograd computed what is sent, or data.
Float reductions of several elements after a backward are grad_sync even before a forward, since engines reduce between
micro-batches too. Calls in a module without parameters while gradients are off are metric, if gradients were on in the
latest forward. So the loss of an evaluation without gradients stays loss.

Without an optimizer of torch.optim, a change of the parameters after a backward is a step (observations.Looks). After a
step the reduction of one element is metric. Calls that write into a parameter's memory, and all_gathers of half the
parameters' bytes or more, belong to the step. Such gathers are checkpoint if the first update has none. Collectives by
which torch saves or loads a state are checkpoint, and so are full copies of DTensors after a step. A barrier is metric,
but data before the first forward. A send or recv is pipeline in a group of stages; outside of modules, optimizer and
backward, it is pipeline in a group without a description too.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from shardproof.harness.mesh_axes import PIPELINE
from shardproof.harness.recording.annotations import Override
from shardproof.harness.recording.naming import group_word
from shardproof.harness.recording.observations import LEAF, OUTSIDE

_MARKS = 1 << 16
"""The most module calls of a thread whose backward can still be placed."""
_TASKS = 1024
"""The most backwards whose nodes can still be placed."""


class Site(NamedTuple):
    """Where something belongs. Steps and micro-batches count from 0; `phase` is "" until it is settled."""

    step: int
    microbatch: int
    phase: str
    region: str


class Frame(NamedTuple):
    """A module's call, or an optimizer's step, in progress. `counts`: an outermost forward with parameters."""

    site: Site
    task: int
    counts: bool = False
    steps: bool = False


class Lane:
    """A thread of the rank: what it is doing, and which range of node numbers belongs to which site."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.numbers: list[int] = []
        self.sites: list[Site] = []
        self.latest: Site | None = None

    def mark(self, number: int, site: Site) -> None:
        """Record that nodes from this number on belong to the site."""
        self.numbers.append(number)
        self.sites.append(site)

    def find_site_of_node(self, node: int) -> Site | None:
        """The site whose forward made this node; None if it is older than all marks."""
        index = bisect_right(self.numbers, node) - 1
        return self.sites[index] if index >= 0 else None


class Lanes(defaultdict[int, Lane]):
    """The lanes of a rank by number. `made_in` has, by task, the lane in which the nodes of a backward were made."""

    def __init__(self) -> None:
        super().__init__(Lane)
        self.made_in: dict[int, int] = {}

    def above(self, lane: Lane, task: int) -> Frame | None:
        """The innermost frame of a lane. Outside of backward, one without frames works for what lane 0 is doing."""
        frames = lane.frames or (self[0].frames if task == OUTSIDE else [])
        return frames[-1] if frames else None

    def find_site_of_node(self, lane: Lane, task: int, node: int) -> Site | None:
        """The site whose forward made the running node; None if no numbered node runs or none is known."""
        if node in {OUTSIDE, LEAF}:
            return None
        # A backward inside a backward (reentrant checkpointing) runs nodes that its own thread made.
        made_in = self.made_in.get(task)
        return (lane if made_in is None else self[made_in]).find_site_of_node(node) or self[0].find_site_of_node(node)

    def forget(self) -> None:
        """Drop the oldest marks and backwards if there are too many."""
        for lane in self.values():
            if len(lane.numbers) > 2 * _MARKS:
                del lane.numbers[:-_MARKS], lane.sites[:-_MARKS]
        for task in list(self.made_in)[:-_TASKS]:
            del self.made_in[task]


class Waiting(NamedTuple):
    """A call that is settled by what follows it: its phase if that is "", else only its step and micro-batch.

    `since`: what happened last before it, as in Attribution.
    """

    ticket: int
    site: Site
    since: str
    call: Any

    @property
    def alone(self) -> bool:
        """Whether neither what the call sends nor anything before it shows its phase."""
        return not self.site.phase and not self.since and not self.call.computed

    @property
    def gathers(self) -> bool:
        """Whether a call after a backward may gather updated parameters."""
        after = self.since in {"backward", "stepped"}
        return not self.site.phase and after and self.call.op == "all_gather" and "float" in self.call.dtype

    @property
    def reduces(self) -> bool:
        """Whether a call without a phase may reduce gradients."""
        return not self.site.phase and self.call.op in {"all_reduce", "reduce", "reduce_scatter"}

    def phase(self, by: str, *, gathers_parameters: bool) -> str:
        """The phase of a call by what follows it: data, grad_sync, or "" for the end."""
        if self.site.phase:
            return self.site.phase
        if self.since == "stepped" and gathers_parameters:
            return "step"
        if self.since == "stepped" and by == "data" and is_scalar(self.call):
            return "metric"
        if self.since == "backward" and by == "data" and self.reduces and not is_scalar(self.call):
            return "grad_sync" if "float" in self.call.dtype else by
        # Batches, gradients and parameters have no node of autograd.
        at_end = "forward" if self.call.computed else "data"
        return by or {"backward": "grad_sync", "stepped": "metric"}.get(self.since, at_end)


def is_hop(call: Any, *, outside: bool) -> bool:
    """Whether a call is a message between the stages of a pipeline."""
    if call.op not in {"send", "recv"}:
        return False
    word = group_word(call.group_desc)
    return word == PIPELINE or (outside and not word)


def place_message(op: str, site: Site, since: str, of_backward: Site) -> tuple[Site, bool, str]:
    """The site of a message between stages, whether its micro-batch is that of what follows, and what happened last.

    `since` as in Attribution; `of_backward` is the site of the latest backward.
    """
    if site.phase:
        return site._replace(phase="pipeline"), False, since
    sends = op == "send" and since in {"forward", "sent", "backward"}
    if sends and since == "backward":
        return of_backward._replace(phase="pipeline", region=site.region), False, since
    # What is received is for another computation, so the loss is over.
    after = "sent" if sends or since == "forward" else since
    return site._replace(phase="pipeline"), not sends, after


def phase_between(
    call: Any, since: str, *, quiet: bool, by_hand: bool, copies: bool, is_parameter: Callable[[int], bool] | None
) -> str:
    """The phase of a call outside of modules, optimizer and backward; "" if what follows settles it.

    `since` as in Attribution. `by_hand`: no optimizer of torch.optim steps. `copies`: it gathers a full copy of a
    DTensor. `is_parameter`: whether an address is a parameter's.
    """
    if quiet:
        return "metric"
    if call.op == "barrier":  # it belongs to no computation, so what the rank does before or after it says nothing
        return "metric" if since else "data"
    if since == "forward":
        return "loss"
    if since == "stepped" and not by_hand and is_scalar(call):
        return "metric"
    if since == "stepped" and not by_hand and copies:  # the step is over, and a copy updates nothing
        return "checkpoint"
    return (
        "step" if since in {"stepped", "backward"} and is_parameter is not None and is_parameter(call.address) else ""
    )


def stated_site(override: Override, call: Any) -> Override:
    """The phase and region that the subject states for a call. In a group described as checkpoint the phase is that."""
    phase, region = override
    return (phase or ("checkpoint" if group_word(call.group_desc) == "checkpoint" else None)), region


def is_scalar(call: Any) -> bool:
    """Whether a call reduces one element."""
    return call.op in {"all_reduce", "reduce"} and sum(math.prod(shape) for shape in call.shapes) == 1
