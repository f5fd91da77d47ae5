"""Toys for the tests of faults: a kill matrix without a run, and subjects whose collectives are disturbed.

The seam of the matrix is that of `suites.killing`; its rows are made by hand. The subjects compute the dense
model on every rank. `needed` needs what it sums, and the result of `blind` is seen by no check. `silent` calls nothing,
and the ranks of `parted` part.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.harness.protocols import Shard
from shardproof.harness.running.injecting import Kill
from shardproof.harness.subject import NamedSubject
from shardproof.parallel.subject import ParallelSubject
from shardproof.reference.case import Case
from shardproof.reference.training import truth as dense
from shardproof.suites.mutants.kill_rows import Killed

INTERRUPTED = "tests.harness.toy_subjects:right"
"""The subject whose matrix somebody interrupts after two rows."""
theirs = ParallelSubject(only=("tp",))
"""A subject that claims one mode and is not the one whose source is mutated."""


class _Unspoken:
    """The same as somebody may write it who says neither what is refused nor what is harmless."""

    modes = theirs.modes
    __call__ = staticmethod(theirs.__call__)


unspoken = _Unspoken()


class Plan(NamedTuple):
    """A row that is planned."""

    row: Kill
    rows: int = 1


def kill(name: str, *killed_by: str, right: str = "", **fields: Any) -> Kill:
    """A row with the fields that a test speaks of."""
    usual: dict[str, Any] = {
        "kind": "mutant",
        "stands_for": "B-01",
        "mode": "tp",
        "phase": "backward",
        "region": "head",
    }
    usual |= {"region_right": right, "cause_right": right, "equivalent": "", "seconds": 0.5}
    usual["cause_told"] = {"yes": "right", "no": "misleading"}.get(right, "")
    return Kill(name=name, killed_by=killed_by, **usual | fields)


def plan_kills(_subject: NamedSubject, *, quick: bool, only: str = "", **_options: object) -> list[Plan]:
    """Four rows, the last one a survivor unless it must be quick; of held-back mutants two others."""
    if only == "held-back":
        rows = [kill("secret", "replicas", right="no", held_back=True), kill("d", "merge", right="yes", held_back=True)]
        return [Plan(row=row) for row in rows]
    rows = [
        kill("a", "replicas", "ledger", right="yes"),
        kill("a", "replicas", mode="msp", seconds=1.5, right="no"),
        kill("b", equivalent="nobody draws"),
    ]
    return [Plan(row=row) for row in (rows if quick else [*rows, kill("c")])]


def run_kills(plans: Sequence[Plan], subject: NamedSubject, *, processes: int) -> Iterator[Killed]:
    """The rows as planned."""
    for number, plan in enumerate(plans):
        if subject.name == INTERRUPTED and number == 2:
            raise KeyboardInterrupt
        unmissed = "redundant" if plan.row.equivalent else ""
        yield Killed(row=plan.row, case="tp=2", diagnosed="backward of head", unmissed=unmissed)


class Needed:
    """Each rank has its part of the loss, and one collective adds them up."""

    modes = ("tp",)

    def refuses(self, case: Case) -> str:
        """Few ranks suffice, for each of them computes everything."""
        return "" if case.world_size == 2 else "takes two ranks"

    def __call__(self, case: Case, device: torch.device) -> dict[str, Any]:
        outcome: dict[str, Any] = dense.subject(case, device)
        return {**outcome, "loss/0": self.loss(outcome["loss/0"])}

    def loss(self, whole: Tensor) -> Tensor:
        """This number from parts of different size."""
        rank, size = dist.get_rank(), dist.get_world_size()
        part = whole * (2 * (rank + 1) / (size * (size + 1)))
        dist.all_reduce(part)
        return part


class _Blind(Needed):
    """Returns the maximum of something that has no counterpart in the dense model."""

    def __call__(self, case: Case, device: torch.device) -> dict[str, Any]:
        outcome = super().__call__(case, device)
        clock = torch.tensor([7.0 + dist.get_rank()])
        dist.all_reduce(clock, dist.ReduceOp.MAX)
        own = Shard(local=clock, offsets=(dist.get_rank(),), global_shape=(case.world_size,))
        return {**outcome, "log/clock": own}


class _Silent(Needed):
    """Issues no collective."""

    def loss(self, whole: Tensor) -> Tensor:
        return whole


class _Parted(Needed):
    """Only rank 0 wants the sum."""

    def loss(self, whole: Tensor) -> Tensor:
        return super().loss(whole) if dist.get_rank() == 0 else whole


class _Leaving(Needed):
    """Ends its process in the cases of one seed."""

    def __call__(self, case: Case, device: torch.device) -> dict[str, Any]:
        if case.seed == 9:
            os._exit(9)
        return super().__call__(case, device)


needed, blind, silent, parted, leaving = Needed(), _Blind(), _Silent(), _Parted(), _Leaving()
