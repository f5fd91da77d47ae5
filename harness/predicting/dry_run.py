"""A dry run: a subject on tensors that have shapes and no numbers, on a few ranks that stand for all of a world.

Ranks of one place on the mesh are expected to do the same, so that one of each is run. A place is, along every axis of
more than one rank, the first, the last or a middle one: there programs treat ranks differently.

A rank that is run has a ledger, computation between calls, and a need of memory. Sizes are bytes.
"""

from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass

import torch

from shardproof.harness.engines.engine import RunRequest
from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.ledger import Event
from shardproof.harness.predicting.meter import Meter, Stretch
from shardproof.harness.protocols import CaseLike, Subject
from shardproof.harness.recording.measures import SavedActivations
from shardproof.harness.recording.recorder import Recorder
from shardproof.harness.subject import called, kept_per_rank, named_axes, session

MOST_RANKS = 9
"""Ranks that are run at most: all places of a mesh of two axes."""
Axes = Mapping[str, tuple[tuple[int, ...], ...]]


def representatives(axes: Axes, world_size: int, most: int = MOST_RANKS) -> tuple[tuple[int, ...], int]:
    """Ranks of all places, one each, in their order, and how many places there are; at most `most` ranks.

    The first and the last rank come before the others, then the lowest rank of each place. These share groups with the
    first rank wherever a place allows it.
    """
    places: list[tuple[str, ...]] = [()] * world_size
    for ranks in (ranks for lists in axes.values() for ranks in lists if len(ranks) > 1):
        middle = ["middle"] * (len(ranks) - 2)
        for rank, where in zip(ranks, ("first", *middle, "last"), strict=True):
            places[rank] = (*places[rank], where)
    lowest: dict[tuple[str, ...], int] = {}
    for rank, place in enumerate(places):
        lowest.setdefault(place, rank)
    ends = (0,) if most == 1 else (0, world_size - 1)
    others = [rank for place, rank in lowest.items() if place not in {places[end] for end in ends}]
    chosen = {*ends, *others[: max(0, most - len(ends))]}
    return tuple(sorted(chosen)), len(lowest)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRank:
    """A rank that was run.

    `stretches` are what it computes between its calls (harness.predicting.meter), tickets are the events' `call_index`.
    `unwaited` are calls that were never waited for. `saved_bytes` is the most that autograd held for backward,
    `peak_bytes` the most that all tensors held at once. Parameters are those of the models, gradients and optimizer
    those of the last optimizer step. `trained` are the elements that the optimizer steps, `learned` those of the
    models' parameters that want a gradient. They are more where data ranks share the optimizer's work.
    """

    rank: int
    events: tuple[Event, ...]
    stretches: tuple[Stretch, ...]
    unwaited: tuple[Event, ...]
    trained: int
    learned: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    peak_bytes: int

    @property
    def flops(self) -> int:
        """All that this rank computes."""
        return sum(stretch.flops for stretch in self.stretches)


def dry_run(
    case: CaseLike, subject: Subject, engine: DryEngine, ranks: Sequence[int], *, text: str, timeout_s: float = 60.0
) -> tuple[DryRank, ...]:
    """The ranks, run in this order. Raises what the engine raises: NoNumbers when the subject looks at a value."""
    axes = named_axes(case, subject)
    run = []
    for rank in ranks:
        recorder = Recorder(text, case.mode, case.world_size, axes)
        meter, saved = Meter(), SavedActivations()

        def program(rank: int, recorder: Recorder, meter: Meter, saved: SavedActivations) -> None:
            with recorder.on_rank(rank), saved.on_rank(rank), meter.on_rank(rank):
                called(subject, case, torch.device("meta"))

        with recorder, chdir("."), session(subject):
            request = RunRequest(
                program=program,
                args=(recorder, meter, saved),
                world_size=case.world_size,
                seed=case.seed,
                timeout_s=timeout_s,
                per_rank=kept_per_rank(subject),
            )
            engine.run_ranks(request, (rank,), recorder, meter)
        run.append(_of_rank(rank, recorder, meter, saved))
    return tuple(run)


def _of_rank(rank: int, recorder: Recorder, meter: Meter, saved: SavedActivations) -> DryRank:
    events = tuple(recorder.events())
    tensors = (
        {id(one): one for model in recorder.models(rank) for one in model.parameters()}.values()
        if meter.trained
        else ()
    )
    open_calls = set(meter.unwaited)
    return DryRank(
        rank=rank,
        events=events,
        stretches=tuple(meter.stretches),
        unwaited=tuple(event for event in events if event.call_index in open_calls),
        trained=meter.trained,
        learned=max(meter.trained, sum(one.numel() for one in tensors if one.requires_grad)),
        parameter_bytes=sum(one.numel() * one.element_size() for one in tensors) or meter.parameter_bytes,
        gradient_bytes=meter.gradient_bytes,
        optimizer_bytes=meter.optimizer_bytes,
        saved_bytes=saved.peak_bytes(rank),
        peak_bytes=meter.peak_bytes,
    )
