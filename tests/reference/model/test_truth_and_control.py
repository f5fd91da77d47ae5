"""Truth and control: how far rounding carries the dense model, and that the control really sums in another order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.checking.evidence import PASS
from reference.case import Case
from reference.model import layers
from reference.model.parameters import weights
from reference.training.control import control, merged_attention, reordered, split_attention, split_linear, split_norm
from reference.training.subject import subject, true_activations, truth
from suites.session.prover import Prover
from tests.reference.model.dense_run import CPU

DTYPES = ("float32", "bfloat16", "float16")
CASES = {
    "gpt": "tp=2 dp=3 hidden=48 heads=6 kv_heads=2 vocab=67 seq=8 batch=3 lr=0.1 seed=1",
    "internlm2, packed": "preset=tiny-internlm2 hidden=48 heads=6 kv_heads=3 mode=msp tp=3 ffn=129 vocab=66 seq=9",
}


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def epsilons(found: dict[str, Tensor], true: dict[str, Tensor], dtype: str, kind: str) -> float:
    """The largest relative distance of one kind of tensors, in epsilons of the dtype."""
    eps = torch.finfo(getattr(torch, dtype)).eps
    distances = [(found[n].double() - t).norm() / t.norm() for n, t in true.items() if n.startswith(kind)]
    return float(max(distances)) / eps


@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("with_bias", [True, False])
def test_split_sums_are_the_same_sums(parts: int, with_bias: bool) -> None:
    x, bias = noise(2, 5, 12, seed=0), noise(9, seed=2) if with_bias else None
    weight = noise(9, 12, seed=1)
    torch.testing.assert_close(split_linear(x, weight, bias, parts=parts), layers.linear(x, weight, bias))
    scale, shift = noise(12, seed=3), noise(12, seed=4) if with_bias else None
    torch.testing.assert_close(split_norm(x, scale, shift, parts=parts), layers.norm(x, scale, shift))


@pytest.mark.parametrize("attention", [split_attention, merged_attention])
@pytest.mark.parametrize("dropped", [False, True])
def test_attention_of_the_control_is_the_same_attention(attention: Callable[..., Tensor], dropped: bool) -> None:
    given = [noise(2, 7, heads, 4, seed=heads).requires_grad_() for heads in (6, 3, 3)]
    given[2] = noise(2, 7, 3, 4, seed=9).requires_grad_()
    keep = (noise(2, 6, 7, 7, seed=5) > -0.5) / 0.7 if dropped else None
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    q, k, v = given
    ours, theirs = attention(q, k, v, visible, keep, parts=3), layers.attention(q, k, v, visible, keep)
    torch.testing.assert_close(ours, theirs)
    upstream = noise(*theirs.shape, seed=6)
    for one, other in zip(*(torch.autograd.grad(out, given, upstream) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other)


def test_merged_attention_rounds_large_scores_as_context_ranks_do(prover: Prover) -> None:
    """A learning rate of 1 makes large scores in the first step, and Adam full steps of what does not round to zero."""
    words = "layers=4 hidden=24 heads=4 kv_heads=2 ffn=24 vocab=394 seq=12 batch=3 micro=1 steps=2 optimizer=adamw"
    case = Case.parse(f"mode=tp tp=1 cp=2 cp_comm=alltoall family=llama {words} dtype=float32 seed=1")
    assert prover.proof(case).verdict == PASS


@pytest.mark.parametrize("name", ["x", "weight"])
def test_linears_of_the_control_round_in_other_places_forward_and_backward(name: str) -> None:
    x, weight = noise(4, 8, 48, seed=0).bfloat16(), noise(48, 48, seed=1).bfloat16()
    leaves = {"x": x.requires_grad_(), "weight": weight.requires_grad_()}
    split = reordered(Case.parse(CASES["gpt"])).linear
    outputs = [linear(x, weight, None) for linear in (layers.linear, split)]
    assert not torch.equal(*outputs)
    upstream = noise(4, 8, 48, seed=2).bfloat16()
    assert not torch.equal(*(torch.autograd.grad(output, leaves[name], upstream)[0] for output in outputs))


def test_norms_of_the_control_round_in_other_places() -> None:
    x, weight = noise(4, 8, 48, seed=0).bfloat16(), noise(48, seed=1).bfloat16().requires_grad_()
    split = reordered(Case.parse(CASES["gpt"])).norm
    outputs = [norm(x, weight, None) for norm in (layers.norm, split)]
    upstream = noise(4, 8, 48, seed=2).bfloat16()
    assert not torch.equal(*(torch.autograd.grad(output, weight, upstream)[0] for output in outputs))


@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_low_precision_and_control_lie_some_epsilons_from_the_truth(text: str, dtype: str) -> None:
    case = Case.parse(text).but(dtype=dtype)
    found, other, true = subject(case, CPU), control(case, CPU), truth(case, CPU)
    observed = {name for name in true if name.startswith("act")}
    assert found.keys() | observed == other.keys() == true.keys()
    for name, value in true.items():
        assert name in observed or value.shape == found[name].shape
        assert value.dtype == (torch.int64 if name.startswith("tokens/") else torch.float64), name
        assert value.shape == other[name].shape
    for kind in ("loss/", "logits/", "grad/", "grad_norm/", "param/"):
        assert epsilons(found, true, dtype, kind) < 40, kind
        assert epsilons(other, true, dtype, kind) < 40, kind
    assert epsilons(found, true, dtype, "grad/") > 0.1
    assert not torch.equal(found["grad/final_norm.weight"], other["grad/final_norm.weight"])
    assert found["loss/0"].dtype == found["grad_norm/0"].dtype == torch.float32
    assert found["grad/final_norm.weight"].dtype == getattr(torch, dtype)


def test_truth_starts_from_the_rounded_weights() -> None:
    case = Case.parse(CASES["gpt"]).but(dtype="bfloat16", lr=1e-30, steps=1)
    true = truth(case, CPU)
    for name, weight in weights(case, CPU).items():
        assert torch.equal(true[f"param/{name}"], weight.double())


@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
def test_truth_of_float64_is_the_subject_and_control_is_within_rounding(text: str) -> None:
    case = Case.parse(text)
    found, true, other = subject(case, CPU), truth(case, CPU), control(case, CPU)
    assert all(torch.equal(value, true[name]) for name, value in found.items())
    assert 0 < epsilons(other, true, "float64", "param/") < 400
    assert 0 < epsilons(other, true, "float64", "grad/") < 400


def test_gradients_of_activations_are_scaled_in_training_and_alone() -> None:
    """What-ifs and kinks are passes of their own: without the scale they would be told apart by it."""
    case = Case.parse(CASES["gpt"]).but(dtype="float16", master="float32", scaler="static", loss_scale=8.0)
    alone, trained = true_activations(case, CPU), truth(case, CPU)
    assert all(torch.equal(trained[name], alone[name]) for name in alone)
