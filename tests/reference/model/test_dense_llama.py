"""The dense InternLM2 and Llama are Hugging Face's Llama on mapped weights: logits, loss, every gradient, in float64.

With q/k norm they are its Qwen3, which normalises every head of q and k before it rotates them. Their code runs with
`DoubleTorch`, since it would round to float32.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from reference.case import Case
from reference.data.batches import Batch
from reference.model.parameters import weights
from tests.reference.model.dense_run import CPU, alone, dense_run, largest_difference, rows, sentences
from tests.reference.model.hugging_face import DoubleTorch, equal

transformers = pytest.importorskip("transformers", reason="the extra `peers` is not installed")
modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")
modeling_qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
pytestmark = pytest.mark.peers

SIZES = "tp=1 hidden=48 heads=6 kv_heads=2 ffn=40 vocab=61 seq=13 batch=3 norm=rmsnorm packed=false "
CASES = {
    "internlm2": SIZES + "family=internlm2 seed=1",
    "internlm2, fused gate and up": SIZES + "family=internlm2 fuse_mlp=true seed=2",
    "llama, separate q k v": SIZES + "family=llama fuse_qkv=false seed=3",
    "biased and tied": SIZES + "family=llama bias=true tied=true layers=3 kv_heads=3 seed=4",
    "qwen3, q/k norm": SIZES + "family=llama qk_norm=true seed=5",
}


@pytest.fixture(autouse=True)
def double_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "torch", DoubleTorch())
    monkeypatch.setattr(modeling_qwen3, "torch", DoubleTorch())


def hugging_face(case: Case) -> torch.nn.Module:
    words = {
        "vocab_size": case.vocab,
        "max_position_embeddings": case.seq * case.batch,
        "hidden_size": case.hidden,
        "intermediate_size": case.ffn,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": case.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": case.bias,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    model: torch.nn.Module = (
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**words))
        if case.qk_norm
        else transformers.LlamaForCausalLM(transformers.LlamaConfig(**words, mlp_bias=case.bias))
    )
    return model.double()


def renamed(case: Case, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors (weights or gradients) under Llama's names, the fused ones taken apart."""
    names = {"embedding.tokens": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    parts = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    parts |= {f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"}
    parts |= {f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
    parts |= {"mlp.w1": "mlp.gate_proj", "mlp.w3": "mlp.up_proj", "mlp.w2": "mlp.down_proj"}
    for layer in range(case.layers):
        names |= {f"layers.{layer}.{part}": f"model.layers.{layer}.{theirs}" for part, theirs in parts.items()}
    theirs: dict[str, Tensor] = {}
    for name, value in ours.items():
        module, _, leaf = name.rpartition(".")
        for part, piece in apart(case, module, value).items():
            theirs[f"{names[part]}.{leaf}"] = piece
    return theirs


def apart(case: Case, module: str, value: Tensor) -> dict[str, Tensor]:
    """A fused tensor as its parts, by the name of the module that each part would be."""
    if module.endswith(".wqkv"):
        stem, group = module.removesuffix("qkv"), case.heads // case.kv_heads
        value = value.unflatten(0, (case.kv_heads, group + 2, case.head_dim))
        q, k, v = value.split((group, 1, 1), dim=1)
        return {stem + "q": q.flatten(0, 2), stem + "k": k.flatten(0, 2), stem + "v": v.flatten(0, 2)}
    if module.endswith(".w13"):
        stem = module.removesuffix("13")
        return {stem + "1": value[: case.ffn], stem + "3": value[case.ffn :]}
    return {module: value}


def their_logits(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Hugging Face's logits, one call for every sentence of a packed row."""
    if batch.cu_seqlens is None:
        logits: Tensor = model(batch.tokens).logits
        return logits
    pieces = [alone(batch, start, end) for start, end in pairwise(batch.cu_seqlens.tolist())]
    return torch.cat([model(piece.tokens).logits for piece in pieces], dim=1)


def check_equal(case: Case, batch: Batch) -> None:
    equal(case, batch, hugging_face(case), renamed, their_logits)


@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
def test_dense_model_equals_hugging_face_llama(text: str) -> None:
    case = Case.parse(text)
    check_equal(case, rows(case, seed=case.seed))


@pytest.mark.parametrize("lengths", [(39,), (1, 38), (13, 5, 1, 20), (20, 19)], ids=str)
def test_packed_row_equals_hugging_face_llama_on_each_sentence(lengths: tuple[int, ...]) -> None:
    case = Case.parse(CASES["internlm2"]).but(packed=True)
    check_equal(case, sentences(case, lengths, seed=5))


def test_comparison_notices_a_sentence_that_sees_its_neighbour() -> None:
    case = Case.parse(CASES["internlm2"]).but(packed=True)
    batch = sentences(case, (20, 19), seed=5)
    merged = dense_run(case, alone(batch, 0, 39))
    assert largest_difference(merged.logits, their_logits(loaded(case), batch)) > 1e-3


def loaded(case: Case) -> torch.nn.Module:
    model = hugging_face(case)
    model.load_state_dict(renamed(case, weights(case, CPU)))
    return model
