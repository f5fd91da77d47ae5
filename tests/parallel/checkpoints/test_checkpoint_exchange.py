"""Tests of reference/checkpoints/foreign. Weights of Hugging Face give its logits and
train in parallel; torn and hostile folders are refused.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from shardproof.harness.verdicts.verdict import FAIL
from shardproof.parallel.checkpoints.comparing import compare
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case, CaseError
from shardproof.reference.checkpoints.foreign import stored_tensors
from shardproof.reference.data.batches import micro_batch
from shardproof.reference.model import decoder
from shardproof.reference.model.parameters import drawn_weight, shapes
from shardproof.reports.commands.cli import main
from shardproof.suites.session.prover import Prover
from tests.parallel.checkpoints.layouts import relaid
from tests.reference.model.hugging_face import gpt2, llama

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
SIZES = "layers=2 heads=6 hidden=24 vocab=97 seq=12 batch=2 micro=3 steps=1 lr=0.01 optimizer=adamw bias=false"
GATED = f"{SIZES} kv_heads=3 ffn=42 positions=rope norm=rmsnorm activation=swiglu"
KINDS = {
    "llama": f"{GATED} tied=false mode=tp-sp tp=3",
    "qwen3": f"{GATED} tied=true qk_norm=true fuse_qkv=false fuse_mlp=true mode=tp tp=3",
    "gpt2": f"{SIZES} kv_heads=6 ffn=96 tied=true bias=true mode=tp tp=2".replace("bias=false ", ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_hugging_face_give_its_logits_and_train_in_parallel(
    prover: Prover, tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("safetensors", reason="safetensors (extra `peers`) is not installed")
    model: Any = (gpt2 if kind == "gpt2" else llama)(Case.parse(KINDS[kind]))
    for number, weight in enumerate(model.parameters()):
        torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(number))
    folder = tmp_path / "theirs"
    model.save_pretrained(folder)
    case = Case.parse(f"{KINDS[kind]} load={folder}")
    batch = micro_batch(case, 0, 0, 0, device=torch.device("cpu"))
    ours = decoder.logits(case, {name: drawn_weight(case, name) for name in shapes(case)}, batch)
    with torch.no_grad():
        theirs: Tensor = model(input_ids=batch.tokens).logits
    rounding = 1e-12 if kind == "gpt2" else 1e-6  # transformers computes rotary tables in float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=rounding)
    assert not [one.message for one in prover.proof(case, subject).verdicts if one.verdict == FAIL]
    saved = tmp_path / "ours"
    relaid(case, folder, saved)
    found = compare(str(saved), str(folder))
    assert found.first is None and "B holds parameters alone, so nothing else is compared" in found.notes


def unreadable(folder: Path, kv_heads: int) -> Case:
    """A case that loads a folder whose file is torn, of a model with this number of key and value heads."""
    (folder / "model.safetensors").write_bytes(b"torn")
    config = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": kv_heads}
    (folder / "config.json").write_text(json.dumps(config))
    return Case.parse(f"{KINDS['llama']} load={folder}")


def test_a_torn_file_is_one_sentence_of_a_case(tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch", reason="safetensors (extra `checkpoints`) is not installed")
    with pytest.raises(CaseError, match="has a file that cannot be read, model.safetensors"):
        stored_tensors(unreadable(tmp_path, 3))


def test_other_heads_and_a_package_that_is_missing_are_one_sentence_of_a_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CaseError, match="has 2 key and value heads, not 3; legal: kv_heads=2"):
        stored_tensors(unreadable(tmp_path, 2))
    with pytest.raises(CaseError, match=r"safetensors, which is not installed; legal: pip install 'shardproof\[check"):
        stored_tensors(unreadable(tmp_path, 3))


def _llama() -> dict[str, Tensor]:
    """The tensors of a llama of one layer, 4 query heads of 2 and 2 key and value heads."""
    rows = {"q": 8, "k": 4, "v": 4, "o": 8}
    found = {f"model.layers.0.self_attn.{part}_proj.weight": torch.ones(n, 8) for part, n in rows.items()}
    return found | {f"model.layers.0.mlp.{part}_proj.weight": torch.ones(6, 8) for part in ("gate", "up")}


QUERY, KEY = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
TORN = "model.safetensors (SafetensorError"
HOSTILE: dict[str, tuple[Any, Any, str]] = {
    "a list as its type": (LLAMA | {"model_type": []}, {}, "is a model of model_type []; legal: llama"),
    "cut": ("{", {}, "has a config.json that cannot be read (JSONDecodeError"),
    "no mapping": ([1], {}, "has a config.json that cannot be read (TypeError"),
    "deep": ("[" * 99999, {}, "has a config.json that cannot be read (RecursionError"),
    "no heads": (LLAMA | {"num_key_value_heads": 0}, {}, "4 query heads and 0 key and value heads; legal"),
    "less than none": (LLAMA | {"num_attention_heads": -4}, {}, "of -4 query heads"),
    "no number": (LLAMA | {"num_attention_heads": True}, {}, "of True query heads"),
    "three of four": (LLAMA | {"num_key_value_heads": 3}, {}, "of 4 query heads and 3 key"),
    "one for two": (LLAMA | {"num_key_value_heads": 1}, {}, "wk.weight of 4 rows, which are not 1 heads of 2"),
    "eight for four": (LLAMA | {"num_attention_heads": 8}, {}, "wk.weight of 4 rows, which are not 2 heads of 1"),
    "wide": (LLAMA | {"head_dim": 3}, {}, "wk.weight of 4 rows, which are not 2 heads of 3"),
    "torn": (LLAMA, lambda content: content[:-9], TORN),
    "empty": (LLAMA, lambda _: b"", TORN),
    "whole numbers": (LLAMA, {QUERY: torch.ones(8, 8, dtype=torch.int32)}, "q_proj.weight of torch.int32 with 2 dims"),
    "three dims": (LLAMA, {QUERY: torch.ones(2, 2, 2)}, "q_proj.weight of torch.float32 with 3 dims"),
    "one bias": (LLAMA, {QUERY.replace("weight", "bias"): torch.ones(8)}, "wq.bias without layers.0.attention.wk.bias"),
    "no key": (LLAMA, {KEY: None}, "wq.weight without layers.0.attention.wk.weight"),
    "narrow": (LLAMA, {KEY: torch.ones(4, 6)}, "(8, 8), (4, 6), (4, 8), which are not of 2 kv heads"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    save = pytest.importorskip("safetensors.torch", reason="safetensors (extra `peers`) is not installed").save
    config, change, words = HOSTILE[name]
    tensors = _llama() | (change if isinstance(change, dict) else {})
    content = save({key: tensor for key, tensor in tensors.items() if tensor is not None})
    (tmp_path / "model.safetensors").write_bytes(change(content) if callable(change) else content)
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    fused = tmp_path / "fused"  # beside a checkpoint of torch's format the folder is read in its form
    torch_save({"model.layers.0.attention.wqkv.weight": torch.ones(16, 8)}, checkpoint_id=fused, no_dist=True)
    assert main(["checkpoint", str(tmp_path), str(fused)]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1, error


@pytest.mark.parametrize(
    "marked", ['{"sharded_backend": "torch_dist"}', '["sharded_backend"', '{"sharded_backend": 0}']
)
def test_fake_of_megatron_core_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], marked: str) -> None:
    (tmp_path / "metadata.json").write_text(marked)
    case = f"{KINDS['llama']} load={tmp_path}"
    for metadata, rule in ((None, "holds no checkpoint"), (b"torn", "is a checkpoint that torch cannot read")):
        if metadata:
            (tmp_path / ".metadata").write_bytes(metadata)
        for words in (["checkpoint", str(tmp_path), str(tmp_path)], ["run", case]):
            assert main(words) == 2
            error = capsys.readouterr().err
            assert rule in error and len(error.splitlines()) == 1, error
