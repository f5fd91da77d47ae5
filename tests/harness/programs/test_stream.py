"""The ledger as it is written while a program runs equals the one read afterwards, and memory does not grow."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.ledger import Event
from shardproof.harness.programs import stream
from shardproof.harness.programs.session import ProgramSession
from shardproof.harness.programs.stream import EventStream
from shardproof.harness.recording import attribution, lanes
from shardproof.harness.recording.naming import Paths
from shardproof.harness.recording.recorder import Recorded, Recorder
from shardproof.harness.recording.watch import Emit
from tests.harness.recording.toy_calls import SimulatedGraph

WORLD = 2
OURS = [tracemalloc.Filter(True, f"*/harness/{room}/*") for room in ("programs", "recording")]


class Tee(Recorder):
    """A recorder that hands the same observations to a stream a rank; what those write is `written`, as it came."""

    def __init__(self, steps: tuple[int, int] | None = None) -> None:
        super().__init__("case", "program", WORLD, {})
        self.steps = steps
        self.written: list[Event] = []
        self.streams: dict[int, EventStream] = {}
        self.keeps = True

    def _emit(self, rank: int) -> Emit:
        keep = super()._emit(rank)
        of = Recorded(case="case", mode="program", world_size=WORLD, rank=rank)
        asked = ProgramSession(
            folder="", steps=self.steps, profile=(), silence_s=60.0, origin_s=0.0, boot="", command=()
        )
        self.streams[rank] = EventStream(of=of, session=asked, on_event=self.written.append, on_step=lambda _row: None)

        def emit(plain: tuple[Any, ...]) -> None:
            if self.keeps:
                keep(plain)
            self.streams[rank].feed(plain, None)

        return emit

    def on_completion(self, rank: int, ticket: int) -> None:
        if self.keeps:
            super().on_completion(rank, ticket)
        self.streams[rank].on_completion(ticket)

    def on_wait(self, rank: int, ticket: int) -> None:
        if self.keeps:
            super().on_wait(rank, ticket)

    def both(self) -> tuple[list[Event], list[Event]]:
        """The events written on the way, and those read at the end; the streams are closed."""
        for one in self.streams.values():
            one.close()
        return untimed(self.written), untimed(self.events())


def train(rank: int, recorder: Tee, steps: int, at: Callable[[int], object] = lambda _step: None) -> None:
    """Data, two micro-batches, a sum of gradients by hand, clipping, an update, a metric, and at last a gather."""
    with recorder.on_rank(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(steps):
            sizes = torch.tensor([step, 1])
            dist.broadcast(sizes, 0)
            for _micro in range(2):
                with wrapped.no_sync():
                    wrapped(torch.ones(4, 3)).sum().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            norm = torch.ones(())
            dist.all_reduce(norm)
            optimizer.step()
            optimizer.zero_grad()
            loss = torch.ones(())
            dist.all_reduce(loss, async_op=True).wait()
            at(step)
        dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))


def untimed(events: list[Event]) -> list[Event]:
    last = {(event.rank, event.call_index): event for event in events}
    return [replace(event, start_us=0.0, duration_us=0.0, doubts=()) for _key, event in sorted(last.items())]


def test_what_is_written_on_the_way_is_what_is_read_at_the_end(engine: InprocEngine) -> None:
    with Tee() as recorder:
        engine.run(train, recorder, 3, world_size=WORLD, observer=recorder)
    written, expected = recorder.both()
    assert written == expected and len(expected) == 2 * (3 + 3 * (1 + 4 + 1 + 1) + 1)
    assert {event.phase for event in expected} == {"data", "grad_sync", "metric"}
    again = len(recorder.written) - len(expected)
    assert 0 < again <= 2 * 3 * 2, "only what follows settles otherwise is written twice: the data of later steps"


def test_replays_are_written_on_the_way_too(monkeypatch: pytest.MonkeyPatch, engine: InprocEngine) -> None:
    def captured(rank: int, recorder: Tee) -> None:
        with recorder.on_rank(rank):
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step() -> None:
                model(torch.ones(4, 3)).sum().backward()
                assert model.weight.grad is not None
                dist.all_reduce(model.weight.grad)
                optimizer.step()

            graph = SimulatedGraph(step)
            step()
            graph.capture()
            for _ in range(3):
                graph.replay()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimulatedGraph)
    with Tee() as recorder:
        engine.run(captured, recorder, world_size=WORLD, observer=recorder)
    written, expected = recorder.both()
    assert written == expected and {one.calls for one in recorder.streams.values()} == {1 + 3}
    assert [(e.step, e.phase, e.graph) for e in expected[:4]] == [
        (step, "grad_sync", "graph0" if step else "") for step in range(4)
    ]


def test_chosen_steps_are_written_and_no_others(engine: InprocEngine) -> None:
    with Tee((1, 2)) as recorder:
        engine.run(train, recorder, 4, world_size=WORLD, observer=recorder)
    written, every = recorder.both()
    expected = [event for event in every if event.step == 1]
    assert written == expected
    assert len(recorder.written) == len(expected) == 2 * (1 + 4 + 1 + 1)


def test_memory_does_not_grow_with_steps(monkeypatch: pytest.MonkeyPatch, engine: InprocEngine) -> None:
    monkeypatch.setattr(lanes, "_MARKS", 200)
    monkeypatch.setattr(lanes, "_TASKS", 20)
    monkeypatch.setattr(stream, "_OFTEN", 100)
    sizes: dict[int, int] = {}

    def at(step: int) -> None:
        recorder.written.clear()
        if step in {60, 119}:
            kept = tracemalloc.take_snapshot().filter_traces(OURS).statistics("filename")
            sizes[step] = sum(one.size for one in kept)

    with Tee() as recorder:
        recorder.keeps = False
        tracemalloc.start()
        try:
            engine.run(train, recorder, 120, at, world_size=WORLD, observer=recorder)
        finally:
            tracemalloc.stop()
    assert sizes[119] - sizes[60] < 10_000, sizes
    for one in recorder.streams.values():
        attribution = one._attribution
        assert one.calls == 3 + 120 * 7 + 1
        assert len(one._open) <= 8
        assert len(attribution.sites) <= 8
        assert all(len(lane.numbers) < 2 * 200 + 100 for lane in attribution._lanes.values())
        assert len(attribution._lanes.made_in) <= 20 + 100


def test_a_program_of_calls_alone_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, engine: InprocEngine) -> None:
    monkeypatch.setattr(attribution, "_PENDING", 50)
    monkeypatch.setattr(stream, "_OFTEN", 10)

    def program(rank: int) -> None:
        with recorder.on_rank(rank):
            for _call in range(300):
                dist.all_reduce(torch.ones(1))

    with Tee() as recorder:
        engine.run(program, world_size=WORLD, observer=recorder)
    assert all(len(one._open) <= 60 for one in recorder.streams.values())
    assert len(untimed(recorder.written)) == 2 * 300
    assert {event.phase for event in recorder.written} == {"data"}


def test_models_that_are_made_anew_each_step_are_forgotten() -> None:
    paths = Paths()
    for _step in range(50):
        paths.add(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert len(paths._of_module) <= 3 * 2
    assert len(paths._of_parameter) <= 4 * 2
    assert len(paths.models) <= 1
