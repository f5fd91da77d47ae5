"""Models of Hugging Face's transformers with the sizes of a case, in float64.

GPT is its GPT-2, OPT its OPT, InternLM2 and Llama its Llama. With q/k norm they are its Qwen3, which normalises every
head of q and k before it rotates them.
"""

from typing import Any

import pytest
import torch

from shardproof.reference.case import Case


def _made(case: Case, kind: str, **words: Any) -> torch.nn.Module:
    """The causal model of this kind; transformers is imported when a test first needs it: that takes three seconds."""
    library = pytest.importorskip("transformers", reason="transformers (extra `peers`) is not installed")
    words |= {"vocab_size": case.vocab, "tie_word_embeddings": case.tied, "attn_implementation": "eager"}
    config = library.AutoConfig.for_model(kind, bos_token_id=None, eos_token_id=None, **words)
    model: torch.nn.Module = library.AutoModelForCausalLM.from_config(config)
    return model.double().eval()


def gpt2(case: Case) -> torch.nn.Module:
    sizes = {"n_positions": case.seq, "n_embd": case.hidden, "n_layer": case.layers, "n_head": case.heads}
    return _made(case, "gpt2", n_inner=case.ffn, **sizes)


def _sizes(case: Case) -> dict[str, int]:
    return {"hidden_size": case.hidden, "num_hidden_layers": case.layers, "num_attention_heads": case.heads}


def opt(case: Case) -> torch.nn.Module:
    return _made(case, "opt", ffn_dim=case.ffn, max_position_embeddings=case.seq, pad_token_id=None, **_sizes(case))


def llama(case: Case) -> torch.nn.Module:
    return _made(
        case,
        "qwen3" if case.qk_norm else "llama",
        max_position_embeddings=case.seq * case.batch,
        intermediate_size=case.ffn,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attention_bias=case.bias,
        **_sizes(case),
        **({} if case.qk_norm else {"mlp_bias": case.bias}),
    )
