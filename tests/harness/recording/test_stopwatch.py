"""Time on a device, and CUDA graphs, on devices that are played.

Their streams run behind the host, and calls last as long as they say. A capture sends nothing, and every replay gives
the ledger the calls of its graph.
"""

import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.harness.engines.calls import operators
from shardproof.harness.engines.calls.signature import call_of
from shardproof.harness.engines.interposer import Interposer
from shardproof.harness.ledger import Event
from shardproof.harness.recording.recorder import Recorder
from shardproof.harness.recording.spans import Stopwatch, stopwatch
from shardproof.harness.witnesses.measured import time_body
from tests.harness.recording.toy_calls import (
    Model,
    Part,
    SimulatedGraph,
    Voice,
    a_call,
    backward,
    forward,
    input_BD,
    record,
    told,
)

CALL = a_call(device="cuda")


@dataclass
class _Device:
    """A GPU that is played: `work(ms)` is enqueued at once and takes so long in the stream."""

    now_ms: float = 40.0

    def work(self, ms: float) -> None:
        self.now_ms += ms

    def watch(self) -> Stopwatch:
        return Stopwatch(lambda: _PlayedEvent(self), lambda: None)


@dataclass
class _PlayedEvent:
    """Behaves as torch.cuda.Event: it has no time before it is recorded, and gives none before it is waited for."""

    device: _Device
    at_ms: float | None = None
    waited: bool = False

    def record(self) -> None:
        self.at_ms = self.device.now_ms

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: "_PlayedEvent") -> float:
        assert self.waited and later.waited and self.at_ms is not None and later.at_ms is not None
        return later.at_ms - self.at_ms


def recorded(device: _Device) -> list[Event]:
    """A call of 3 ms behind 50 ms of work, a call of the host, a call that never completes."""
    with Recorder("", "tp", 2, {}, stopwatch=device.watch()) as recorder, recorder.on_rank(0):
        device.work(50)
        ticket = recorder.on_issue(0, CALL)
        device.work(3)
        recorder.on_completion(0, ticket)
        ticket = recorder.on_issue(0, replace(CALL, device="cpu"))
        time.sleep(0.02)
        recorder.on_completion(0, ticket)
        device.work(7)
        recorder.on_issue(0, CALL)
    return recorder.events()


def test_a_call_lasts_as_long_as_its_stream_says_and_starts_when_its_stream_came_to_it() -> None:
    on_device, on_host, never = recorded(_Device())
    assert on_device.duration_us == pytest.approx(3_000)
    assert 40_000 <= on_device.start_us <= 50_000  # less what passed between stopwatch and recorder
    assert on_host.start_us < 40_000  # the host was there long before the stream
    assert 20_000 <= on_host.duration_us < 1_000_000
    assert never.start_us - on_device.start_us == pytest.approx(10_000, abs=1)
    assert never.duration_us == 0


def test_a_measured_stretch_is_the_streams_and_a_cpu_needs_no_stopwatch() -> None:
    device = _Device()
    seconds: list[float] = []
    with time_body(device.watch(), seconds):
        device.work(120)
    assert seconds == [pytest.approx(0.120)]
    assert stopwatch("cpu") is stopwatch(torch.device("meta")) is None


def gloo_group() -> dist.ProcessGroup:
    """A group of one rank that torch.distributed does not know."""
    store = torch._C._distributed_c10d.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=10))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


@pytest.mark.parametrize(("device", "durations"), [("cuda", [2_000, 5_000]), ("cpu", [2_000, 0])])
def test_a_call_on_a_gpu_ends_with_its_future(
    monkeypatch: pytest.MonkeyPatch, device: str, durations: list[float]
) -> None:
    played = _Device()
    monkeypatch.setattr(operators, "call_of", lambda *told: replace(call_of(*told), device=device))
    group, done = gloo_group(), _Delayed(played)
    with done, done.on_rank(0), Interposer(done):
        for asynchronous in (False, True):
            options = dist.AllreduceOptions()
            options.asyncOp = asynchronous
            done.takes_ms = 5 if asynchronous else 2
            group.allreduce([torch.ones(4)], options).wait()
            deadline_s = time.monotonic() + 10
            while device == "cuda" and len(done.told) <= asynchronous and time.monotonic() < deadline_s:
                time.sleep(0.001)  # the callback runs in a thread of gloo
    events = done.events()
    assert done.told == ([0, 1] if device == "cuda" else [0])
    if device == "cuda":
        assert [event.duration_us for event in events] == [pytest.approx(us) for us in durations]
    else:
        assert [event.duration_us > 0 for event in events] == [us > 0 for us in durations]


class _Delayed(Recorder):
    """Lets the played device work before a completion is recorded."""

    def __init__(self, device: _Device) -> None:
        super().__init__("", "tp", 2, {}, stopwatch=device.watch())
        self.device, self.takes_ms = device, 0.0
        self.told: list[int] = []

    def on_completion(self, rank: int, ticket: int) -> None:
        self.device.work(self.takes_ms)
        super().on_completion(rank, ticket)
        self.told.append(ticket)


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimulatedGraph)


def what(events: list[Event]) -> list[tuple[str, str, str, int]]:
    """All of an event that a step repeats."""
    return [(event.phase, event.region, event.op, event.payload_bytes) for event in events]


def trained(voice: Voice, *, eager: int, replays: int) -> None:
    """Some steps as they are, then a whole step captured, then replayed."""
    model = Model(voice)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(input_BD()).sum().backward()
        voice.say("reduce_scatter")
        optimizer.step()

    for _ in range(eager):
        step()
    graph = SimulatedGraph(step)
    graph.capture()
    for _ in range(replays):
        graph.replay()


def test_the_ledger_of_a_replayed_step_is_that_of_the_step() -> None:
    events = record(lambda voice: trained(voice, eager=2, replays=3))
    by_step = [[event for event in events if event.step == step] for step in range(5)]
    assert len(events) == sum(map(len, by_step)) == 5 * 9
    assert all(what(one) == what(by_step[0]) for one in by_step)
    assert {event.phase for event in by_step[4]} == {"forward", "backward", "grad_sync"}
    assert [{event.graph for event in one} for one in by_step] == [{""}, {""}, {"graph0"}, {"graph0"}, {"graph0"}]
    indices = [event.call_index for event in events]
    assert indices == sorted(set(indices))
    assert len(record(lambda voice: trained(voice, eager=1, replays=0))) == 9, "a capture alone sends nothing"


def test_a_graph_that_is_captured_anew_has_a_name_of_its_own() -> None:
    def program(voice: Voice) -> None:
        first, second = SimulatedGraph(voice.say), SimulatedGraph(voice.say)
        for graph in (first, first, second):
            graph.capture()
            graph.replay()

    assert [event.graph for event in record(program)] == ["graph0", "graph1", "graph2"]


def test_graphs_inside_of_a_model_belong_to_the_step_and_micro_batch_of_the_replay() -> None:
    """Forward and backward of its first layer are graphs, as make_graphed_callables has them."""

    def program(voice: Voice) -> None:
        model, y = Model(voice), input_BD()
        held: list[Tensor] = []
        ahead = SimulatedGraph(lambda: held.append(model.layers[0](y)))
        back = SimulatedGraph(lambda: held.pop().backward(torch.ones(2, 4)))
        ahead.capture()
        back.capture()

        def replayed(it: Any, x_BD: Tensor) -> Any:
            ahead.replay()
            y_BD = x_BD * 1
            y_BD.register_hook(lambda _gradient: back.replay())
            return it.model.layers[1](y_BD)

        graphed, optimizer = Part(replayed, model=model), torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for _ in range(2):
                graphed(input_BD()).sum().backward()
            optimizer.step()

    events = record(program)
    assert [(e.step, e.microbatch, e.phase) for e in events] == [
        (step, micro, phase) for step in (0, 1) for micro in (0, 1) for phase in ["forward"] * 4 + ["backward"] * 4
    ]
    assert [event.graph for event in events[:8]] == ["graph0", "graph0", "", "", "", "", "graph1", "graph1"]
    assert [event.region for event in events[:2]] == ["model.layers.0.a", "model.layers.0.b"]


def test_without_graphs_nothing_is_marked_and_the_methods_are_torchs_again() -> None:
    before = vars(SimulatedGraph)["replay"]
    events = record(lambda voice: Model(voice)(input_BD()).sum().backward())
    assert told(events) == forward() + backward()
    assert {event.graph for event in events} == {""}
    assert vars(SimulatedGraph)["replay"] is before
