"""Weights of Hugging Face: they give its logits, train in parallel, are compared and written back; what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checking.evidence import FAIL
from parallel.checkpoints.comparing import compare, export
from parallel.checkpoints.errors import CheckpointError
from parallel.subject import subject
from reference.case import Case, CaseError
from reference.data.batches import micro_batch
from reference.model import decoder
from reference.model.parameters import drawn, shapes
from reference.stored import stored
from suites.session.prover import Prover
from tests.parallel.checkpoints.layouts import relaid

pytestmark = pytest.mark.peers
SIZES = "layers=2 heads=6 hidden=24 vocab=97 seq=12 batch=2 micro=3 steps=1 lr=0.01 optimizer=adamw bias=false"
GATED = f"{SIZES} kv_heads=3 ffn=42 positions=rope norm=rmsnorm activation=swiglu"
KINDS = {
    "llama": f"{GATED} tied=false mode=tp-sp tp=3",
    "qwen3": f"{GATED} tied=true qk_norm=true fuse_qkv=false fuse_mlp=true mode=tp tp=3",
    "gpt2": f"{SIZES} kv_heads=6 ffn=96 tied=true bias=true mode=tp tp=2".replace("bias=false ", ""),
}


def _model(kind: str) -> Any:
    """A small model of transformers with numbers in every parameter."""
    library = pytest.importorskip("transformers", reason="transformers (extra `peers`) is not installed")
    pytest.importorskip("safetensors", reason="safetensors (extra `peers`) is not installed")
    if kind == "gpt2":
        config = library.GPT2Config(n_embd=24, n_layer=2, n_head=6, vocab_size=97, n_positions=12)
    else:
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3}
        config = library.AutoConfig.for_model(
            kind,
            **sizes,
            head_dim=4,
            intermediate_size=42,
            vocab_size=97,
            rms_norm_eps=1e-5,
            tie_word_embeddings=kind == "qwen3",
        )
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for number, weight in enumerate(model.parameters()):
        torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(number))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_hugging_face_give_its_logits_and_train_in_parallel(
    prover: Prover, tmp_path: Path, kind: str
) -> None:
    model, folder = _model(kind), tmp_path / "theirs"
    model.save_pretrained(folder)
    case = Case.parse(f"{KINDS[kind]} load={folder}")
    batch = micro_batch(case, 0, 0, 0, device=torch.device("cpu"))
    ours = decoder.logits(case, {name: drawn(case, name) for name in shapes(case)}, batch)
    with torch.no_grad():
        theirs: Tensor = model(input_ids=batch.tokens).logits
    rounding = 1e-12 if kind == "gpt2" else 1e-6  # transformers computes rotary tables in float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=rounding)
    assert not [one.message for one in prover.proof(case, subject).verdicts if one.verdict == FAIL]
    saved, back = tmp_path / "ours", tmp_path / "back"
    relaid(case, folder, saved)
    found = compare(str(saved), str(folder))
    assert found.first is None and "B holds parameters alone, so nothing else is compared" in found.notes
    export(str(saved), str(back), str(folder))
    again = type(model).from_pretrained(back, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(again(input_ids=batch.tokens).logits, theirs)
    assert compare(str(back), str(folder)).first is None


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"torn")
    config = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    case = Case.parse(f"{KINDS['llama']} load={folder}")
    with pytest.raises(CaseError, match="has 2 key and value heads, not 3; legal: kv_heads=2"):
        stored(case)
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    with pytest.raises(CaseError, match="has a file that cannot be read, model.safetensors"):
        stored(case)
    with pytest.raises(CheckpointError, match="has a file that cannot be read, model.safetensors"):
        compare(str(folder), str(folder))
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CaseError, match=r"safetensors, which is not installed; legal: pip install 'shardproof\[check"):
        stored(case)
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(CaseError, match=r"is a model of model_type mamba; legal: llama\|qwen3\|gpt2"):
        stored(case)
    (folder / "config.json").write_text("{")
    with pytest.raises(CaseError, match="has a config.json that cannot be read"):
        stored(case)
    with pytest.raises(CheckpointError, match="exists; legal: a folder that does not exist"):
        export(str(folder), str(tmp_path), str(folder))
