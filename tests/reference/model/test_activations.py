"""Activations and their gradients by canonical modules; dense training: means, optimizers, clipping, ties, packs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.case import Case
from reference.data.batches import Batch, micro_batch
from reference.model.parameters import shapes, weights
from reference.training import steps as training
from reference.training.kinks import BAND, kinks
from reference.training.steps import Feed, train
from reference.training.subject import activations, subject, true_activations
from tests.reference.model.dense_run import CPU, dense_run, joined, models, rows

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


SMALL = "tp=1 hidden=24 heads=6 kv_heads=2 ffn=40 vocab=37 seq=7 batch=2 positions=rope bias=true lr=0.1 seed=1 "


def close(found: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    """Assert equal names and values within `tolerance` of each tensor's largest element (at least 1e-3)."""
    assert found.keys() == right.keys()
    for name, value in right.items():
        largest = max(value.abs().max().item(), 1e-3)
        atol = tolerance * largest
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=f"{name}: {{}}".format)


@settings(max_examples=25, deadline=None)
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


@settings(max_examples=10, deadline=None)
@given(micro=st.integers(1, 3), dp=st.integers(1, 3), batch=st.integers(1, 2), seed=st.integers(0, 999))
def test_micro_batches_and_data_ranks_equal_one_big_batch(micro: int, dp: int, batch: int, seed: int) -> None:
    case = Case.parse(SMALL).but(micro=micro, dp=dp, batch=batch, label_smoothing=0.1, clip=0.5, steps=2)
    whole = case.but(micro=1, dp=1, batch=batch * micro * dp)

    def one(_: Case, step: int, m: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        return rows(case, seed=seed + 100 * step + micro * dp_rank + m)

    def all_(_: Case, step: int, m: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        return joined([one(case, step, i % micro, i // micro, device=device) for i in range(micro * dp)])

    parts, big = train(case, weights(case, CPU), feed=one), train(whole, weights(whole, CPU), feed=all_)
    close(parts, big)
    reversed_sums = train(case, weights(case, CPU), feed=one, last_first=True)
    close(reversed_sums, big)
    if micro * dp > 2:
        assert not torch.equal(reversed_sums["grad/final_norm.weight"], parts["grad/final_norm.weight"])


def clipped(case: Case, norm: Tensor) -> float:
    return min(1.0, case.clip / (norm.item() + 1e-6)) if case.clip else 1.0


@pytest.mark.parametrize("clip", [0.0, 0.25, 1e6], ids=["off", "binding", "slack"])
def test_sgd_subtracts_the_clipped_gradient(clip: float) -> None:
    case = Case.parse(SMALL).but(steps=1, clip=clip)
    outcome, start = subject(case, CPU), weights(case, CPU)
    gradients = {name: outcome[f"grad/{name}"] for name in start}
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    torch.testing.assert_close(outcome["grad_norm/0"], norm, rtol=1e-13, atol=0)
    assert clip != 0.25 or norm > 1  # the bound really binds
    for name, weight in start.items():
        right = weight - case.lr * clipped(case, norm) * gradients[name]
        torch.testing.assert_close(outcome[f"param/{name}"], right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_adamw_follows_its_formula_for_three_steps(clip: float) -> None:
    case = Case.parse(SMALL).but(optimizer="adamw", lr=0.01, clip=clip, steps=3)
    values = weights(case, CPU)
    first = {name: torch.zeros_like(value) for name, value in values.items()}
    second = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in range(case.steps):
        # one step of plain SGD on this step's data tells the gradient and the norm there
        probe = train(case.but(optimizer="sgd", steps=1, clip=0.0), values, feed=shifted(step))
        factor = clipped(case, probe["grad_norm/0"])
        for name, value in values.items():
            gradient = factor * probe[f"grad/{name}"]
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient**2
            mean, square = first[name] / (1 - 0.9 ** (step + 1)), second[name] / (1 - 0.999 ** (step + 1))
            values[name] = value * (1 - case.lr * 0.01) - case.lr * mean / (square.sqrt() + 1e-8)
    outcome = subject(case, CPU)
    for name, value in values.items():
        torch.testing.assert_close(outcome[f"param/{name}"], value, rtol=0, atol=1e-9)


def shifted(by: int) -> Feed:
    """The case's own micro-batches, `by` steps later."""

    def feed(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        return micro_batch(case, step + by, micro, dp_rank, device=device)

    return feed


@pytest.mark.parametrize("words", [{}, {"packed": True}], ids=["rows", "packed"])
def test_logits_are_ordered_by_data_rank_micro_batch_and_row(words: dict[str, Any]) -> None:
    case = Case.parse(SMALL).but(dp=3, micro=2, steps=1, **words)
    outcome = subject(case, CPU)
    length = 1 if case.packed else case.batch
    assert outcome["logits/0"].shape[0] == case.dp * case.micro * length
    for data_rank, micro in [(0, 1), (2, 0)]:
        batch = micro_batch(case, 0, micro, data_rank)
        start = (data_rank * case.micro + micro) * length
        assert torch.equal(outcome["logits/0"][start : start + length], dense_run(case, batch).logits)


def test_logits_above_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse(SMALL).but(steps=1, micro=1)
    elements = case.tokens * case.vocab
    monkeypatch.setattr(training, "LARGEST_LOGITS", elements)
    assert "logits/0" in subject(case, CPU)
    monkeypatch.setattr(training, "LARGEST_LOGITS", elements - 1)
    assert "logits/0" not in subject(case, CPU)
