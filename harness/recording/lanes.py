"""Lanes of a rank: what is going on in each of its threads, and which nodes of autograd belong to which place.

Here too: calls that wait for what follows them, and what can be read off a call by itself.

A call made outside of modules, optimizer and backward is loss when a model's forward was the last thing that happened.
Otherwise what follows settles it: data before a forward, grad_sync before an optimizer step. At the end: metric after a
step, grad_sync after a backward, and after nothing forward where autograd computed what is sent, else data. Reductions
of several numbers after a backward are grad_sync even before a forward: engines reduce between micro-batches too.
Metric is also the work of a module without parameters with gradients off, once a forward with gradients on has been. An
evaluation without gradients keeps its loss. Where no optimizer of torch.optim steps, a change of the parameters after a
backward is a step (observations.Looks). After a step one reduced element is metric. Calls that write into a parameter's
memory, and all_gathers of half the parameters' bytes or more, belong to the step. Such gathers are checkpoint where the
first update has none. Collectives by which torch saves or loads a state are checkpoint, and so are full copies of
DTensors after a step. A barrier is metric, before the first forward data. A send or recv is pipeline in a group of
stages, and outside of all of these in a group without a description.
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
"""Module calls of a thread, entered and left, whose backward can still be placed."""
_TASKS = 1024
"""Backwards whose nodes can still be placed."""


class Site(NamedTuple):
    """Where something belongs. Steps and micro-batches count from 0; `phase` is "" while it is not settled."""

    step: int
    microbatch: int
    phase: str
    region: str


class Frame(NamedTuple):
    """A module's forward (`counts`: one that makes a micro-batch) or an optimizer's step that is going on."""

    site: Site
    task: int
    counts: bool = False
    steps: bool = False


class Lane:
    """A thread of the rank: what is going on, and which stretch of node numbers belongs to which site."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.numbers: list[int] = []
        self.sites: list[Site] = []
        self.latest: Site | None = None

    def mark(self, number: int, site: Site) -> None:
        """Nodes from this number on belong to the site."""
        self.numbers.append(number)
        self.sites.append(site)

    def find_site_of_node(self, node: int) -> Site | None:
        """The site whose forward made this node, None when it is older than every mark."""
        index = bisect_right(self.numbers, node) - 1
        return self.sites[index] if index >= 0 else None


class Lanes(defaultdict[int, Lane]):
    """The lanes of a rank by number; `made_in` has the lane in which the nodes of a backward were made, by task."""

    def __init__(self) -> None:
        super().__init__(Lane)
        self.made_in: dict[int, int] = {}

    def above(self, lane: Lane, task: int) -> Frame | None:
        """The innermost frame; another thread of the rank works for whatever the first thread is doing."""
        frames = lane.frames or (self[0].frames if task == OUTSIDE else [])
        return frames[-1] if frames else None

    def find_site_of_node(self, lane: Lane, task: int, node: int) -> Site | None:
        """The site whose forward made the running node, None when no numbered node runs or none is known."""
        if node in {OUTSIDE, LEAF}:
            return None
        # A backward inside a backward (reentrant checkpointing) runs nodes that its own thread made.
        made_in = self.made_in.get(task)
        return (lane if made_in is None else self[made_in]).find_site_of_node(node) or self[0].find_site_of_node(node)

    def forget(self) -> None:
        """Drop the oldest marks and backwards, where there are many."""
        for lane in self.values():
            if len(lane.numbers) > 2 * _MARKS:
                del lane.numbers[:-_MARKS], lane.sites[:-_MARKS]
        for task in list(self.made_in)[:-_TASKS]:
            del self.made_in[task]


class Waiting(NamedTuple):
    """A call that what follows settles: its phase, "" while that is open, or its step and micro-batch alone.

    `since`: what was last before it, as in Attribution.
    """

    ticket: int
    site: Site
    since: str
    call: Any

    @property
    def alone(self) -> bool:
        """Whether nothing came before a call that would show its phase, nor does what it sends."""
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
        """The phase of a call that is settled `by` what follows: data, grad_sync, or the end, ""."""
        if self.site.phase:
            return self.site.phase
        if self.since == "stepped" and gathers_parameters:
            return "step"
        if self.since == "stepped" and by == "data" and is_scalar(self.call):
            return "metric"
        if self.since == "backward" and by == "data" and self.reduces and not is_scalar(self.call):
            return "grad_sync" if "float" in self.call.dtype else by
        at_end = "forward" if self.call.computed else "data"  # a batch, a gradient or a parameter has no node
        return by or {"backward": "grad_sync", "stepped": "metric"}.get(self.since, at_end)


def is_hop(call: Any, *, outside: bool) -> bool:
    """Whether a call is a message between the stages of a pipeline."""
    if call.op not in {"send", "recv"}:
        return False
    word = group_word(call.group_desc)
    return word == PIPELINE or (outside and not word)


def place_message(op: str, site: Site, since: str, of_backward: Site) -> tuple[Site, bool, str]:
    """The site of a message between stages, whether its micro-batch is that of what follows, and what is last now.

    `since` as in Attribution; `of_backward` is where the latest backward was.
    """
    if site.phase:
        return site._replace(phase="pipeline"), False, since
    sends = op == "send" and since in {"forward", "sent", "backward"}
    if sends and since == "backward":
        return of_backward._replace(phase="pipeline", region=site.region), False, since
    # What is received is for another computation: the loss is over.
    after = "sent" if sends or since == "forward" else since
    return site._replace(phase="pipeline"), not sends, after


def phase_between(
    call: Any, since: str, *, quiet: bool, by_hand: bool, copies: bool, is_parameter: Callable[[int], bool] | None
) -> str:
    """The phase of a call outside of everything, "" when what follows settles it.

    `since` as in Attribution; `by_hand`: no optimizer of torch.optim steps; `copies`: it gathers a full copy of a
    DTensor; `is_parameter`: whether an address is one.
    """
    if quiet:
        return "metric"
    if call.op == "barrier":  # of no computation: what a rank did last, or does next, says nothing of it
        return "metric" if since else "data"
    if since == "forward":
        return "loss"
    if since == "stepped" and not by_hand and is_scalar(call):
        return "metric"
    if since == "stepped" and not by_hand and copies:  # the step is over, and nothing is updated by a copy
        return "checkpoint"
    return (
        "step" if since in {"stepped", "backward"} and is_parameter is not None and is_parameter(call.address) else ""
    )


def stated_site(override: Override, call: Any) -> Override:
    """Phase and region that the subject states of a call; in a group described as checkpoint the phase is that."""
    phase, region = override
    return (phase or ("checkpoint" if group_word(call.group_desc) == "checkpoint" else None)), region


def is_scalar(call: Any) -> bool:
    """Whether a call reduces one element."""
    return call.op in {"all_reduce", "reduce"} and sum(math.prod(shape) for shape in call.shapes) == 1
