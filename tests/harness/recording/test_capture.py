"""Captured and saved activations: those of autograd, counted once a storage, and no bit of a run changes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.recording.capturing.module_calls import CallCapture, Capture, tensors_of
from shardproof.harness.recording.measures import SavedActivations
from shardproof.harness.running.ranks.execution import execute
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from tests.harness.recording.toy_calls import PLAIN, Around, Part, checkpointed


def net(around: Around = PLAIN) -> Part:
    """Two layers, each a linear map and a relu in place, called through `around` as checkpointing does.

    The last part returns a tensor and a number, and holds a module that no tree knows.
    """

    def forward(it: Any, x_BD: Tensor) -> Any:
        for layer in it.layers:
            x_BD = around(layer, x_BD)
        y_BD, factor = it.pair(x_BD)
        return y_BD * factor

    torch.manual_seed(0)
    layers = [Part(lambda it, x_BD: it.linear(x_BD).relu_() + x_BD, linear=nn.Linear(4, 4)) for _ in range(2)]
    pair = Part(lambda it, x_BD: (it.hidden[0](x_BD) * 2, 3.0), hidden=[nn.Tanh()])
    return Part(forward, layers=nn.ModuleList(layers), pair=pair)


NAMES = {"layers.0.linear", "layers.0", "layers.1.linear", "layers.1", "pair"}


def batch(micro: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(micro))


def by_hand(x_BD: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Mathematics of the net written out, every activation kept, its gradient from autograd."""
    linears = [net().get_submodule(f"layers.{i}.linear") for i in range(2)]
    a0 = linears[0](x_BD)
    y0 = a0.relu() + x_BD
    a1 = linears[1](y0)
    y1 = a1.relu() + y0
    pair = torch.tanh(y1) * 2
    acts = {"layers.0.linear": a0, "layers.0": y0, "layers.1.linear": a1, "layers.1": y1, "pair": pair}
    grads = torch.autograd.grad((pair * 3).square().sum(), list(acts.values()))
    return {name: act.detach() for name, act in acts.items()}, dict(zip(acts, grads, strict=True))


def train(net: nn.Module, *, micros: int = 2, steps: int = 2) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    results = []
    for step in range(steps):
        for micro in range(micros):
            loss = net(batch(step * micros + micro).requires_grad_()).square().sum()
            loss.backward()
            results.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return results + [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_outputs_and_gradients_are_those_of_autograd_and_capturing_changes_no_bit(reentrant: bool | None) -> None:
    expected_outputs, expected_gradients = by_hand(batch())
    with Capture() as capture, capture.on_rank(0):
        train(net(checkpointed(reentrant)))
    assert set(capture.outputs(0)) == set(capture.gradients(0)) == NAMES
    for name in NAMES:
        torch.testing.assert_close(capture.outputs(0)[name], expected_outputs[name], rtol=0, atol=0)
        torch.testing.assert_close(capture.gradients(0)[name], expected_gradients[name], rtol=1e-6, atol=1e-6)
    bare = train(net(checkpointed(reentrant)))
    with Capture(lambda step, microbatch: True) as capture, capture.on_rank(0):
        captured = train(net(checkpointed(reentrant)))
    assert len(bare) == len(captured) == 8
    assert all(torch.equal(one, other) for one, other in zip(bare, captured, strict=True))


def test_another_micro_batch_can_be_wanted_and_without_capture_nothing_stays_behind() -> None:
    original = nn.Module._call_impl
    with Capture(lambda step, microbatch: (step, microbatch) == (0, 1)) as capture, capture.on_rank(0):
        train(net(), steps=1)
    expected_outputs, expected_gradients = by_hand(batch(1))
    assert torch.equal(capture.outputs(0)["layers.1"], expected_outputs["layers.1"])
    torch.testing.assert_close(capture.gradients(0)["layers.0"], expected_gradients["layers.0"])
    with Capture() as capture, capture.on_rank(0):
        assert nn.Module._call_impl is not original
    assert nn.Module._call_impl is original
    net()(batch())
    assert capture.outputs(0) == {}


@pytest.mark.parametrize("reentrant", [None, True])
def test_the_wanted_micro_batch_is_found_when_its_backward_comes_last(reentrant: bool | None) -> None:
    model = net(checkpointed(reentrant))
    with Capture() as capture, capture.on_rank(0):
        losses = [model(batch(micro).requires_grad_()).square().sum() for micro in range(3)]
        for loss in reversed(losses):
            loss.backward()
    _, expected = by_hand(batch(0))
    for name in NAMES:
        torch.testing.assert_close(capture.gradients(0)[name], expected[name], rtol=1e-6, atol=1e-6)


def test_an_argument_that_holds_itself_is_read_to_an_end() -> None:
    own: list[object] = [torch.ones(1)]
    nothing: list[object] = []
    own.append(own)
    nothing.append(nothing)
    assert [len(tensor) for tensor in tensors_of({"x": own}, levels=3)] == [1, 1]
    assert not list(tensors_of(nothing))


def test_a_storage_counts_once_while_it_is_there_and_a_parameter_never() -> None:
    weight = torch.ones(8, 8, dtype=torch.float64, requires_grad=True)
    saved = SavedActivations()
    with saved.on_rank(0):
        for _ in range(5):  # what is freed leaves the account
            x = torch.ones(4, 8, dtype=torch.float64)
            first, second = x @ weight, x[:2] @ weight  # both keep x, and the weight that is there anyway
            (first.sum() + second.sum()).backward()
    assert saved.peak_bytes(0) == 4 * 8 * 8
    assert saved.peak_bytes(1) == 0


@pytest.mark.parametrize(("words", "tp"), [("", 2), ("fuse_mlp=true", 4)])
def test_msp_keeps_whole_inputs_where_fsp_keeps_slices(words: str, tp: int, engine: InprocEngine) -> None:
    """msp saves A for every column linear; fsp saves A/p, which linears with one input share (modes.md 2.1)."""

    def kept(mode: str, layers: int) -> int:
        text = f"preset=tiny-internlm2 mode={mode} tp={tp} kv_heads=4 steps=1 micro=1 layers={layers} {words}"
        peaks = execute(Case.parse(text), subject, engine, record=False, watch=True).saved_bytes
        assert len(set(peaks)) == 1
        return peaks[0]

    case = Case.parse(f"preset=tiny-internlm2 {words}")
    activation = case.tokens * case.hidden * 8
    columns, inputs = (2 if case.fuse_mlp else 3), 2
    more = [kept("msp", layers) - kept("fsp", layers) for layers in (1, 2)]
    assert more[1] - more[0] == columns * activation - inputs * activation // tp
    assert more[0] == more[1] - more[0] + activation - activation // tp  # the head's input


def test_a_path_of_several_modules_names_none_of_them() -> None:
    """The blocks of a stage are called one by one, and no model around them."""
    blocks = [nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(nn.Linear(4, 4))) for _ in range(2)]
    for called, names in ((blocks[:1], {"0", "1"}), (blocks, set())):
        for capture in (Capture(), CallCapture()):
            with capture, capture.on_rank(0):
                x_BD = batch().requires_grad_()
                for block in called:
                    x_BD = block(x_BD)
                x_BD.sum().backward()
            outputs = capture.outputs(0) if isinstance(capture, Capture) else capture.calls(0).outputs
            assert outputs.keys() == names


def test_transforms_of_torch_func_run_under_the_count_and_not_under_hooks_of_the_program() -> None:
    """A gradient of each sample: torch.func refuses to begin under any hooks on saved tensors."""
    saved = SavedActivations()
    x_BD = batch().requires_grad_()
    with saved.on_rank(0):
        gradients_BD = torch.func.vmap(torch.func.grad(lambda x_D: torch.tanh(x_D).sum()))(x_BD)
        with pytest.raises(RuntimeError, match="saved tensor hooks"), torch.autograd.graph.save_on_cpu():
            torch.func.grad(lambda x: x.sum())(x_BD)
        held = torch.exp(x_BD.clone())
    torch.testing.assert_close(gradients_BD, 1 - torch.tanh(x_BD) ** 2)
    assert saved.peak_bytes(0) >= held.nbytes, "it counts again behind a transform"
    with pytest.raises(RuntimeError, match="saved tensor hooks"), torch.autograd.graph.save_on_cpu():
        torch.func.grad(lambda x: x.sum())(x_BD)
