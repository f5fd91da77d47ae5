"""Full weights: from seed and name alone, nothing near a value that could hide a bug, and the published sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.case import Case
from reference.model import parameters
from reference.model.parameters import LastRead, drawn, full, shapes, weights
from tests.reference.model.drawn_cases import models

DTYPES = ("float64", "float32", "bfloat16", "float16")
UNRELATED: tuple[dict[str, Any], ...] = (
    {"mode": "isp", "tp": 2, "dp": 3, "kv_heads": 2, "head": "local"},
    {"batch": 5, "micro": 7, "steps": 9, "optimizer": "adamw", "lr": 0.5, "clip": 1.0},
    {"label_smoothing": 0.3, "layers": 3, "qk_norm": True},
    {"tied": False, "activation": "swiglu", "ffn": 256},
)
"""Words that say nothing about the weights that two cases have in common."""


@pytest.mark.parametrize("words", UNRELATED, ids=str)
def test_weights_depend_on_seed_and_name_only(words: dict[str, Any]) -> None:
    case = Case.of(seed=3)
    other = case.but(**words)
    common = {name: shape for name, shape in shapes(case).items() if shapes(other).get(name) == shape}
    assert len(common) >= 26
    for name in common:
        assert torch.equal(full(case, name), full(other, name)), name


@settings(max_examples=20, deadline=None)
@given(case=models(), other_seed=st.integers(0, 2**31 - 1))
def test_no_two_parameters_and_no_two_seeds_share_numbers(case: Case, other_seed: int) -> None:
    tensors = [full(case, name) for name in shapes(case)]
    if other_seed != case.seed:
        tensors += [full(case.but(seed=other_seed), name) for name in shapes(case)]
    heads = [tuple(tensor.flatten()[:4].tolist()) for tensor in tensors]
    assert len(set(heads)) == len(heads)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(case=models(bias=True, norm="layernorm", qk_norm=True))
def test_no_bias_is_0_and_no_norm_weight_is_1_in_any_dtype(dtype: str, case: Case) -> None:
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
    assert drawn(case, large) is not whole[large] and drawn(case, large).equal(whole[large])
    assert all(drawn(case, name) is whole[name] for name in whole if whole[name].numel() < whole[large].numel())


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
