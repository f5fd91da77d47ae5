"""The module path of calls, inferred from outside: checkpointing, threads, wrappers, hooks, hidden modules."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.harness.recording.toy_calls import (
    LEAVES,
    Block,
    Linear,
    Model,
    Part,
    Speak,
    Voice,
    backward,
    checkpointed,
    forward,
    input_BD,
    record,
    told,
)


def in_layers(way: str, microbatch: int = 0) -> list[tuple[int, int, str, str]]:
    """Calls of backward in each layer, the last layer first: "Ra" recomputes a, "Bb" is backward of b."""
    kinds = {"R": "recompute", "B": "backward"}
    words = [(kinds[word[0]], word[1]) for word in way.split()]
    return [(0, microbatch, kind, f"layers.{layer}.{name}") for layer in (1, 0) for kind, name in words]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("outer", "inner", "way"),
    [
        (False, None, "Bb Ra Ba"),
        (True, None, "Ra Rb Bb Ba"),
        (False, False, "Bb Ra Ba"),
        (True, False, "Ra Rb Bb Ba"),
        (False, True, "Ra Rb Rb Bb Ra Ba"),
        (True, True, "Ra Rb Rb Bb Ra Ba"),
    ],
)
def test_checkpointed_parts_are_recomputed_where_they_are(outer: bool, inner: bool | None, way: str) -> None:
    """The flavour that is not reentrant recomputes when a node needs what it saved, and only as far as needed."""

    def program(voice: Voice) -> None:
        model = Model(voice, checkpointed(outer), checkpointed(inner))
        for _micro in range(2):
            model(input_BD()).sum().backward()

    sites = told(record(program))
    assert sites == [site for micro in range(2) for site in forward(0, micro) + in_layers(way, micro)]


def test_a_plain_function_that_is_checkpointed_is_recomputed_in_its_module() -> None:
    def program(voice: Voice) -> None:
        def core(x_BD: Tensor) -> Any:
            return Speak.apply(x_BD, voice) * 2

        def whole(part: Any, x_BD: Tensor) -> Any:
            return checkpoint(core, x_BD @ part.weight, use_reentrant=True)

        parts = [Part(whole, weight=nn.Parameter(torch.eye(4))) for _ in range(2)]
        nn.Sequential(*parts)(input_BD()).sum().backward()

    assert told(record(program))[2:] == [(0, 0, kind, name) for name in "10" for kind in ("recompute", "backward")]


def test_micro_batches_whose_graphs_live_together_are_told_apart_in_backward() -> None:
    def program(voice: Voice) -> None:
        model = Model(voice)
        losses = [model(input_BD()).sum() for _micro in range(3)]
        for micro in (2, 0, 1):
            losses[micro].backward()

    sites = told(record(program))
    assert sites[:12] == forward(0, 0) + forward(0, 1) + forward(0, 2)
    assert sites[12:] == backward(0, 2) + backward(0, 0) + backward(0, 1)


def test_backward_in_another_thread_finds_what_its_forward_made_and_what_it_made_itself() -> None:
    """As autograd does for a device: its thread runs nodes of the program's thread, and recomputes nodes of its own."""

    def program(voice: Voice) -> None:
        for _ in range(100):
            input_BD() * 2  # the program's numbers run ahead of the other thread's
        model = Model(voice, checkpointed(True))
        with ThreadPoolExecutor(1) as thread:
            for _micro in range(2):
                thread.submit(model(input_BD()).sum().backward).result(20)

    sites = told(record(program))
    for micro in range(2):
        got = [site for site in sites if site[1] == micro]
        assert got[:4] == forward(0, micro)
        assert [site for site in got if site[2] == "backward"] == backward(0, micro)
        assert [site[3] for site in got if site[2] == "recompute"] == [*LEAVES[2:], *LEAVES[:2]]


def test_backward_in_another_thread_finds_the_forward_of_an_output_that_nobody_can_look_into() -> None:
    class Box:
        __slots__ = ("y_BD",)

        def __init__(self, y_BD: Tensor) -> None:
            self.y_BD = y_BD

    def program(voice: Voice) -> None:
        value = Part(lambda it, x_BD: Box(it.inner(x_BD)), inner=Linear(voice))(input_BD()).y_BD.sum()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(value.backward).result(20)

    assert told(record(program)) == [(0, 0, "forward", "inner"), (0, 0, "backward", "inner")]


def test_a_worker_thread_belongs_to_what_the_rank_is_doing() -> None:
    def program(voice: Voice) -> None:
        def threaded(part: Any, x_BD: Tensor) -> Tensor:
            for work in (voice.say, lambda: part.block(x_BD)):
                thread = threading.Thread(target=work)
                thread.start()
                thread.join(20)
            return x_BD

        model = Part(threaded, block=Block(voice))
        for _micro in range(2):
            model(input_BD())

    sites = told(record(program))
    assert sites == [(0, micro, "forward", name) for micro in range(2) for name in ("", "block.a", "block.b")]


def wrapped(model: nn.Module) -> Part:
    """Holds a model as DDP does."""
    return Part(lambda it, x_BD: it.module(x_BD), module=model)


def test_wrappers_leave_no_trace_in_the_path_and_a_child_called_module_does() -> None:
    def checkpointed_layers(voice: Voice) -> nn.Module:
        model = Model(voice)
        model.layers = nn.ModuleList(map(checkpoint_wrapper, model.layers))
        return model

    for make in (checkpointed_layers, lambda voice: wrapped(wrapped(checkpointed_layers(voice)))):
        assert told(record(lambda voice, make=make: make(voice)(input_BD()))) == forward()  # type: ignore[misc]

    def odd(voice: Voice) -> Any:
        return Part(lambda it, x_BD: it.head(it.module(x_BD)), module=Linear(voice), head=Linear(voice))(input_BD())

    assert [site[3] for site in told(record(odd))] == ["module", "head"]


def test_a_module_hook_belongs_to_its_module_as_in_tensor_parallel_plans() -> None:
    def program(voice: Voice) -> None:
        model = Model(voice)
        model.layers[0].register_forward_pre_hook(lambda _m, args: (Speak.apply(args[0], voice),))
        model.layers[0].register_forward_hook(lambda _m, _a, output: Speak.apply(output, voice))
        model(input_BD()).sum().backward()

    regions = [site[3] for site in told(record(program))]
    way = ["layers.0", "layers.0.a", "layers.0.b", "layers.0", "layers.1.a", "layers.1.b"]
    assert regions == way + way[::-1]


def test_a_module_called_twice_is_the_region_both_times_and_one_outside_the_tree_counts_as_its_caller() -> None:
    def twice(voice: Voice) -> None:
        part = Part(lambda it, x_BD: it.shared(it.other(it.shared(x_BD))), shared=Linear(voice), other=Linear(voice))
        part(input_BD()).sum().backward()

    regions = [site[3] for site in told(record(twice))]
    assert regions == ["shared", "other", "shared", "shared", "other", "shared"]

    def program(voice: Voice) -> None:
        hiding = Part(lambda it, x_BD: it.hidden[0](it.seen(x_BD)), seen=Linear(voice), hidden=[Linear(voice)])
        nn.Sequential(hiding)(input_BD()).sum().backward()

    assert [site[3] for site in told(record(program))] == ["0.seen", "0", "0", "0.seen"]


def test_a_call_on_a_gradient_belongs_to_the_parameters_module() -> None:
    def program(voice: Voice) -> None:
        model = Model(voice)
        losses = [model(input_BD()).sum() for _micro in range(2)]
        weight = model.get_parameter("layers.0.b.weight")
        weight.register_post_accumulate_grad_hook(lambda _p: voice.say("reduce_scatter"))
        losses[0].backward()

    events = [e for e in record(program) if e.op == "reduce_scatter"]
    assert told(events) == [(0, 0, "backward", "layers.0.b")]
