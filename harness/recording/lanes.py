"""Lanes of a rank: what is going on in each of its threads, and which nodes of autograd belong to which place.

Here too: calls that wait for what follows them, and what can be read off a call by itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any, NamedTuple

from harness.mesh_axes import PIPELINE
from harness.recording.annotations import Override
from harness.recording.naming import group_word

__all__ = ["Frame", "Lane", "Site", "Waiting", "gathers", "is_hop", "is_scalar", "phase_of", "reduces", "said"]


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
    """One thread of the rank: what is going on, and which stretch of node numbers belongs to which site."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
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


class Waiting(NamedTuple):
    """A call that what follows settles: its phase, "" while that is open, or its step and micro-batch alone.

    `since`: what was last before it, as in Attribution.
    """

    ticket: int
    site: Site
    since: str
    call: Any


def is_hop(call: Any, *, outside: bool) -> bool:
    """Whether a call is a message between the stages of a pipeline."""
    if call.op not in {"send", "recv"}:
        return False
    word = group_word(call.group_desc)
    return word == PIPELINE or (outside and not word)


def said(override: Override, call: Any) -> Override:
    """Phase and region that the subject states of a call; in a group described as checkpoint the phase is that."""
    phase, region = override
    return (phase or ("checkpoint" if group_word(call.group_desc) == "checkpoint" else None)), region


def gathers(waiting: Waiting) -> bool:
    """Whether a call after a backward may gather updated parameters."""
    after, call = waiting.since in {"backward", "stepped"}, waiting.call
    return not waiting.site.phase and after and call.op == "all_gather" and "float" in call.dtype


def phase_of(waiting: Waiting, by: str, *, gathers_parameters: bool) -> str:
    """The phase of a call that is settled `by` what follows: data, grad_sync, or the end, ""."""
    if waiting.site.phase:
        return waiting.site.phase
    if waiting.since == "stepped" and gathers_parameters:
        return "step"
    if waiting.since == "stepped" and by == "data" and is_scalar(waiting.call):
        return "metric"
    if waiting.since == "backward" and by == "data" and reduces(waiting) and not is_scalar(waiting.call):
        return "grad_sync" if "float" in waiting.call.dtype else by
    return by or {"backward": "grad_sync", "stepped": "metric"}.get(waiting.since, "data")


def reduces(waiting: Waiting) -> bool:
    """Whether a call without a phase may reduce gradients."""
    return not waiting.site.phase and waiting.call.op in {"all_reduce", "reduce", "reduce_scatter"}


def is_scalar(call: Any) -> bool:
    """Whether a call reduces one element."""
    return call.op in {"all_reduce", "reduce"} and sum(math.prod(shape) for shape in call.shapes) == 1
