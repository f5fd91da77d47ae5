"""CUDA graphs, simulated on the CPU: a capture sends nothing, and every replay is a call of the ledger."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.ledger import Event
from tests.harness.recording.simulated_graph import SimulatedGraph, graphs_simulated
from tests.harness.recording.toy_calls import Model, Part, Voice, backward, forward, input_BD, record, told


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    with graphs_simulated():
        yield


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
