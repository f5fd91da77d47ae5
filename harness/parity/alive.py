"""Checks that both launches train at all: two launches in which nothing is trained agree, and prove nothing.

A launch fails if all gradients are zero, one is not finite, or no parameter has one; if no parameter moves; if the loss
is 0 or not finite (as with a mask that leaves no token); if all targets are ignored; or if data ranks train on the same
batch. A gradient that is not finite is right if the optimizer skips the step, as with a gradient scaler.
"""

from collections.abc import Iterator
from hashlib import sha256

import torch

from shardproof.harness.checking.finding import Finding
from shardproof.harness.outcome.merging import bits_of
from shardproof.harness.parity.recorded import Launch
from shardproof.harness.verdicts.facts import Fact, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

CHECK = "alive"
IGNORED = -100
"""The default `ignore_index` of torch's cross entropy."""


def check_alive(first: Launch, second: Launch) -> Finding:
    """Whether both launches train."""
    for word, launch in (("A", first), ("B", second)):
        for how, name in _dead(launch):
            return Finding(verdict=FAIL, facts=(state_fact("launch_dead", launch=word, how=how),), names=(name,))
    what = {"loss": "loss", "grad": "gradient", "param_after": "parameter after a step"}
    for word, launch in (("A", first), ("B", second)):
        if missing := [words for kind, words in what.items() if not any(launch.rows(kind))]:
            return Finding(verdict=UNKNOWN, facts=(state_fact("launch_without", launch=word, missing=missing),))
    return Finding(verdict=PASS, facts=(state_fact("launch_alive"),))


def _dead(launch: Launch) -> Iterator[tuple[Fact, str]]:
    """Each sign that a launch does not train, and the name of the tensor that shows it."""
    for step in range(launch.steps):
        yield from _dead_targets(launch, step)
        losses = [rank.tensor(row).double() for rank, row in launch.rows("loss", step)]
        if losses and all(bool((loss == 0).all()) for loss in losses):
            yield state_fact("loss_zero", step=step), f"loss/{step}"
        if losses and not all(bool(torch.isfinite(loss).all()) for loss in losses):
            yield state_fact("loss_no_number", step=step), f"loss/{step}"
        gradients = [(row, rank.tensor(row)) for rank, row in launch.rows("grad", step)]
        if losses and not gradients and any(launch.rows("param_after", step)):
            yield state_fact("no_gradient", step=step), f"loss/{step}"
        if gradients and not any(bool(tensor.any()) for _, tensor in gradients):
            yield state_fact("gradients_zero", step=step), f"grad/{gradients[0][0].name}"
        broken = next((row.name for row, tensor in gradients if not bool(torch.isfinite(tensor).all())), "")
        if broken and not all(
            bool(torch.isfinite(rank.tensor(row)).all()) for rank, row in launch.rows("param_after", step)
        ):
            yield state_fact("weights_no_number", step=step, name=broken), f"grad/{broken}"
    last = launch.steps - 1
    if last >= 0:
        yield from _alike_data_ranks(launch)
        started = {(rank.rank, row.name, row.offsets): rank.tensor(row) for rank, row in launch.rows("param")}
        after = [(rank, row, rank.tensor(row)) for rank, row in launch.rows("param_after", last)]
        known = [(row, tensor, started[key]) for rank, row, tensor in after
                 if (key := (rank.rank, row.name, row.offsets)) in started]  # fmt: skip
        if known and all(torch.equal(tensor, before) for _, tensor, before in known):
            yield state_fact("nothing_moves", steps=launch.steps), f"param_after/{last}/{known[0][0].name}"


def _alike_data_ranks(launch: Launch) -> Iterator[tuple[Fact, str]]:
    """Data ranks of DistributedDataParallel, or FSDP over one axis, that receive the same batch and compute the same.

    Ranks that split the sequence of one batch receive the same too, but their modules return other bits, even if the
    loss is the mean of all.
    """
    places = {
        rank.rank: row.axes
        for rank, row in launch.rows("param")
        if row.stated_by in ("ddp", "fsdp") and len(row.axes) == 1
    }
    seen: dict[object, tuple[int, tuple[tuple[str, int, int], ...]]] = {}
    for rank in launch.ranks:
        if rank.rank not in places:
            continue
        bits = [
            tuple(
                sha256(bits_of(one.tensor(row)).numpy().tobytes()).digest()
                for one, row in launch.rows(kind, step)
                if one is rank
            )
            for step in range(launch.steps)
            for kind in ("sample", "output", "loss")
        ]
        first, axes = seen.setdefault(tuple(bits), (rank.rank, places[rank.rank]))
        if all(bits) and axes != places[rank.rank]:
            fact = state_fact("data_ranks_alike", ranks=[first, rank.rank], axis=axes[0][0])
            yield fact, f"sample/{launch.steps - 1}"


def _dead_targets(launch: Launch, step: int) -> Iterator[tuple[Fact, str]]:
    """Tensors of integers that the outermost module receives and whose elements all are the ignored target."""
    places: dict[str, list[bool]] = {}
    for rank, row in launch.rows("sample", step):
        if "int" in row.dtype:
            places.setdefault(row.name, []).append(bool((rank.tensor(row) == IGNORED).all()))
    for name, ignored in places.items():
        if all(ignored):
            yield state_fact("targets_ignored", name=name, value=IGNORED, step=step), f"sample/{step}"
