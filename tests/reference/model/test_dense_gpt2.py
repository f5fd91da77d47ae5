"""The dense GPT is GPT-2: logits, loss and every gradient equal Hugging Face's on the same weights, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference.case import Case
from tests.reference.model.dense_run import rows
from tests.reference.model.hugging_face import equal

transformers = pytest.importorskip("transformers", reason="the extra `peers` is not installed")
pytestmark = pytest.mark.peers

CASES = (
    "tp=1 hidden=32 heads=4 kv_heads=4 vocab=61 seq=11 batch=3 seed=1",
    "tp=1 hidden=24 heads=3 kv_heads=3 ffn=40 vocab=50 seq=7 batch=2 layers=3 tied=false seed=2",
)


def hugging_face(case: Case) -> torch.nn.Module:
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


def renamed(case: Case, ours: dict[str, Tensor]) -> dict[str, Tensor]:
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
    equal(
        case, rows(case, seed=case.seed), hugging_face(case), renamed, lambda model, batch: model(batch.tokens).logits
    )
