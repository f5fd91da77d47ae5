"""What is observed of a rank's program: modules entered and left, backward passes, optimizer steps, collectives issued.

The phase and the module of every call are inferred from these. They are recorded as plain tuples `(kind, *fields)`,
which cost a tenth of a microsecond, and read back as the named ones below when the run is over. A lane is a thread of
the rank: 0 is the one that runs the rank's program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from harness.recording.annotations import Override
from harness.recording.updates import Look

OUTSIDE = -1
"""The graph task when no backward runs, and the node number when no node runs."""
LEAF = 2**64 - 1
"""The sequence number that autograd gives to every AccumulateGrad node."""


class Entered(NamedTuple):
    """A module's call began; `outermost` when none was going on in this lane.

    `number`: the sequence number that the next autograd node of this thread will get. `task`: the graph task that runs
    in this thread. `node`: the number of the node that runs in it. Of outermost ones, `grad`: gradients were on,
    `look` at the parameters (updates.Looks): () inside of a backward, and after an optimizer's step; and `at_s`, the
    time; 0 for others.
    """

    lane: int
    number: int
    task: int
    node: int
    module: nn.Module
    outermost: bool
    grad: bool
    look: Look
    at_s: float


class Left(NamedTuple):
    """The module entered last in this lane returned or raised."""

    lane: int
    number: int


class Arrived(NamedTuple):
    """Backward reached the output of an outermost module: the node of that number, made in lane `made_in`."""

    lane: int
    task: int
    node: int
    made_in: int
    at_s: float


class Ended(NamedTuple):
    """The backward that arrived is over; observed only while ranges are drawn."""

    lane: int
    task: int


class Stepping(NamedTuple):
    """An optimizer step began inside of `depth` others: an optimizer's step may call that of its base or of another."""

    lane: int
    task: int
    depth: int
    at_s: float


class Stepped(NamedTuple):
    """The optimizer step ended."""

    lane: int


class Issued(NamedTuple):
    """A collective was issued; `ticket` is its index on the rank, `call` and `caller` what the recorder keeps of it.

    `parameter`: whose gradient accumulates, when a leaf's node runs. `quiet`: gradients are off inside an outermost
    module without parameters. `again`: activation checkpointing runs a plain function again. `outer`: the number of the
    node that started this backward inside of another one. `look`: as that of Entered, () inside of modules too.
    """

    lane: int
    task: int
    node: int
    parameter: Tensor | None
    quiet: bool
    again: bool
    outer: int
    override: Override
    ticket: int
    look: Look
    started_s: float
    call: Any
    caller: Any


class Finished(NamedTuple):
    """The rank's program returned or raised; `look`: as that of Entered, `moved`: parameters came to lie elsewhere."""

    lane: int
    look: Look
    moved: bool


Observation = Entered | Left | Arrived | Ended | Stepping | Stepped | Issued | Finished


def read(plain: tuple[Any, ...]) -> Observation:
    """The observation that was recorded as a plain tuple, its kind first."""
    seen: Observation = plain[0]._make(plain[1:])
    return seen
