"""The dense model is Hugging Face's on mapped weights: logits, loss, every gradient, in float64.

GPT is its GPT-2, OPT its OPT, InternLM2 and Llama its Llama. With q/k norm they are its Qwen3, which normalises every
head of q and k before it rotates them. Code that would round to float32 runs with `DoubleTorch`.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from reference.case import Case
from reference.data.batches import Batch
from reference.model.parameters import shapes, weights
from tests.reference.model.dense_run import CPU, alone, dense_run, ignored_labels, largest_difference, rows, sentences

pytestmark = pytest.mark.peers

ALLOWED = 1e-10


def transformers() -> Any:
    """The library, imported when a test first needs it: that takes three seconds."""
    return pytest.importorskip("transformers", reason="the extra `peers` is not installed")


Tensors = dict[str, Tensor]


def equal(
    case: Case,
    batch: Batch,
    model: torch.nn.Module,
    as_theirs: Callable[[Case, Tensors], Tensors],
    logits_of: Callable[[torch.nn.Module, Batch], Tensor],
    zero: str = "nowhere",
) -> None:
    """Both are equal; `as_theirs` gives our tensors under their names, gradients that end in `zero` are 0."""
    missing, unexpected = model.load_state_dict(as_theirs(case, weights(case, CPU)), strict=False)
    assert unexpected == [] and missing == (["lm_head.weight"] if case.tied else [])
    logits = logits_of(model, batch)
    loss = functional.cross_entropy(logits.flatten(0, 1), ignored_labels(batch).flatten())
    loss.backward()
    found = dense_run(case, batch)
    assert found.gradients.keys() == shapes(case).keys()
    assert largest_difference(found.logits, logits) < ALLOWED
    assert abs(found.loss - loss.detach()) < ALLOWED
    gradients = as_theirs(case, found.gradients)
    right = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == right.keys()
    for name, gradient in right.items():
        if name.endswith(zero):
            assert gradients[name].abs().max() < ALLOWED and gradient.abs().max() < ALLOWED
        else:
            assert largest_difference(gradients[name], gradient) < ALLOWED, name


class DoubleTorch:
    """The module torch, where float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def double_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("opt", "llama", "qwen3"):
        module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
        monkeypatch.setattr(module, "torch", DoubleTorch())


GPT2 = (
    "tp=1 hidden=32 heads=4 kv_heads=4 vocab=61 seq=11 batch=3 seed=1",
    "tp=1 hidden=24 heads=3 kv_heads=3 ffn=40 vocab=50 seq=7 batch=2 layers=3 tied=false seed=2",
)


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


PLAIN = {"bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager"}


def gpt2(case: Case) -> torch.nn.Module:
    config = transformers().GPT2Config(
        vocab_size=case.vocab,
        n_positions=case.seq,
        n_embd=case.hidden,
        n_layer=case.layers,
        n_head=case.heads,
        n_inner=case.ffn,
        tie_word_embeddings=case.tied,
        **PLAIN,
    )
    model: torch.nn.Module = transformers().GPT2LMHeadModel(config)
    return model.double().eval()


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


@pytest.mark.parametrize("text", GPT2)
def test_dense_gpt_equals_hugging_face_gpt2(text: str) -> None:
    case = Case.parse(text)
    equal(case, rows(case, seed=case.seed), gpt2(case), as_gpt2, lambda model, batch: model(batch.tokens).logits)


def opt(case: Case) -> torch.nn.Module:
    config = transformers().OPTConfig(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        ffn_dim=case.ffn,
        max_position_embeddings=case.seq,
        num_attention_heads=case.heads,
        tie_word_embeddings=case.tied,
        pad_token_id=None,
        **PLAIN,
    )
    model: torch.nn.Module = transformers().OPTForCausalLM(config)
    return model.double().eval()


def as_opt(_case: Case, ours: Tensors) -> Tensors:
    """Their table has two rows before position 0: zeros."""
    table, stem = "embedding.positions.weight", "model.decoder"
    names = {"embedding.tokens": f"{stem}.embed_tokens", "embedding.positions": f"{stem}.embed_positions"}
    names |= {"final_norm": f"{stem}.final_layer_norm", "mlp.w1": "fc1", "mlp.w2": "fc2"}
    names |= {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
    names |= {f"attention.w{x}": f"self_attn.{'out' if x == 'o' else x}_proj" for x in "qkvo"}
    padded = {**ours, table: functional.pad(ours[table], (0, 0, 2, 0))}
    return renamed(padded, names, f"{stem}.layers", lambda module, value: {module: value})


def test_dense_opt_equals_hugging_face_opt() -> None:
    case = Case.parse("family=opt tp=1 fuse_qkv=false hidden=24 heads=4 ffn=40 vocab=61 seq=9 batch=3 seed=6")
    batch = rows(case, seed=case.seed)
    every = torch.ones_like(batch.tokens)
    # A bias of k adds the same to every score of a query: its gradient is 0.
    equal(case, batch, opt(case), as_opt, lambda m, b: m(b.tokens, attention_mask=every).logits, "k_proj.bias")


SIZES = "tp=1 hidden=48 heads=6 kv_heads=2 ffn=40 vocab=61 seq=13 batch=3 norm=rmsnorm packed=false "
LLAMA = {
    "internlm2": SIZES + "family=internlm2 seed=1",
    "internlm2, fused gate and up": SIZES + "family=internlm2 fuse_mlp=true seed=2",
    "llama, separate q k v": SIZES + "family=llama fuse_qkv=false seed=3",
    "biased and tied": SIZES + "family=llama bias=true tied=true layers=3 kv_heads=3 seed=4",
    "qwen3, q/k norm": SIZES + "family=llama qk_norm=true seed=5",
}


def llama(case: Case) -> torch.nn.Module:
    words = {
        "vocab_size": case.vocab,
        "max_position_embeddings": case.seq * case.batch,
        "hidden_size": case.hidden,
        "intermediate_size": case.ffn,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": case.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": case.bias,
        **PLAIN,
    }
    model: torch.nn.Module = (
        transformers().Qwen3ForCausalLM(transformers().Qwen3Config(**words))
        if case.qk_norm
        else transformers().LlamaForCausalLM(transformers().LlamaConfig(**words, mlp_bias=case.bias))
    )
    return model.double().eval()


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


def their_logits(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Hugging Face's logits, one call for every sentence of a packed row."""
    if batch.cu_seqlens is None:
        logits: Tensor = model(batch.tokens).logits
        return logits
    pieces = [alone(batch, start, end) for start, end in pairwise(batch.cu_seqlens.tolist())]
    return torch.cat([model(piece.tokens).logits for piece in pieces], dim=1)


@pytest.mark.parametrize("text", LLAMA.values(), ids=LLAMA.keys())
def test_dense_model_equals_hugging_face_llama(text: str) -> None:
    case = Case.parse(text)
    equal(case, rows(case, seed=case.seed), llama(case), as_llama, their_logits)


@pytest.mark.parametrize("lengths", [(39,), (1, 38), (13, 5, 1, 20), (20, 19)], ids=str)
def test_packed_row_equals_hugging_face_llama_on_each_sentence(lengths: tuple[int, ...]) -> None:
    case = Case.parse(LLAMA["internlm2"]).but(packed=True)
    equal(case, sentences(case, lengths, seed=5), llama(case), as_llama, their_logits)


def test_comparison_notices_a_sentence_that_sees_its_neighbour() -> None:
    case = Case.parse(LLAMA["internlm2"]).but(packed=True)
    batch = sentences(case, (20, 19), seed=5)
    model = llama(case)
    model.load_state_dict(as_llama(case, weights(case, CPU)))
    merged = dense_run(case, alone(batch, 0, 39))
    assert largest_difference(merged.logits, their_logits(model, batch)) > 1e-3
