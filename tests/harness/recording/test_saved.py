"""Saved activations: counted once a storage, gone when the graph is, parameters left out; msp against fsp in bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.engines.threads.inproc import InprocEngine
from harness.recording.measures import SavedActivations
from harness.running.ranks.execution import execute_captured
from parallel.subject import subject
from reference.case import Case


def test_a_storage_counts_once_and_a_parameter_never() -> None:
    weight = torch.ones(8, 8, dtype=torch.float64, requires_grad=True)
    saved = SavedActivations()
    with saved.on_rank(0):
        x = torch.ones(4, 8, dtype=torch.float64)
        first, second = x @ weight, x[:2] @ weight  # both keep x, and the weight that is there anyway
        (first.sum() + second.sum()).backward()
    assert saved.peak_bytes(0) == 4 * 8 * 8
    assert saved.peak_bytes(1) == 0


def test_what_is_freed_leaves_the_account() -> None:
    weight = torch.ones(8, requires_grad=True)
    saved = SavedActivations()
    with saved.on_rank(0):
        for _ in range(5):
            (torch.ones(8) * weight).sum().backward()
    assert saved.peak_bytes(0) == 8 * 4


def test_values_and_gradients_are_the_same_bits_when_watched() -> None:
    def gradient(watch: bool) -> Tensor:
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
        saved = SavedActivations()
        if watch:
            with saved.on_rank(0):
                (x.tanh() @ x.t()).softmax(-1).square().sum().backward()
        else:
            (x.tanh() @ x.t()).softmax(-1).square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


@pytest.mark.parametrize("words", ["", "fuse_mlp=true"])
@pytest.mark.parametrize("tp", [2, 4])
def test_msp_keeps_whole_inputs_where_fsp_keeps_slices(words: str, tp: int) -> None:
    """msp saves A for every column linear; fsp saves A/p, which linears with one input share (modes.md 2.1)."""
    with InprocEngine() as engine:

        def kept(mode: str, layers: int) -> int:
            text = f"preset=tiny-internlm2 mode={mode} tp={tp} kv_heads=4 steps=1 micro=1 layers={layers} {words}"
            peaks = execute_captured(Case.parse(text), subject, engine).saved_bytes
            assert len(set(peaks)) == 1
            return peaks[0]

        case = Case.parse(f"preset=tiny-internlm2 {words}")
        activation = case.tokens * case.hidden * 8
        columns, inputs = (2 if case.fuse_mlp else 3), 2
        more = [kept("msp", layers) - kept("fsp", layers) for layers in (1, 2)]
    assert more[1] - more[0] == columns * activation - inputs * activation // tp
    assert more[0] == more[1] - more[0] + activation - activation // tp  # the head's input
