"""Phase, step, micro-batch and module path of calls, inferred from outside, on programs of every shape."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from shardproof.harness.recording.annotations import phase, region
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
    sites,
    told,
)


def loss_of(voice: Voice) -> Part:
    """A loss without parameters that communicates in an autograd Function, as vocabulary-parallel losses do."""
    return Part(lambda _, x_BD: Speak.apply(x_BD, voice).sum())


def metric_of(voice: Voice) -> Part:
    """Counts without gradients, as torchmetrics does: once directly, once in an autograd Function."""

    def counted(_: object, x_BD: Tensor) -> None:
        with torch.no_grad():
            voice.say()
            Speak.apply(x_BD, voice)

    return Part(counted)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_training_steps_of_several_micro_batches_are_told_apart() -> None:
    def program(voice: Voice) -> None:
        class Talkative(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                voice.say()
                return super().step(closure)

        model, loss, metric = Model(voice), loss_of(voice), metric_of(voice)
        optimizer = Talkative(model.parameters(), lr=0.1)
        voice.say("broadcast")
        for _step in range(2):
            for _micro in range(2):
                voice.say("broadcast")
                y_BD = model(input_BD())
                value = loss(y_BD)
                voice.say()
                metric(y_BD)
                value.backward()
            voice.say("all_reduce")
            optimizer.step()
        voice.say("all_reduce")

    expected = [(0, 0, "data", "")]
    for step in range(2):
        for micro in range(2):
            expected += [(step, micro, "data", ""), *forward(step, micro)]
            expected += [(step, micro, "loss", "")] * 2 + [(step, micro, "metric", "")] * 2
            expected += [(step, micro, "backward", ""), *backward(step, micro)]
        expected += [(step, 1, "grad_sync", ""), (step, 1, "step", "")]
    assert sites(program) == [*expected, (1, 1, "metric", "")]


def test_an_evaluation_without_gradients_has_a_loss_and_no_metric() -> None:
    def program(voice: Voice) -> None:
        with torch.no_grad():
            y_BD = Model(voice)(input_BD())
            loss_of(voice)(y_BD)
            metric_of(voice)(y_BD)

    assert sites(program) == [*forward(), *[(0, 0, "loss", "")] * 3]
    assert sites(lambda voice: voice.say("barrier")) == [(0, 0, "data", "")], "without any forward"


def test_a_backward_without_any_call_is_seen_too_and_one_that_no_optimizer_follows() -> None:
    def program(voice: Voice) -> None:
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        for step in range(3):
            voice.say()
            value = model(torch.ones(2, 4)).sum()
            voice.say()
            value.backward()
            voice.say()
            if step < 2:
                optimizer.step()

    assert [site[:3] for site in sites(program)] == [
        (step, 0, kind) for step in range(3) for kind in ("data", "loss", "grad_sync")
    ]


def test_two_optimizers_make_one_step() -> None:
    def program(voice: Voice) -> None:
        model = Model(voice)
        optimizers = [sgd(layer) for layer in model.layers]
        for _step in range(2):
            model(input_BD()).sum().backward()
            for optimizer in optimizers:
                voice.say()
                optimizer.step()

    expected = [
        site for step in range(2) for site in [*forward(step), *backward(step), *[(step, 0, "grad_sync", "")] * 2]
    ]
    assert sites(program) == expected


def test_a_closure_runs_forward_and_backward_inside_the_step() -> None:
    def program(voice: Voice) -> None:
        model = Model(voice)

        def closure() -> Any:
            value = model(input_BD()).sum()
            value.backward()
            voice.say()
            return value

        optimizer = sgd(model)
        for _step in range(2):
            optimizer.step(closure)

    steps = [[*forward(step), *backward(step), (step, 0, "step", "")] for step in range(2)]
    assert sites(program) == [*steps[0], *steps[1]]


def test_an_optimizer_that_raised_is_not_in_its_step_forever() -> None:
    def program(voice: Voice) -> None:
        model = Model(voice)
        optimizer = sgd(model)

        def raising() -> float:
            raise KeyError("closure")

        with pytest.raises(KeyError):
            optimizer.step(raising)
        model(input_BD()).sum().backward()
        optimizer.step()
        voice.say()

    found = sites(program)
    assert found[:4] == forward()
    assert found[-1][2] == "metric"


def test_a_step_that_calls_its_bases_step_ends_when_itself_ends() -> None:
    def program(voice: Voice) -> None:
        class Gathering(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                super().step(closure)
                voice.say("all_gather")

        model = Model(voice)
        sgd(model)  # from now on torch tells of SGD's own steps too
        optimizer = Gathering(model.parameters(), lr=0.1)
        for _step in range(2):
            model(input_BD()).sum().backward()
            optimizer.step()
            voice.say()

    expected = [*forward(), *backward(), (0, 0, "step", ""), (1, 0, "data", "")]
    assert sites(program) == [*expected, *forward(1), *backward(1), (1, 0, "step", ""), (1, 0, "metric", "")]


def test_a_raising_forward_leaves_nothing_behind() -> None:
    def program(voice: Voice) -> None:
        model = nn.Sequential(Linear(voice), Part(lambda _, x_BD: dict[Tensor, Tensor]()[x_BD]))
        for _ in range(2):
            with pytest.raises(KeyError):
                model(input_BD())
        voice.say()

    assert sites(program) == [(0, 0, "forward", "0"), (0, 1, "forward", "0"), (0, 1, "loss", "")]


def test_user_code_may_say_phase_and_region_itself() -> None:
    def program(voice: Voice) -> None:
        model = Model(voice)
        with phase("data"):
            model(input_BD())
            voice.say()
        with region("layers.1"), phase("grad_sync"):
            voice.say()
            with phase("step"):
                voice.say()
        with region("head"):
            voice.say()
        model(input_BD())

    found = sites(program)
    assert found[:4] == [(0, 0, "data", leaf) for _, _, _, leaf in forward()]
    assert found[4:8] == [
        (0, 1, "data", ""),
        (0, 0, "grad_sync", "layers.1"),
        (0, 0, "step", "layers.1"),
        (0, 0, "loss", "head"),
    ]
    with pytest.raises(ValueError, match="phase 'sync' must be one of .*grad_sync"), phase("sync"):
        pass


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
