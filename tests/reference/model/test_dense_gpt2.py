"""The dense GPT is GPT-2, the dense OPT is OPT: logits, loss and every gradient equal Hugging Face's, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from reference.case import Case
from tests.reference.model.dense_run import rows
from tests.reference.model.hugging_face import DoubleTorch, equal

transformers = pytest.importorskip("transformers", reason="the extra `peers` is not installed")
pytestmark = pytest.mark.peers

CASES = (
    "tp=1 hidden=32 heads=4 kv_heads=4 vocab=61 seq=11 batch=3 seed=1",
    "tp=1 hidden=24 heads=3 kv_heads=3 ffn=40 vocab=50 seq=7 batch=2 layers=3 tied=false seed=2",
)


def gpt2(case: Case) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=case.vocab,
        n_positions=case.seq,
        n_embd=case.hidden,
        n_layer=case.layers,
        n_head=case.heads,
        n_inner=case.ffn,
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=case.tied,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config)
    return model.double()


def as_gpt2(case: Case, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors (weights or gradients) under GPT-2's names and in its layouts."""
    names = {"embedding.tokens": "transformer.wte", "embedding.positions": "transformer.wpe"}
    names |= {"final_norm": "transformer.ln_f", "head": "lm_head"}
    parts = {"attention_norm": "ln_1", "attention.wqkv": "attn.c_attn", "attention.wo": "attn.c_proj"}
    parts |= {"mlp_norm": "ln_2", "mlp.w1": "mlp.c_fc", "mlp.w2": "mlp.c_proj"}
    for layer in range(case.layers):
        names |= {f"layers.{layer}.{part}": f"transformer.h.{layer}.{theirs}" for part, theirs in parts.items()}
    theirs: dict[str, Tensor] = {}
    for name, value in ours.items():
        module, _, leaf = name.rpartition(".")
        theirs[f"{names[module]}.{leaf}"] = laid_out(case, module, value)
    return theirs


def laid_out(case: Case, module: str, value: Tensor) -> Tensor:
    """GPT-2's layout of one tensor: qkv is [q|k|v] instead of per group, and Conv1D weights are [in, out]."""
    if module.endswith("wqkv"):
        value = value.unflatten(0, (case.heads, 3, case.head_dim)).transpose(0, 1).flatten(0, 2)
    is_conv1d = value.dim() == 2 and (".attention." in module or ".mlp." in module)
    return value.T if is_conv1d else value


@pytest.mark.parametrize("text", CASES)
def test_dense_gpt_equals_hugging_face_gpt2(text: str) -> None:
    case = Case.parse(text)
    equal(case, rows(case, seed=case.seed), gpt2(case), as_gpt2, lambda model, batch: model(batch.tokens).logits)


modeling_opt = pytest.importorskip("transformers.models.opt.modeling_opt")

OFFSET = 2
"""Rows that Hugging Face's position table has before position 0."""


def opt(case: Case) -> torch.nn.Module:
    config = transformers.OPTConfig(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        ffn_dim=case.ffn,
        max_position_embeddings=case.seq,
        do_layer_norm_before=True,
        num_attention_heads=case.heads,
        activation_function="relu",
        dropout=0.0,
        layerdrop=0.0,
        attention_dropout=0.0,
        tie_word_embeddings=case.tied,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model: torch.nn.Module = transformers.OPTForCausalLM(config)
    return model.double()


def as_opt(case: Case, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors (weights or gradients) under OPT's names; positions get the unused rows, zeros."""
    stem = "model.decoder."
    names = {"embedding.tokens": stem + "embed_tokens", "embedding.positions": stem + "embed_positions"}
    names |= {"final_norm": stem + "final_layer_norm"}
    parts = {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
    parts |= {
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
    }
    parts |= {"attention.wo": "self_attn.out_proj", "mlp.w1": "fc1", "mlp.w2": "fc2"}
    for layer in range(case.layers):
        names |= {f"layers.{layer}.{part}": f"{stem}layers.{layer}.{theirs}" for part, theirs in parts.items()}
    theirs = {}
    for name, value in ours.items():
        module, _, leaf = name.rpartition(".")
        theirs[f"{names[module]}.{leaf}"] = value
    theirs[stem + "embed_positions.weight"] = functional.pad(ours["embedding.positions.weight"], (0, 0, OFFSET, 0))
    return theirs


def test_dense_opt_equals_hugging_face_opt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_opt, "torch", DoubleTorch())
    case = Case.parse("family=opt tp=1 fuse_qkv=false hidden=24 heads=4 ffn=40 vocab=61 seq=9 batch=3 seed=6")
    batch = rows(case, seed=case.seed)
    every = torch.ones_like(batch.tokens)
    # A bias of k adds the same to every score of a query: its gradient is 0.
    equal(case, batch, opt(case), as_opt, lambda m, b: m(b.tokens, attention_mask=every).logits, "k_proj.bias")
