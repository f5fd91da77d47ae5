"""Phase, step and micro-batch of calls, inferred from outside, on programs of every shape."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardproof.harness.recording.annotations import phase, region
from tests.harness.recording.toy_calls import Linear, Model, Part, Speak, Voice, backward, forward, input_BD, sites


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
