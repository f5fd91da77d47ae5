"""Tests of model/decoder. The dense model is Hugging Face's on mapped weights: logits, loss, every gradient, in
float64.

Code that would round to float32 runs with `DoubleTorch`.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch
from shardproof.reference.model.parameters import shapes, weights
from tests.reference.model.dense_run import CPU, dense_run, ignored_labels, largest_difference, rows, sentences
from tests.reference.model.hugging_face import gpt2, llama, opt

pytestmark = pytest.mark.peers

ALLOWED = 1e-10


Tensors = dict[str, Tensor]


class DoubleTorch:
    """The module torch, where float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def double_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "transformers (extra `peers`) is not installed"
    for name in ("opt", "llama", "qwen3"):
        module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}", reason=reason)
        monkeypatch.setattr(module, "torch", DoubleTorch())


def renamed(ours: Tensors, names: dict[str, str], layers: str, apart: Callable[[str, Tensor], Tensors]) -> Tensors:
    """Our tensors (weights or gradients) under their names; `apart` gives the parts of one, in their layout."""
    theirs: Tensors = {}
    for name, value in ours.items():
        module, _, leaf = name.rpartition(".")
        for part, piece in apart(module, value).items():
            in_layer, _, inner = part.removeprefix("layers.").partition(".")
            stem, inner = (f"{layers}.{in_layer}.", inner) if part.startswith("layers.") else ("", part)
            theirs[f"{stem}{names[inner]}.{leaf}"] = piece
    return theirs


def as_gpt2(case: Case, ours: Tensors) -> Tensors:
    """Their qkv is [q|k|v] instead of per group, and Conv1D weights are [in, out]."""

    def laid_out(module: str, value: Tensor) -> Tensors:
        if module.endswith("wqkv"):
            value = value.unflatten(0, (case.heads, 3, case.head_dim)).transpose(0, 1).flatten(0, 2)
        is_conv1d = value.dim() == 2 and (".attention." in module or ".mlp." in module)
        return {module: value.T if is_conv1d else value}

    names = {"embedding.tokens": "transformer.wte", "embedding.positions": "transformer.wpe"}
    names |= {"final_norm": "transformer.ln_f", "head": "lm_head"}
    names |= {"attention_norm": "ln_1", "attention.wqkv": "attn.c_attn", "attention.wo": "attn.c_proj"}
    names |= {"mlp_norm": "ln_2", "mlp.w1": "mlp.c_fc", "mlp.w2": "mlp.c_proj"}
    return renamed(ours, names, "transformer.h", laid_out)


def as_opt(_case: Case, ours: Tensors) -> Tensors:
    """Their table has two rows before position 0: zeros."""
    table, stem = "embedding.positions.weight", "model.decoder"
    names = {"embedding.tokens": f"{stem}.embed_tokens", "embedding.positions": f"{stem}.embed_positions"}
    names |= {"final_norm": f"{stem}.final_layer_norm", "mlp.w1": "fc1", "mlp.w2": "fc2"}
    names |= {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
    names |= {f"attention.w{x}": f"self_attn.{'out' if x == 'o' else x}_proj" for x in "qkvo"}
    padded = {**ours, table: functional.pad(ours[table], (0, 0, 2, 0))}
    return renamed(padded, names, f"{stem}.layers", lambda module, value: {module: value})


def as_llama(case: Case, ours: Tensors) -> Tensors:
    """Fused tensors are taken apart."""

    def apart(module: str, value: Tensor) -> Tensors:
        if module.endswith(".wqkv"):
            stem, group = module.removesuffix("qkv"), case.heads // case.kv_heads
            parts = value.unflatten(0, (case.kv_heads, group + 2, case.head_dim)).split((group, 1, 1), dim=1)
            return {stem + leaf: part.flatten(0, 2) for leaf, part in zip("qkv", parts, strict=True)}
        if module.endswith(".w13"):
            stem = module.removesuffix("13")
            return {stem + "1": value[: case.ffn], stem + "3": value[case.ffn :]}
        return {module: value}

    names = {"embedding.tokens": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    names |= {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    names |= {f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"}
    names |= {f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
    names |= {"mlp.w1": "mlp.gate_proj", "mlp.w3": "mlp.up_proj", "mlp.w2": "mlp.down_proj"}
    return renamed(ours, names, "model.layers", apart)


NAMED = {"gpt": as_gpt2, "opt": as_opt}


def of_hugging_face(case: Case) -> torch.nn.Module:
    """The model of Hugging Face with our weights."""
    model, named = {"gpt": gpt2, "opt": opt}.get(case.family, llama)(case), NAMED.get(case.family, as_llama)
    missing, unexpected = model.load_state_dict(named(case, weights(case, CPU)), strict=False)
    assert unexpected == [] and missing == (["lm_head.weight"] if case.tied else [])
    return model


def their_logits(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Hugging Face's logits, one call for every sentence of a packed row."""
    ends = [0, batch.tokens.shape[1]] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    pieces = [batch.tokens[:, start:end] for start, end in pairwise(ends)]
    return torch.cat([model(piece, attention_mask=torch.ones_like(piece)).logits for piece in pieces], dim=1)


SIZES = "tp=1 hidden=48 heads=6 kv_heads=2 ffn=40 vocab=61 seq=13 batch=3 norm=rmsnorm packed=false "
INTERNLM2 = SIZES + "family=internlm2 seed=1"
SENTENCES = ((39,), (1, 38), (13, 5, 1, 20), (20, 19))
CASES: dict[str, tuple[str, tuple[int, ...]]] = {
    "gpt2": ("tp=1 hidden=32 heads=4 kv_heads=4 vocab=61 seq=11 batch=3 seed=1", ()),
    "gpt2, untied": ("tp=1 hidden=24 heads=3 kv_heads=3 ffn=40 vocab=50 seq=7 batch=2 layers=3 tied=false seed=2", ()),
    "opt": ("family=opt tp=1 fuse_qkv=false hidden=24 heads=4 ffn=40 vocab=61 seq=9 batch=3 seed=6", ()),
    "internlm2": (INTERNLM2, ()),
    "internlm2, fused gate and up": (SIZES + "family=internlm2 fuse_mlp=true seed=2", ()),
    "llama, separate q k v": (SIZES + "family=llama fuse_qkv=false seed=3", ()),
    "llama, biased and tied": (SIZES + "family=llama bias=true tied=true layers=3 kv_heads=3 seed=4", ()),
    "qwen3, q/k norm": (SIZES + "family=llama qk_norm=true seed=5", ()),
    **{f"internlm2, sentences of {lengths}": (f"{INTERNLM2} packed=true", lengths) for lengths in SENTENCES},
}
"""Words of a case, and the lengths of the sentences of its packed row."""


@pytest.mark.parametrize(("text", "lengths"), CASES.values(), ids=CASES)
def test_the_dense_model_is_that_of_hugging_face(text: str, lengths: tuple[int, ...]) -> None:
    """A bias of k adds the same to every score of a query: without rotation its gradient is 0."""
    case = Case.parse(text)
    batch = sentences(case, lengths, seed=5) if lengths else rows(case, seed=case.seed)
    model, found = of_hugging_face(case), dense_run(case, batch)
    logits = their_logits(model, batch)
    loss = functional.cross_entropy(logits.flatten(0, 1), ignored_labels(batch).flatten())
    loss.backward()
    assert found.gradients.keys() == shapes(case).keys()
    assert largest_difference(found.logits, logits) < ALLOWED
    assert abs(found.loss - loss.detach()) < ALLOWED
    gradients = NAMED.get(case.family, as_llama)(case, found.gradients)
    right = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == right.keys()
    for name, gradient in right.items():
        if case.family == "opt" and name.endswith("k_proj.bias"):
            assert gradients[name].abs().max() < ALLOWED and gradient.abs().max() < ALLOWED
        else:
            assert largest_difference(gradients[name], gradient) < ALLOWED, name


def test_comparison_notices_a_sentence_that_sees_its_neighbour() -> None:
    case = Case.parse(f"{INTERNLM2} packed=true")
    batch = sentences(case, (20, 19), seed=5)
    merged = dense_run(case, replace(batch, positions=torch.arange(39)[None], cu_seqlens=None))
    assert largest_difference(merged.logits, their_logits(of_hugging_face(case), batch)) > 1e-3
