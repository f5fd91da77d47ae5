"""Limits hold for any truth: they follow from the case's dtype and from rounding, not from the truth's text."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardproof.harness.checking.measures.distance import distance
from shardproof.harness.checking.measures.measured import epsilon
from shardproof.harness.checking.measures.tolerance import CONTROL_FACTOR, FLOOR_EPSILONS
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.plain_case import Vocabulary
from shardproof.harness.running.trials.rounding import MORE_PARTS
from shardproof.harness.running.truth.own import OwnTruth
from shardproof.harness.subject import resolve_subject

SHAPES = {
    "q": (10, 10),
    "k": (10, 10),
    "v": (10, 10),
    "gain": (10,),
    "up": (14, 10),
    "down": (10, 14),
    "head": (17, 10),
}
Weights = Mapping[str, Tensor]


def drawn(seed: int, *shape: int, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * std


def scores_of(w: Weights, x: Tensor) -> Tensor:
    """Attention, a norm, a network and a head: x [rows, tokens, 10] -> [rows, tokens, 17]."""
    q, k, v = (x @ w[name].T for name in "qkv")
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    x = x + (q @ k.mT / math.sqrt(10)).masked_fill(hidden, -math.inf).softmax(-1) @ v
    x = functional.layer_norm(x, (10,), w["gain"])
    scores: Tensor = (x + functional.gelu(x @ w["up"].T) @ w["down"].T) @ w["head"].T
    return scores


def loss_of(w: Weights, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores_of(w, x).flatten(0, 1), labels.flatten())


def by_numpy(w: Weights, x: Tensor, labels: Tensor) -> Tensor:
    """A loss whose scores pass through numpy, which no mode of torch sees."""
    scores = scores_of(w, x)
    beside = torch.from_numpy(scores.detach().double().numpy() * 0.0).to(scores.dtype)
    return functional.cross_entropy((scores + beside).flatten(0, 1), labels.flatten())


def train(
    case: Any,
    device: torch.device,
    *,
    wide: bool = False,
    scale: Tensor | None = None,
    loss: Any = loss_of,
    pure: bool = False,
) -> dict[str, Tensor]:
    """Two steps of AdamW with clipping, in float64 or in the case's dtype. Inputs may be scaled by a constant in
    float64, and gradients are those of autograd or of torch.func.
    """
    dtype = torch.float64 if wide else getattr(torch, case.dtype)
    std = {name: 0.3 if len(shape) > 1 else 0.1 for name, shape in SHAPES.items()}
    first = {n: (n == "gain") + drawn(case.seed + i, *s, std=std[n]) for i, (n, s) in enumerate(SHAPES.items())}
    w = {name: value.to(dtype).requires_grad_() for name, value in first.items()}
    optimizer, out = torch.optim.AdamW(w.values(), lr=1e-2), {}
    for step in range(case.steps):
        x = drawn(1000 * case.seed + step, 3, case.tokens, 10).to(dtype)
        x = x if scale is None else (x * scale).to(torch.float64 if wide else dtype)
        labels = torch.randint(17, (3, case.tokens), generator=torch.Generator().manual_seed(step))
        if pure:
            found, value = torch.func.grad_and_value(loss)({n: p.detach() for n, p in w.items()}, x, labels)
            for name, parameter in w.items():
                parameter.grad = found[name]
        else:
            optimizer.zero_grad()
            value = loss(w, x, labels)
            value.backward()
        out[f"loss/{step}"] = value.detach()
        out |= {
            f"grad/{name}": parameter.grad.clone()
            for name, parameter in w.items()
            if not step and parameter.grad is not None
        }
        torch.nn.utils.clip_grad_norm_(w.values(), 0.5)
        optimizer.step()
    return out | {f"param/{name}": parameter.detach() for name, parameter in w.items()}


def in_default_dtype(case: Any, device: torch.device) -> dict[str, Tensor]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, case.dtype) if case.dtype == "float64" else torch.float32)
    try:
        return train(case, device)
    finally:
        torch.set_default_dtype(before)


def in_autocast(case: Any, device: torch.device) -> dict[str, Tensor]:
    """Products in the case's dtype, where torch has that of autocast; parameters are wider."""
    low = case.dtype == "bfloat16"
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        return train(case.but(dtype="float32") if low else case, device)


ONE = torch.tensor([1.1], dtype=torch.float64)
WAYS: Mapping[str, Callable[..., dict[str, Tensor]]] = {
    "default dtype": in_default_dtype,
    "autocast": in_autocast,
    "double": partial(train, wide=True),
    "constants": partial(train, scale=ONE),
    "promoted": partial(train, wide=True, scale=ONE),
    "numpy": partial(train, loss=by_numpy),
    "func": partial(train, pure=True),
    "func in double": partial(train, wide=True, pure=True),
}


def allowed(way: Callable[..., dict[str, Tensor]], text: str) -> dict[str, float]:
    """The limit of each tensor of this truth by its control runs."""
    case = Vocabulary.of({"tokens": 16}).parse(text)
    own = OwnTruth(subject=resolve_subject(train), dense=way, engine=InprocEngine())
    true = own(case, torch.device("cpu"))
    control = replace(own, control=True)
    runs = [control(case, torch.device("cpu"), parts=parts) for parts in MORE_PARTS[1:6]]
    worst = {name: max(distance(run[name], true[name]).frobenius for run in runs) for name in true}
    floor = FLOOR_EPSILONS["frobenius"] * epsilon(case.dtype)
    return {name: max(floor, CONTROL_FACTOR * error) for name, error in worst.items()}


@pytest.mark.parametrize(
    ("dtype", "ways"),
    [
        ("bfloat16", ("autocast", "promoted", "numpy")),
        pytest.param("bfloat16", WAYS, marks=pytest.mark.deep("15 CPU seconds")),
        pytest.param("float32", WAYS, marks=pytest.mark.deep("15 CPU seconds")),
    ],
)
def test_a_function_has_the_same_limits_however_it_is_written(dtype: str, ways: Iterable[str]) -> None:
    """Within a factor of two in the middle of three draws of weights and samples: one draw may be lucky."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for seed, tokens in ((1, 12), (2, 25), (3, 40)):
        text = f"dtype={dtype} seed={seed} tokens={tokens}"
        plain = allowed(train, text)
        for way in ways:
            for name, limit in allowed(WAYS[way], text).items():
                ratios.setdefault((way, name), []).append(limit / plain[name])
    middle = {name: sorted(found)[1] for name, found in ratios.items()}
    assert all(1 / 2.1 < ratio < 2.1 for ratio in middle.values()), middle
