"""Tests of training/steps. Activations and their gradients by canonical modules; dense training: means, optimizers,
clipping, ties, packs.
"""

import pytest
import torch
from hypothesis import given, settings

from shardproof.reference.case import Case
from shardproof.reference.model.parameters import shapes, weights
from shardproof.reference.training import steps as training
from shardproof.reference.training.control import BAND, measure_relu_flips
from shardproof.reference.training.truth import subject, truth
from tests.reference.model.dense_run import CPU, models

FULL = "tp=1 dp=3 hidden=24 heads=6 kv_heads=2 ffn=16 vocab=37 seq=5 batch=2 bias=true "
WORDS = {
    "fused": FULL + "activation=swiglu fuse_mlp=true fuse_qkv=true positions=learned",
    "separate": FULL + "activation=swiglu fuse_qkv=false qk_norm=true positions=rope tied=false",
    "gelu": FULL + "fuse_qkv=true positions=rope norm=rmsnorm",
}


def activations(case: Case) -> dict[str, torch.Tensor]:
    """Activations of dense training in the dtype of the case, and their gradients."""
    return _activations(training.train(case, weights(case, CPU), observed=(0, 0)))


def _activations(outcome: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in outcome.items() if name.startswith("act")}


def modules(case: Case) -> set[str]:
    """The canonical module names of a case, written out once more."""
    block = {"", ".attention_norm", ".attention", ".attention.wo", ".mlp_norm", ".mlp", ".mlp.w2"}
    block |= {".attention.wqkv"} if case.fuse_qkv else {".attention.wq", ".attention.wk", ".attention.wv"}
    block |= {".attention.q_norm", ".attention.k_norm"} if case.qk_norm else set()
    block |= {".mlp.w13"} if case.fuse_mlp else {".mlp.w1"}
    block |= {".mlp.w3"} if case.activation == "swiglu" and not case.fuse_mlp else set()
    outer = {"embedding", "final_norm", "head"}
    return outer | {f"layers.{layer}{part}" for layer in range(case.layers) for part in block}


@pytest.mark.parametrize("text", WORDS.values(), ids=WORDS.keys())
def test_every_module_is_told_with_its_shape(text: str) -> None:
    case = Case.parse(text)
    found = activations(case)
    assert found.keys() == {f"{kind}/{module}" for kind in ("act", "act_grad") for module in modules(case)}
    q_width, kv_width = case.hidden, case.kv_heads * case.head_dim
    widths = {"wqkv": q_width + 2 * kv_width, "wq": q_width, "wk": kv_width, "wv": kv_width, "q_norm": q_width}
    widths |= {"k_norm": kv_width, "w1": case.ffn, "w3": case.ffn, "w13": 2 * case.ffn, "head": case.vocab}
    for name, value in found.items():
        assert value.shape == (case.dp * case.batch, case.seq, widths.get(name.rpartition(".")[2].split("/")[-1], 24))
        assert value.isfinite().all() and value.abs().max() > 0 and not value.requires_grad


def test_activations_in_low_precision_are_close_to_the_truth() -> None:
    case = Case.parse(WORDS["separate"]).but(dtype="bfloat16")
    found, true = activations(case), _activations(truth(case, CPU))
    assert found.keys() == true.keys()
    for name, value in true.items():
        assert value.dtype == torch.float64 and found[name].dtype == torch.bfloat16
        difference = (found[name].double() - value).norm() / value.norm()
        assert difference < 8 * torch.finfo(torch.bfloat16).eps, name
        assert difference > 0 or name == "act/embedding", name  # a lookup rounds nothing


RELU = Case.parse("layers=1 hidden=24 heads=4 ffn=40 seq=16 batch=3 activation=relu dtype=bfloat16 steps=1 lr=0.1")


def test_nothing_may_change_without_a_kink_or_in_float64() -> None:
    assert (
        measure_relu_flips(RELU.but(dtype="float64"), CPU, side=1)
        == measure_relu_flips(RELU.but(activation="gelu"), CPU, side=1)
        == {}
    )


@pytest.mark.parametrize("side", [1, -1])
def test_gradients_change_exactly_where_the_input_lies_within_the_band_on_that_side(side: int) -> None:
    true = truth(RELU, CPU)
    x, grad = true["act/layers.0.mlp.w1"], true["act_grad/layers.0.mlp.w1"]
    gap = measure_relu_flips(RELU, CPU, side=side)["act_grad/layers.0.mlp.w1"]
    near = side * x / (x.square().mean().sqrt() * BAND * torch.finfo(torch.bfloat16).eps)
    # The band is of one micro-batch's rms: a little away from its border both agree.
    inside, outside = (near > 0.05) & (near < 0.8), (near < 0) | (near > 1.25)
    assert inside.sum() > 3 and not gap[outside].any()
    if side == 1:  # what was open closes
        assert torch.equal(gap[inside], -grad[inside])
    assert gap[inside].abs().max() > 0


def test_what_comes_before_the_first_update_and_what_needs_no_gradient_stays() -> None:
    gap = measure_relu_flips(RELU, CPU, side=1)
    assert not any(value.any() for name, value in gap.items() if name.startswith(("act/", "logits/", "loss/")))
    assert gap["grad/layers.0.mlp.w1.weight"].any() and gap["param/layers.0.mlp.w1.weight"].any()
    assert not gap["grad/layers.0.mlp.w2.weight"].any()


SMALL = "tp=1 hidden=24 heads=6 kv_heads=2 ffn=40 vocab=37 seq=7 batch=2 positions=rope bias=true lr=0.1 seed=1 "


@settings(max_examples=10, deadline=None)
@given(case=models(steps=2, micro=2, seq=16, batch=3, vocab=37))
def test_outcome_is_complete_and_finite_and_every_gradient_is_alive(case: Case) -> None:
    outcome = subject(case, CPU)
    names = set(shapes(case))
    steps = range(case.steps)
    assert outcome.keys() == {
        *(f"{kind}/{step}" for kind in ("tokens", "loss", "logits", "grad_norm") for step in steps),
        *(f"{kind}/{name}" for kind in ("grad", "param", "param_after/0") for name in names),
    }
    assert all(value.isfinite().all() and not value.requires_grad for value in outcome.values())
    assert outcome["logits/1"].shape == (case.micro * case.batch, case.seq, case.vocab)
    for name in names:
        dead = name.endswith((".wk.bias", "k_norm.bias")) and case.positions == "learned"  # the same for every score
        assert dead or outcome[f"grad/{name}"].abs().max() > 1e-9, name


@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_sgd_subtracts_the_clipped_gradient(clip: float) -> None:
    case = Case.parse(SMALL).but(steps=1, clip=clip)
    outcome, start = subject(case, CPU), weights(case, CPU)
    norm = torch.cat([outcome[f"grad/{name}"].flatten() for name in start]).norm()
    torch.testing.assert_close(outcome["grad_norm/0"], norm, rtol=1e-13, atol=0)
    assert norm > 1, "the bound really binds"
    factor = case.lr * (clip / (norm + 1e-6) if clip else 1.0)
    for name, weight in start.items():
        right = weight - factor * outcome[f"grad/{name}"]
        torch.testing.assert_close(outcome[f"param/{name}"], right, rtol=1e-12, atol=1e-13)


def test_logits_above_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse(SMALL).but(steps=1, micro=1)
    elements = case.tokens * case.vocab
    monkeypatch.setattr(training, "LARGEST_LOGITS", elements)
    assert "logits/0" in subject(case, CPU)
    monkeypatch.setattr(training, "LARGEST_LOGITS", elements - 1)
    assert "logits/0" not in subject(case, CPU)
