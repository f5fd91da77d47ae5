"""Compiled modules: they compile to the same graphs while watched, and count as one region."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from shardproof.harness.outcome.merging import bits_of
from shardproof.harness.recording.recorder import Recorder
from shardproof.harness.torch_internals.compiler import leave_uncompiled
from tests.harness.recording.toy_calls import Linear, Voice, input_BD, record, told

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Count:
    """A compiler that changes nothing and counts the nodes of every graph."""

    def __init__(self) -> None:
        self.nodes: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        self.nodes.append(len(graph.graph.nodes))
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Plain(nn.Module):
    """Modules that do not communicate, and a hook, which torch.compile leaves out of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_forward_hook(lambda _module, _args, y_BD: y_BD * 3)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x_BD)))  # type: ignore[no-any-return]


def in_place(voice: Voice, count: Count) -> nn.Module:
    model = Plain()
    model.compile(backend=count, fullgraph=True)
    return nn.Sequential(model, Linear(voice))


def wrapped(voice: Voice, count: Count) -> nn.Module:
    return nn.Sequential(cast(nn.Module, torch.compile(Plain(), backend=count, fullgraph=True)), Linear(voice))


@pytest.mark.parametrize("make", [in_place, wrapped])
def test_watching_compiles_to_the_same_graphs(make: Callable[[Voice, Count], nn.Module]) -> None:
    watched, bare = Count(), Count()
    sites = told(record(lambda voice: make(voice, watched)(input_BD()).sum().backward()))
    torch.compiler.reset()
    make(Voice(Recorder("", "tp", 2, {})), bare)(input_BD()).sum().backward()
    assert watched.nodes == bare.nodes != []
    assert sites == [(0, 0, "forward", "1"), (0, 0, "backward", "1")]


def test_a_module_compiled_in_place_is_the_region_of_what_it_calls() -> None:
    class Saying(nn.Module):
        def __init__(self, voice: Voice) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.say = torch.compiler.disable(voice.say)

        def forward(self, x_BD: Tensor) -> Any:
            y_BD = self.inner(x_BD)
            self.say()
            return y_BD * 2

    def program(voice: Voice) -> None:
        model = nn.Sequential(Saying(voice), Saying(voice))
        for layer in model:
            layer.compile(backend="eager")
        model(input_BD())

    assert told(record(program)) == [(0, 0, "forward", "0"), (0, 0, "forward", "1")]


def test_the_compiler_never_starts_at_a_frame_of_the_harness() -> None:
    """It would where a hook or a group, which it leaves uncompiled itself, calls on."""
    leave_uncompiled()
    count = Count()

    @torch.compiler.disable(recursive=False)
    def left_out(x_BD: Tensor) -> Tensor:
        return bits_of(x_BD)

    def program(x_BD: Tensor) -> Tensor:
        bits: Tensor = left_out(x_BD)
        return bits

    torch.compile(program, backend=count)(torch.ones(3))
    assert count.nodes == []


def test_a_model_compiled_in_place_makes_micro_batches() -> None:
    def program(voice: Voice) -> None:
        model = Plain()
        model.compile(backend="eager")
        for _micro in range(2):
            model(input_BD()).sum().backward()
            voice.say()

    assert told(record(program)) == [(0, 0, "grad_sync", ""), (0, 1, "grad_sync", "")]
