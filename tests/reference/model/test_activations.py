"""Activations and their gradients: the canonical modules, what calculus says of them, what a relu's kink may change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from reference.case import Case
from reference.data.batches import Batch, micro_batch
from reference.model.parameters import shapes, weights
from reference.training.activations import observe
from reference.training.kinks import BAND, kinks
from reference.training.subject import activations, subject, true_activations
from tests.reference.model.dense_run import CPU, dense_run
from tests.reference.model.drawn_batches import rows
from tests.reference.model.drawn_cases import models

FULL = "tp=1 dp=3 hidden=24 heads=6 kv_heads=2 ffn=16 vocab=37 seq=5 batch=2 bias=true "
WORDS = {
    "fused": FULL + "activation=swiglu fuse_mlp=true fuse_qkv=true positions=learned",
    "separate": FULL + "activation=swiglu fuse_qkv=false qk_norm=true positions=rope tied=false",
    "gelu": FULL + "fuse_qkv=true positions=rope norm=rmsnorm",
}


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
    found = activations(case, CPU)
    assert found.keys() == {f"{kind}/{module}" for kind in ("act", "act_grad") for module in modules(case)}
    q_width, kv_width = case.hidden, case.kv_heads * case.head_dim
    widths = {"wqkv": q_width + 2 * kv_width, "wq": q_width, "wk": kv_width, "wv": kv_width, "q_norm": q_width}
    widths |= {"k_norm": kv_width, "w1": case.ffn, "w3": case.ffn, "w13": 2 * case.ffn, "head": case.vocab}
    for name, value in found.items():
        assert value.shape == (case.dp * case.batch, case.seq, widths.get(name.rpartition(".")[2].split("/")[-1], 24))
        assert value.isfinite().all() and value.abs().max() > 0 and not value.requires_grad


def test_activations_are_those_of_micro_batch_0_of_step_0_on_each_data_rank() -> None:
    case = Case.parse(WORDS["fused"]).but(micro=2, steps=2)
    logits, heads = subject(case, CPU)["logits/0"], activations(case, CPU)["act/head"]
    right = logits.unflatten(0, (case.dp, case.micro, case.batch))[:, 0].flatten(0, 1)
    assert torch.equal(heads, right)


def test_gradient_of_the_logits_is_probability_minus_target() -> None:
    case = Case.parse(WORDS["fused"]).but(dp=1)
    batch, found = micro_batch(case, 0, 0, 0), activations(case, CPU)
    counts = (batch.labels >= 0) & (batch.loss_mask > 0)
    right = found["act/head"].softmax(-1)
    right -= torch.nn.functional.one_hot(batch.labels.clamp(min=0), case.vocab)
    torch.testing.assert_close(found["act_grad/head"], right * counts[..., None], rtol=0, atol=1e-13)


@pytest.mark.parametrize("text", [WORDS["fused"], WORDS["separate"]], ids=["fused", "separate"])
def test_gradients_of_outputs_add_up_to_the_gradients_of_biases(text: str) -> None:
    # d/d bias = sum over tokens of d/d output, for every linear of the model
    case = Case.parse(text).but(dp=1, micro=1, steps=1, label_smoothing=0.1)
    outcome, found = subject(case, CPU), activations(case, CPU)
    batch = micro_batch(case, 0, 0, 0)
    tokens = ((batch.labels >= 0) & (batch.loss_mask > 0)).sum()
    linears = [name.removesuffix(".bias") for name in shapes(case) if name.endswith(".bias") and "norm" not in name]
    assert len(linears) == 2 * (4 if case.fuse_qkv else 7)
    for module in linears:
        right = outcome[f"grad/{module}.bias"] * tokens
        torch.testing.assert_close(found[f"act_grad/{module}"].sum((0, 1)), right, rtol=0, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(case=models(positions="learned", batch=3))
def test_embedding_gradient_is_that_of_the_position_table(case: Case) -> None:
    batch = rows(case, seed=case.seed % 1000)

    def feed(_: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        return batch

    found = observe(case, weights(case, CPU), feed=feed)["act_grad/embedding"].sum(0)
    tokens = ((batch.labels >= 0) & (batch.loss_mask > 0)).sum()
    right: Tensor = dense_run(case, batch).gradients["embedding.positions.weight"] * tokens
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


def test_true_activations_are_close_in_low_precision_and_equal_in_float64() -> None:
    case = Case.parse(WORDS["separate"]).but(dtype="bfloat16")
    found, true = activations(case, CPU), true_activations(case, CPU)
    assert found.keys() == true.keys()
    for name, value in true.items():
        assert value.dtype == torch.float64 and found[name].dtype == torch.bfloat16
        difference = (found[name].double() - value).norm() / value.norm()
        assert difference < 8 * torch.finfo(torch.bfloat16).eps, name
        assert difference > 0 or name == "act/embedding", name  # a lookup rounds nothing
    exact = case.but(dtype="float64")
    found, true = activations(exact, CPU), true_activations(exact, CPU)
    assert all(torch.equal(value, true[name]) for name, value in found.items())


RELU = Case.parse("layers=1 hidden=24 heads=4 ffn=40 seq=16 batch=3 activation=relu dtype=bfloat16 steps=1 lr=0.1")


@pytest.mark.parametrize("words", [{"dtype": "float64"}, {"activation": "gelu"}])
def test_nothing_may_change_without_a_kink_or_in_float64(words: dict[str, str]) -> None:
    assert kinks(RELU.but(**words), CPU, side=1) == {}


@pytest.mark.parametrize("side", [1, -1])
def test_gradients_change_exactly_where_the_input_lies_within_the_band_on_that_side(side: int) -> None:
    truth = true_activations(RELU, CPU)
    x, grad = truth["act/layers.0.mlp.w1"], truth["act_grad/layers.0.mlp.w1"]
    gap = kinks(RELU, CPU, side=side)["act_grad/layers.0.mlp.w1"]
    near = side * x / (x.square().mean().sqrt() * BAND * torch.finfo(torch.bfloat16).eps)
    # The band is of one micro-batch's rms: a little away from its border both agree.
    inside, outside = (near > 0.05) & (near < 0.8), (near < 0) | (near > 1.25)
    assert inside.sum() > 3 and not gap[outside].any()
    if side == 1:  # what was open closes
        assert torch.equal(gap[inside], -grad[inside])
    assert gap[inside].abs().max() > 0


def test_what_comes_before_the_first_update_and_what_needs_no_gradient_stays() -> None:
    gap = kinks(RELU, CPU, side=1)
    assert not any(value.any() for name, value in gap.items() if name.startswith(("act/", "logits/", "loss/")))
    assert gap["grad/layers.0.mlp.w1.weight"].any() and gap["param/layers.0.mlp.w1.weight"].any()
    assert not gap["grad/layers.0.mlp.w2.weight"].any()
