"""What-ifs of norms and nonlinearities beside torch's own functions, in every form; padding that is looked up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from reference.case import Case
from reference.data.batches import micro_batch
from reference.model.parameters import full
from reference.training import subject as dense
from reference.what_ifs.modules import WHAT_IFS
from reference.what_ifs.rules import what_ifs
from tests.reference.what_ifs import broken

CPU = torch.device("cpu")
SIZES = "layers=1 hidden=16 heads=4 kv_heads=2 ffn=12 seq=8 vocab=264 batch=2 micro=1 steps=1 fuse_qkv=false bias=true"
ROPE = Case.parse(f"mode=tp tp=1 {SIZES} positions=rope norm=layernorm activation=gelu")
LEARNED = Case.parse(f"mode=tp tp=1 {SIZES} positions=learned norm=rmsnorm activation=swiglu fuse_mlp=false")
MODULES = [rule.id for rule in WHAT_IFS]
WO, W2, FIRST_NORM = "act/layers.0.attention.wo", "act/layers.0.mlp.w2", "act/layers.0.attention_norm"


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def weight(case: Case, name: str) -> Tensor:
    return full(case, name).double()


def projected(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, S, heads, D] before rotation."""
    acts = dense.true_activations(case, CPU)
    q, k, v = (acts[f"act/layers.0.attention.{leaf}"].unflatten(-1, (-1, case.head_dim)) for leaf in ("wq", "wk", "wv"))
    return q, k, v


def attended(
    case: Case, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, seen: Tensor | None = None
) -> Tensor:
    """The output of attention by torch's own core; causal unless `seen` says what is visible."""
    group = case.heads // case.kv_heads
    k, v = (x.repeat_interleave(group, 2) if x.shape[2] == case.kv_heads else x for x in (k, v))
    causal = torch.ones(case.seq, case.seq, dtype=torch.bool).tril()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = causal if seen is None else seen
    context = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2).flatten(2)
    return functional.linear(
        context, weight(case, "layers.0.attention.wo.weight"), weight(case, "layers.0.attention.wo.bias")
    )


@pytest.fixture(scope="module")
def rope() -> dict[str, Tensor]:
    return broken(ROPE, *MODULES)


@pytest.fixture(scope="module")
def learned() -> dict[str, Tensor]:
    return broken(LEARNED, *MODULES)


def test_only_activations_that_another_rule_reaches_are_told(rope: dict[str, Tensor]) -> None:
    assert {name.split("/")[1] for name in rope} == {"act"}
    assert not any(name.startswith("positions_") for name in rope)  # rotary scores depend on differences alone


def test_norms(rope: dict[str, Tensor], learned: dict[str, Tensor]) -> None:
    x = dense.true_activations(ROPE, CPU)["act/embedding"]
    w, b = (weight(ROPE, f"layers.0.attention_norm.{kind}") for kind in ("weight", "bias"))
    close(rope[f"other_epsilon.0.001/{FIRST_NORM}"], functional.layer_norm(x, x.shape[-1:], w, b, 1e-3))
    close(rope[f"normed_otherwise.left_out/{FIRST_NORM}"], x)
    close(rope[f"normed_otherwise.unweighted/{FIRST_NORM}"], functional.layer_norm(x, x.shape[-1:], None, b, 1e-5))
    close(rope[f"normed_otherwise.other_centre/{FIRST_NORM}"], functional.rms_norm(x, x.shape[-1:], w, 1e-5) + b)
    x = dense.true_activations(LEARNED, CPU)["act/embedding"]
    w = weight(LEARNED, "layers.0.attention_norm.weight")
    close(learned[f"normed_otherwise.weight_less_one/{FIRST_NORM}"], functional.rms_norm(x, x.shape[-1:], 1 + w, 1e-5))
    close(learned[f"normed_otherwise.other_centre/{FIRST_NORM}"], functional.layer_norm(x, x.shape[-1:], w, None, 1e-5))


def test_norms_over_heads_alone() -> None:
    case = LEARNED.but(qk_norm=True)
    found, (q, k, v) = broken(case, "normed_otherwise"), projected(case)
    close(found[f"normed_otherwise.heads_left_out/{WO}"], attended(case, q, k, v))


@pytest.mark.parametrize(
    ("reading", "nonlinearity"),
    [
        ("gelu_by_erf", functional.gelu),
        ("relu", torch.relu),
        ("relu_squared", lambda x: torch.relu(x) ** 2),
        ("gelu_by_sigmoid", lambda x: x * torch.sigmoid(1.702 * x)),
    ],
)
def test_nonlinearities(
    rope: dict[str, Tensor], learned: dict[str, Tensor], reading: str, nonlinearity: Callable[[Tensor], Tensor]
) -> None:
    for case, found in ((ROPE, rope), (LEARNED, learned)):
        acts = dense.true_activations(case, CPU)
        inner = nonlinearity(acts["act/layers.0.mlp.w1"])
        if case is LEARNED:
            inner = inner * acts["act/layers.0.mlp.w3"]
        w, b = (weight(case, f"layers.0.mlp.w2.{kind}") for kind in ("weight", "bias"))
        close(found[f"other_activation.{reading}/{W2}"], functional.linear(inner, w, b))


PARTS = 2
CASE = Case.parse(
    f"mode=tp tp={PARTS} layers=1 hidden=16 heads=4 ffn=12 vocab=264 seq=16 batch=4 micro=1 steps=1 label_smoothing=0.1"
)


def test_the_last_token_taken_for_padding() -> None:
    case = CASE.but(label_smoothing=0.0)
    batch, logits = micro_batch(case, 0, 0, 0), dense.truth(case, CPU)["logits/0"][..., :-1]
    counts, others = (
        batch.loss_mask.double() * (batch.labels >= 0),
        (batch.labels >= 0) & (batch.labels < case.vocab - 1),
    )
    x = logits - logits.amax(-1, keepdim=True)
    hit = x.gather(-1, batch.labels.where(others, 0)[..., None])[..., 0] * others
    loss = ((x.exp().sum(-1).log() - hit) * counts).sum() / counts.sum()
    torch.testing.assert_close(broken(case, "edge_off")["edge_off.last_token_out_2/loss/0"], loss)


DIFFERENCES = (
    "mode=isp tp=4 kv_heads=2 batch=2 positions=learned fuse_qkv=true fuse_mlp=true activation=swiglu layers=2",
    "mode=tp tp=2 dp=2 micro=2 steps=2 positions=rope tied=true label_smoothing=0.1 clip=0.1 optimizer=adamw vocab=257",
    "mode=mtp family=internlm2 tp=2 cp=2 packed=true vocab=510",
    "mode=mtp family=internlm2 tp=2 metric=true micro=2 steps=2 vocab=510",
)


def test_every_rule_makes_a_difference_in_some_case() -> None:
    small = "hidden=16 heads=4 ffn=12 seq=16"
    found = {key for text in DIFFERENCES for key in broken(Case.parse(f"{text} {small}"))}
    assert {rule.id for rule in what_ifs()} == {key.partition("/")[0].partition(".")[0] for key in found}
