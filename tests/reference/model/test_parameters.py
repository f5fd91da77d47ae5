"""Full weights follow from seed and name alone; the control run and low precision are within rounding of the truth."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardproof.harness.verdicts.verdict import PASS
from shardproof.reference.case import Case
from shardproof.reference.model import layers, parameters
from shardproof.reference.model.parameters import LastRead, drawn_weight, full, shapes, weights
from shardproof.reference.training.control import control, merged_attention, reorder_sums, split_attention
from shardproof.reference.training.truth import subject, truth
from shardproof.suites.session.prover import Prover
from tests.reference.model.dense_run import CPU, models, noise

DTYPES = ("float64", "float32", "bfloat16", "float16")
UNRELATED: tuple[dict[str, Any], ...] = (
    {"mode": "isp", "tp": 2, "dp": 3, "kv_heads": 2, "head": "local"},
    {"batch": 5, "micro": 7, "steps": 9, "optimizer": "adamw", "lr": 0.5, "clip": 1.0},
    {"label_smoothing": 0.3, "layers": 3, "qk_norm": True},
    {"tied": False, "activation": "swiglu", "ffn": 256},
)
"""Words that say nothing about the weights that two cases have in common."""


def test_weights_depend_on_seed_and_name_only() -> None:
    case = Case.of(seed=3)
    for words in UNRELATED:
        other = case.but(**words)
        common = [name for name, shape in shapes(case).items() if shapes(other).get(name) == shape]
        assert len(common) >= 26
        assert all(torch.equal(full(case, name), full(other, name)) for name in common), words


@settings(max_examples=20, deadline=None)
@given(case=models(), other_seed=st.integers(0, 2**31 - 1))
def test_no_two_parameters_and_no_two_seeds_share_numbers(case: Case, other_seed: int) -> None:
    tensors = [full(case, name) for name in shapes(case)]
    if other_seed != case.seed:
        tensors += [full(case.but(seed=other_seed), name) for name in shapes(case)]
    heads = [tuple(tensor.flatten()[:4].tolist()) for tensor in tensors]
    assert len(set(heads)) == len(heads)


@settings(max_examples=20, deadline=None)
@given(case=models(bias=True, norm="layernorm", qk_norm=True), dtype=st.sampled_from(DTYPES))
def test_no_bias_is_0_and_no_norm_weight_is_1_in_any_dtype(case: Case, dtype: str) -> None:
    for name in shapes(case):
        value = full(case.but(dtype=dtype), name)
        assert value.isfinite().all()
        if name.endswith(".bias"):
            assert value.abs().min() > 0.04 and value.abs().max() < 0.21, name
        elif name.endswith("norm.weight"):
            assert (value - 1).abs().min() > 0.1 and value.min() > 0.4, name


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_low_precision_weights_are_the_float64_weights_rounded(dtype: str) -> None:
    case = Case.of(seed=8)
    for name in shapes(case):
        exact = full(case, name)
        rounded = full(case.but(dtype=dtype), name)
        assert torch.equal(rounded, exact.to(getattr(torch, dtype)))
        assert not torch.equal(rounded.double(), exact)


def test_linear_weights_have_standard_deviation_of_half_over_root_inputs() -> None:
    case = Case.of(hidden=256, heads=8)
    deviation = full(case, "layers.0.attention.wo.weight").std().item()
    assert deviation == pytest.approx(1 / 32, rel=0.02)


def test_the_last_reader_gets_all_weights_and_leaves_no_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case, device = Case(), torch.device("cpu")
    whole = weights(case, device)
    large = max(whole, key=lambda name: whole[name].numel())
    monkeypatch.setattr(parameters, "_LARGE", whole[large].numel() - 1)
    read = dict(LastRead(case, device))
    assert list(read) == list(whole) and all(read[name] is whole[name] for name in whole)
    assert drawn_weight(case, large) is not whole[large] and drawn_weight(case, large).equal(whole[large])
    assert all(drawn_weight(case, name) is whole[name] for name in whole if whole[name].numel() < whole[large].numel())


def test_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"name=head\.weight: .*legal: embedding\.tokens\.weight"):
        full(Case.of(tied=True), "head.weight")


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("internlm2-1.8b", 1.889),
        ("internlm2-7b", 7.738),
        ("internlm2-20b", 19.861),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.554),
        ("llama3-405b", 405.853),
        ("opt-125m", 0.125),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, billions: float) -> None:
    count = sum(math.prod(shape) for shape in shapes(Case.of(preset=preset, tp=1)).values())
    assert count / 1e9 == pytest.approx(billions, abs=0.0006)


CASES = {
    "gpt": "tp=2 dp=3 hidden=48 heads=6 kv_heads=2 vocab=67 seq=8 batch=3 lr=0.1 seed=1",
    "internlm2, packed": "preset=tiny-internlm2 hidden=48 heads=6 kv_heads=3 mode=msp tp=3 ffn=129 vocab=66 seq=9",
}


def epsilons(found: dict[str, Tensor], true: dict[str, Tensor], dtype: str, kind: str) -> float:
    """The largest relative distance of one kind of tensors, in epsilons of the dtype."""
    eps = torch.finfo(getattr(torch, dtype)).eps
    distances = [(found[n].double() - t).norm() / t.norm() for n, t in true.items() if n.startswith(kind)]
    return float(max(distances)) / eps


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
    """A learning rate of 1 makes scores large, and Adam makes a full step of any gradient that does not round to 0."""
    words = "layers=4 hidden=24 heads=4 kv_heads=2 ffn=24 vocab=394 seq=12 batch=3 micro=1 steps=2 optimizer=adamw"
    case = Case.parse(f"mode=tp tp=1 cp=2 cp_comm=alltoall family=llama {words} dtype=float32 seed=1")
    assert prover.proof(case).verdict == PASS


def test_linears_and_norms_of_the_control_round_in_other_places_forward_and_backward() -> None:
    x, weight, scale = (noise(*shape, seed=seed).bfloat16() for seed, shape in enumerate(((4, 8, 48), (48, 48), (48,))))
    upstream, split = noise(4, 8, 48, seed=3).bfloat16(), reorder_sums(Case.parse(CASES["gpt"]))

    def rounded(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.clone().requires_grad_() for one in inputs]
        output = function(*leaves, None)
        return *torch.autograd.grad(output, leaves, upstream), output

    linears = zip(rounded(layers.linear, x, weight), rounded(split.linear, x, weight), strict=True)
    assert not any(torch.equal(one, other) for one, other in linears)
    assert not torch.equal(rounded(layers.norm, x, scale)[1], rounded(split.norm, x, scale)[1])


@pytest.mark.parametrize(("form", "dtype"), [("gpt", "float32"), ("gpt", "bfloat16"), ("internlm2, packed", "float16")])
def test_low_precision_and_control_lie_some_epsilons_from_the_truth(form: str, dtype: str) -> None:
    case = Case.parse(CASES[form]).but(dtype=dtype)
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
