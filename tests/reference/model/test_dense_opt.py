"""The dense OPT is OPT: logits, loss and every gradient equal Hugging Face's on the same weights, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from reference.case import Case
from tests.reference.model.dense_run import rows
from tests.reference.model.hugging_face import DoubleTorch, equal

transformers = pytest.importorskip("transformers", reason="the extra `peers` is not installed")
modeling_opt = pytest.importorskip("transformers.models.opt.modeling_opt")
pytestmark = pytest.mark.peers

OFFSET = 2
"""Rows that Hugging Face's position table has before position 0."""


def hugging_face(case: Case) -> torch.nn.Module:
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


def renamed(case: Case, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors (weights or gradients) under OPT's names; positions get the rows that nobody uses, zeros."""
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
    equal(
        case, batch, hugging_face(case), renamed, lambda m, b: m(b.tokens, attention_mask=every).logits, "k_proj.bias"
    )
